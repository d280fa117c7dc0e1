"""The number formats of the trainer."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import changed, flags_of, given
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.run_args import add_params_dtype
from slime.config.precision import PrecisionConfig

if TYPE_CHECKING:
    import torch

_SEARCH = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


@dataclass(frozen=True)
class DerivedPrecision:
    """`PrecisionConfig.params_dtype`, which hooks find among ``args``."""

    params_dtype: "torch.dtype"


def derive(args: Namespace) -> None:
    """bfloat16 unless told otherwise."""
    chosen = [name for name, _ in given(args, "bf16", "fp16", "fp32")]
    if len(chosen) > 1:
        raise UsageError(f"{chosen[0]} and {chosen[1]}: only one precision at a time")
    args.bf16 = not (args.fp16 or args.fp32)
    add_params_dtype(args)


def notes(args: Namespace) -> Iterator[str]:
    """How float16 looks for its loss scale, where there is none or a fixed one."""
    if args.fp16 and args.loss_scale is None:
        return
    reason = f"with --loss-scale {args.loss_scale}" if args.fp16 else "without --fp16"
    for spec, value in changed(args, flags_of(PrecisionConfig)):
        if spec.dest in _SEARCH:
            yield f"{spec.names[0]} {value}: has no effect {reason}"


def contradictions(args: Namespace) -> Iterator[str]:
    """Two formats for the same gradients."""
    if args.accumulate_allreduce_grads_in_fp32 and args.grad_reduce_in_bf16:
        yield "--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16: only one of them at a time"
    if args.grad_reduce_in_bf16 and not args.bf16:
        yield "--grad-reduce-in-bf16: needs --bf16"


CONFIG_GROUP = ConfigGroup(
    {"precision": PrecisionConfig},
    derived=DerivedPrecision,
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
