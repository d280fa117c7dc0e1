"""The loss."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from slime.arguments.config_group import ConfigGroup
from slime.arguments.flags import flag, option_string, path_flag

LOSSES = {
    "policy_loss": "slime.training.losses.policy.policy_loss_function",
    "sft_loss": "slime.training.losses.sft.sft_loss_function",
    "value_loss": "slime.training.losses.value.value_loss_function",
}
"""What ``--loss-type`` names, beside the user's own: fn(args, batch, logits, sum_of_sample_mean)."""
# What a role has of its own, whatever --loss-type says.
_OF_ROLES = ("value_loss",)


@dataclass(frozen=True)
class LossArgs:
    """The loss, how it is reduced, and how it is computed."""

    loss_type: str = flag(
        "policy_loss",
        choices=(*(name for name in LOSSES if name not in _OF_ROLES), "custom_loss"),
        help="which loss",
    )
    custom_loss_function_path: str | None = path_flag("fn(args, batch, logits, sum_of_sample_mean)")
    eps_clip: float = flag(0.2, at_least=0, help="lower PPO clip range")
    eps_clip_high: float | None = flag(at_least=0, help="upper PPO clip range; default --eps-clip")
    eps_clip_c: float | None = flag(above=1, help="dual-clip constant, above 1")
    value_clip: float = flag(0.2, at_least=0, help="how far a critic's values move without being clipped")
    entropy_coef: float = flag(
        0.0, at_least=-10, at_most=10, help="weight of the entropy bonus; below 0 a penalty"
    )
    custom_pg_loss_reducer_function_path: str | None = path_flag(
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer"
    )
    recompute_loss_function: bool = flag(False, help="recompute the loss in backward to save memory")
    log_probs_chunk_size: int = flag(
        -1,
        at_least=1,
        also=(0, -1),
        help="rows per chunk of the log-prob computation; 0 or less for as many as suit the device",
    )
    pg_loss_denominator: float | None = flag(
        at_least=1,
        help="sums of the policy gradient over a rollout are divided by this instead of its length",
    )
    calculate_per_token_loss: bool = flag(False, help="mean over tokens instead of over samples")


@dataclass(frozen=True)
class DerivedLoss:
    """The clip range has both ends."""

    eps_clip_high: float


def derive(args: Namespace) -> None:
    """A clip range with one end given is symmetric."""
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip


# Switches and weights that only the policy loss reads, with the value that asks for nothing.
_OF_POLICY = {
    "use_tis": False,
    "use_opsm": False,
    "use_rollout_logprobs": False,
    "use_kl_loss": False,
    "entropy_coef": 0.0,
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
    if args.pg_loss_denominator is not None:
        for name in ("calculate_per_token_loss", "custom_pg_loss_reducer_function_path"):
            if getattr(args, name):
                yield f"--pg-loss-denominator and {option_string(name)}: only one of them"


CONFIG_GROUP = ConfigGroup(
    {"loss": LossArgs}, derived=DerivedLoss, derive=derive, notes=notes, contradictions=contradictions
)
