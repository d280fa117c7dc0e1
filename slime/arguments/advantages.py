"""From rewards to advantages."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments.config_group import ConfigGroup
from slime.arguments.flags import flag, path_flag
from slime.arguments.rollout import answers


@dataclass(frozen=True)
class Estimator:
    """A way from rewards to returns.

    Attributes:
        returns: dotted path of fn(args, shard) -> per sample [R] float32, see ``slime.training.estimators``.
        centred: rewards are first centred on the mean of a prompt's samples ...
        scaled: ... and divided by their deviation.
        leaves_one_out: each execution's own reward is left out of the mean that it is centred on.
        penalised: whether the reward has a KL to the reference model in it (``--kl-coef``).
        discounted: whether ``--gamma`` matters.
        whitened: whether advantages have to be whitened over the batch.
        critic: whether it needs values.
    """

    returns: str
    centred: bool = False
    scaled: bool = False
    leaves_one_out: bool = False
    penalised: bool = False
    discounted: bool = False
    whitened: bool = False
    critic: bool = False


_GROUP_RELATIVE = Estimator(
    "slime.training.estimators.grpo.group_relative_returns", centred=True, scaled=True
)
_REINFORCE = "slime.training.estimators.reinforce_plus_plus"
ESTIMATORS: dict[str, Estimator] = {
    "grpo": _GROUP_RELATIVE,
    "gspo": _GROUP_RELATIVE,
    "cispo": _GROUP_RELATIVE,
    "rloo": Estimator(
        "slime.training.estimators.grpo.group_relative_returns", centred=True, leaves_one_out=True
    ),
    "reinforce_plus_plus": Estimator(
        f"{_REINFORCE}.token_returns", penalised=True, discounted=True, whitened=True
    ),
    "reinforce_plus_plus_baseline": Estimator(
        f"{_REINFORCE}.baseline_returns", centred=True, penalised=True, whitened=True
    ),
    "ppo": Estimator("slime.training.estimators.ppo.gae", penalised=True, discounted=True, critic=True),
}
"""What ``--advantage-estimator`` names."""


@dataclass(frozen=True)
class AdvantageArgs:
    """From rewards to advantages."""

    advantage_estimator: str = flag("grpo", choices=tuple(ESTIMATORS), help="how advantages are made")
    disable_compute_advantages_and_returns: bool = flag(
        False, help="no advantages, as for SFT; sets compute_advantages_and_returns to False"
    )
    custom_advantage_function_path: str | None = path_flag(
        "fn(args, rollout_data) sets advantages and returns"
    )
    gamma: float = flag(1.0, at_least=0, at_most=1, help="discount")
    lambd: float = flag(1.0, at_least=0, at_most=1, help="lambda of GAE, of --advantage-estimator ppo")
    normalize_advantages: bool = flag(False, help="whiten advantages over the batch")
    disable_grpo_std_normalization: bool = flag(
        False, help="do not divide by the group's standard deviation; sets grpo_std_normalization to False"
    )
    disable_rewards_normalization: bool = flag(
        False, help="train on raw rewards; sets rewards_normalization to False"
    )


@dataclass(frozen=True)
class DerivedAdvantages:
    """Positive names of switches that say what is not."""

    compute_advantages_and_returns: bool
    grpo_std_normalization: bool
    rewards_normalization: bool


def derive(args: Namespace) -> None:
    """Nothing is divided by the deviation of a single sample."""
    args.compute_advantages_and_returns = not args.disable_compute_advantages_and_returns
    args.rewards_normalization = not args.disable_rewards_normalization
    args.grpo_std_normalization = not args.disable_grpo_std_normalization and args.n_samples_per_prompt != 1


def contradictions(args: Namespace) -> Iterator[str]:
    """Estimators that lack what they need."""
    if ESTIMATORS[args.advantage_estimator].whitened and not args.normalize_advantages:
        yield f"--advantage-estimator {args.advantage_estimator}: needs --normalize-advantages"
    if args.loss_type != "policy_loss":
        return
    if not args.compute_advantages_and_returns and not args.rollout_data_postprocess_path:
        yield (
            "--disable-compute-advantages-and-returns: the policy loss needs advantages "
            "(wanted: --rollout-data-postprocess-path that makes them, or without)"
        )


def _learns_by_comparison_alone(args: Namespace) -> bool:
    """Whether nothing but rewards that are compared within a prompt's samples moves the weights."""
    if args.num_rollout == 0 or args.debug_rollout_only or args.custom_advantage_function_path is not None:
        return False
    if args.disable_rewards_normalization or not ESTIMATORS[args.advantage_estimator].centred:
        return False
    others = ("use_opd", "kl_coef", "kl_loss_coef", "entropy_coef", "enable_mtp_training")
    return not (_makes_own_groups(args) or any(getattr(args, name) for name in others))


def notes(args: Namespace) -> Iterator[str]:
    """Numbers that the estimator does not heed, and groups of one."""
    if args.loss_type != "policy_loss" or args.disable_compute_advantages_and_returns:
        return
    if args.custom_advantage_function_path is not None:
        return
    name, estimator = args.advantage_estimator, ESTIMATORS[args.advantage_estimator]
    if args.n_samples_per_prompt == 1 and _learns_by_comparison_alone(args):
        yield (
            f"--n-samples-per-prompt 1: {name} compares the samples of a prompt, so every advantage is 0 and "
            "nothing is learned (wanted: 2 or more, or --disable-rewards-normalization)"
        )
    if args.kl_coef and not estimator.penalised:
        yield (
            f"--kl-coef {args.kl_coef}: {name} has no KL in its rewards, it will only be measured "
            "(for a KL in the loss: --use-kl-loss)"
        )
    if args.gamma != 1 and not estimator.discounted:
        yield f"--gamma {args.gamma}: has no effect, {name} does not discount"
    if args.disable_rewards_normalization and not estimator.centred:
        yield f"--disable-rewards-normalization: has no effect, {name} does not normalize rewards"
    if args.disable_grpo_std_normalization and not estimator.scaled:
        yield f"--disable-grpo-std-normalization: has no effect, {name} does not divide by a deviation"


def _makes_own_groups(args: Namespace) -> bool:
    """Whether user code may compare rewards otherwise, or make several samples of one prompt."""
    return bool(
        args.custom_reward_post_process_path
        or args.custom_convert_samples_to_train_data_path
        or args.custom_generate_function_path
        or args.rollout_data_postprocess_path
        or not answers(args.rollout_function_path)
    )


CONFIG_GROUP = ConfigGroup(
    {"advantages": AdvantageArgs},
    derived=DerivedAdvantages,
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
