"""From rewards to advantages."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import given
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.rollout import answers
from slime.config.advantages import ESTIMATORS, AdvantageConfig


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
    return not (_makes_own_groups(args) or any(value for _, value in given(args, *others)))


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
    {"advantages": AdvantageConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
