import pytest

from slime.config.run import run_config
from slime.training.invariants import InvariantError, check_invariants
from tests.run_args import run_args

GOOD = {"train/ppo_kl": 0.0, "train/kl_loss": 0.0, "train/train_rollout_logprob_abs_diff": 0.01}


def _config(**overrides):
    return run_config(run_args(**{"use_kl_loss": True, **overrides}))


def test_a_healthy_rollout_passes():
    check_invariants(_config(), 0, [GOOD, {**GOOD, "train/ppo_kl": 0.1}])
    check_invariants(_config(), 1, [{**GOOD, "train/kl_loss": 0.1}])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train/ppo_kl", 1e-3),
        ("train/kl_loss", 1e-3),
        ("train/train_rollout_logprob_abs_diff", 0.2),
        ("train/train_rollout_logprob_abs_diff", float("nan")),
    ],
)
def test_a_broken_invariant_is_named(name, value):
    with pytest.raises(InvariantError, match=name):
        check_invariants(_config(), 0, [{**GOOD, name: value}])


@pytest.mark.parametrize("name", GOOD)
def test_a_metric_that_is_missing_breaks_its_invariant(name):
    step = {other: value for other, value in GOOD.items() if other != name}
    with pytest.raises(InvariantError, match=f"no {name} at rollout 0"):
        check_invariants(_config(), 0, [step])


def test_only_metrics_that_the_flags_ask_for_can_be_missing():
    gap = {"train/train_rollout_logprob_abs_diff": 0.01}
    check_invariants(_config(use_kl_loss=False), 0, [{**gap, "train/ppo_kl": 0.0}])
    check_invariants(_config(ci_disable_kl_checker=True), 0, [gap])
    check_invariants(_config(use_rollout_logprobs=True), 0, [gap])


def test_checks_on_kl_can_be_left_out():
    check_invariants(_config(ci_disable_kl_checker=True), 0, [{**GOOD, "train/ppo_kl": 1.0}])
