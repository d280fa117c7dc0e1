"""What must hold in a healthy run, checked with ``--ci-test``."""

from collections.abc import Mapping, Sequence
from typing import Any

from slime.config.training import TrainingConfig

_KL_BOUND = 1e-8


class InvariantError(RuntimeError):
    """A training step broke an invariant."""


def check_invariants(config: TrainingConfig, rollout_id: int, steps: Sequence[Mapping[str, Any]]) -> None:
    """Trainer and engine agree in every step; the first step of a rollout starts on policy.

    A metric that is missing says nothing, so it breaks the invariant, too.

    Args:
        steps: per optimizer step its ``train/...`` metrics.

    Raises:
        InvariantError: names the metric, its value and the bound.
    """
    threshold = config.ci.ci_train_rollout_logprob_abs_diff_threshold
    for step in steps:
        _bound(rollout_id, step, "train/train_rollout_logprob_abs_diff", threshold)
    # The engine's log-probs as the old policy differ from the trainer's by rounding, older weights by more.
    other_policy = config.off_policy.use_rollout_logprobs or config.off_policy.keep_old_actor
    if not config.ci.ci_disable_kl_checker and not other_policy:
        _bound(rollout_id, steps[0], "train/ppo_kl", _KL_BOUND)
        # The reference chooses experts itself, the policy is given those of the engine.
        if rollout_id == 0 and config.kl.use_kl_loss and not config.off_policy.use_rollout_routing_replay:
            _bound(rollout_id, steps[0], "train/kl_loss", _KL_BOUND)


def _bound(rollout_id: int, step: Mapping[str, Any], name: str, bound: float) -> None:
    value = step.get(name)
    # Also false for NaN.
    if value is None or not abs(value) <= bound:
        found = f"no {name}" if value is None else f"{name} {value}"
        raise InvariantError(f"--ci-test: {found} at rollout {rollout_id}, wanted at most {bound}")
