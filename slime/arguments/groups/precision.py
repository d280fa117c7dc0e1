"""The number formats of the trainer."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import flag, flags_of, refused
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.run_args import add_params_dtype

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PrecisionArgs:
    """Number formats of the trainer."""

    bf16: bool | None = flag(const=True, help="train in bfloat16 (default)")
    fp16: bool = flag(False, help="train in float16")
    fp32: bool = flag(False, help="train in float32; the default is bfloat16")
    accumulate_allreduce_grads_in_fp32: bool = flag(False, help="sum and reduce gradients in float32")
    grad_reduce_in_bf16: bool = flag(False, help="sum and reduce gradients in bfloat16")
    no_check_for_nan_in_loss_and_grad: bool = flag(
        False, help="skip steps with NaN or Inf in their gradients, in place of ending the run"
    )
    initial_loss_scale: float = flag(2.0**32, above=0, help="first loss scale of float16 training")
    min_loss_scale: float = flag(1.0, above=0, help="smallest loss scale")
    loss_scale: float | None = flag(above=0, help="fixed loss scale")
    loss_scale_window: float = flag(1000.0, above=0, help="steps without overflow before the scale grows")
    hysteresis: int = flag(2, above=0, help="overflows before the scale shrinks")
    fp8_format: Literal["e4m3", "hybrid"] | None = refused(help="float8 training")
    fp8_recipe: str = refused("delayed", help="recipe of float8 scaling")
    fp8_param_gather: bool = refused(False, help="keep parameters in float8")


_SEARCH = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


@dataclass(frozen=True)
class DerivedPrecision:
    """The one format that parameters have."""

    bf16: bool
    params_dtype: "torch.dtype"


def derive(args: Namespace) -> None:
    """bfloat16 unless told otherwise."""
    chosen = [name for name in ("bf16", "fp16", "fp32") if getattr(args, name)]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]}: only one precision at a time")
    args.bf16 = not (args.fp16 or args.fp32)
    add_params_dtype(args)


def notes(args: Namespace) -> Iterator[str]:
    """How float16 looks for its loss scale, where there is none or a fixed one."""
    if args.fp16 and args.loss_scale is None:
        return
    reason = f"with --loss-scale {args.loss_scale}" if args.fp16 else "without --fp16"
    for spec in flags_of(PrecisionArgs):
        if spec.dest in _SEARCH and getattr(args, spec.dest) != spec.default:
            yield f"{spec.names[0]} {getattr(args, spec.dest)}: has no effect {reason}"


def contradictions(args: Namespace) -> Iterator[str]:
    """Two formats for the same gradients."""
    if args.accumulate_allreduce_grads_in_fp32 and args.grad_reduce_in_bf16:
        yield "--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16: only one of them at a time"
    if args.grad_reduce_in_bf16 and not args.bf16:
        yield "--grad-reduce-in-bf16: needs --bf16"


CONFIG_GROUP = ConfigGroup(
    {"precision": PrecisionArgs},
    derived=DerivedPrecision,
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
