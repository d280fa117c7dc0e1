"""The loss."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import given, option_string
from slime.arguments.core.group import ConfigGroup
from slime.config.advantages import ESTIMATORS
from slime.config.loss import SURROGATES, LossConfig


def derive(args: Namespace) -> None:
    """A clip range with one end given is symmetric; the estimator may name a surrogate."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    args.surrogate = args.surrogate or ESTIMATORS[args.advantage_estimator].surrogate or "ppo"
    args.surrogate_function_path = SURROGATES[args.surrogate]


# Switches and weights that only the policy loss reads, with the value that asks for nothing.
_OF_POLICY = {
    "use_tis": False,
    "use_opsm": False,
    "use_rollout_logprobs": False,
    "use_kl_loss": False,
    "entropy_coef": 0.0,
    "surrogate": None,
    "pg_loss_denominator": None,
    "custom_pg_loss_reducer_function_path": None,
}


def notes(args: Namespace) -> Iterator[str]:
    """What imitation has no use for."""
    if args.loss_type != "sft_loss":
        return
    for name, neutral in _OF_POLICY.items():
        if getattr(args, name) != neutral:
            yield f"{option_string(name)}: has no effect with --loss-type sft_loss"


def contradictions(args: Namespace) -> Iterator[str]:
    """A loss without its function, or a function without its loss."""
    if (args.loss_type == "custom_loss") != (args.custom_loss_function_path is not None):
        yield "--loss-type custom_loss and --custom-loss-function-path: each needs the other"
    named = ESTIMATORS[args.advantage_estimator].surrogate
    if named and args.surrogate != named:
        yield (
            f"--surrogate {args.surrogate} and --advantage-estimator {args.advantage_estimator}: "
            f"the estimator names the surrogate {named} (wanted: --advantage-estimator grpo)"
        )
    if args.pg_loss_denominator is not None:
        for name, _ in given(args, "calculate_per_token_loss", "custom_pg_loss_reducer_function_path"):
            yield f"--pg-loss-denominator and {name}: only one of them"


CONFIG_GROUP = ConfigGroup({"loss": LossConfig}, derive=derive, notes=notes, contradictions=contradictions)
