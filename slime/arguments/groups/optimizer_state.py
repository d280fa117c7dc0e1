"""The device and number format of the optimizer's state, under Megatron-LM's names and defaults."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import given
from slime.arguments.core.group import ConfigGroup
from slime.config.optimizer_state import OptimizerStateConfig

_OF_OFFLOAD = ("overlap_cpu_optimizer_d2h_h2d", "no_pin_cpu_grads", "no_pin_cpu_params")


def notes(args: Namespace) -> Iterator[str]:
    """What changes nothing without another flag."""
    for name, _ in given(args, *_OF_OFFLOAD):
        if not args.optimizer_cpu_offload:
            yield f"{name}: has no effect without --optimizer-cpu-offload"
    if args.optimizer_offload_fraction != 1 and not args.optimizer_cpu_offload:
        fraction = args.optimizer_offload_fraction
        yield f"--optimizer-offload-fraction {fraction}: has no effect without --optimizer-cpu-offload"
    if args.use_precision_aware_optimizer and {args.exp_avg_dtype, args.exp_avg_sq_dtype} == {"fp32"}:
        yield (
            "--use-precision-aware-optimizer: has no effect, the formats of --exp-avg-dtype and "
            "--exp-avg-sq-dtype are float32"
        )


def contradictions(args: Namespace) -> Iterator[str]:
    """Formats that nothing asked for, and moments that are not there."""
    for name, value in given(args, "exp_avg_dtype", "exp_avg_sq_dtype"):
        if value != "fp32" and not args.use_precision_aware_optimizer:
            yield f"{name} {value}: needs --use-precision-aware-optimizer"
    if args.optimizer != "adam":
        for name, _ in given(args, "use_precision_aware_optimizer", "use_stateless_adam"):
            yield f"{name}: needs --optimizer adam"
    if args.use_stateless_adam and args.use_precision_aware_optimizer:
        yield "--use-stateless-adam: has no moments for --use-precision-aware-optimizer to keep"


CONFIG_GROUP = ConfigGroup(
    {"optimizer state": OptimizerStateConfig}, notes=notes, contradictions=contradictions
)
