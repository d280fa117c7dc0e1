"""The device and number format of the optimizer's state, under Megatron-LM's names and defaults."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag

_SCALED = "fp32 or bf16: smaller formats need the scaling of TransformerEngine, which is not used"
_MAIN = "fp32: main weights and gradients stay in float32"


@dataclass(frozen=True, kw_only=True)
class OptimizerStateConfig:
    """The device and number format of the optimizer's moments."""

    optimizer_cpu_offload: bool = flag(
        False, help="keep moments, and compute steps, on the host; without a GPU they are there anyway"
    )
    optimizer_offload_fraction: float = flag(
        1.0, at_least=0, at_most=1, help="part of the weights for which --optimizer-cpu-offload does so"
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, help="copy weights and gradients between GPU and host while others are stepped"
    )
    no_pin_cpu_grads: bool = flag(False, help="host copies of gradients in memory that is not pinned")
    no_pin_cpu_params: bool = flag(False, help="host copies of weights in memory that is not pinned")
    use_torch_optimizer_for_cpu_offload: bool = flag(
        False, help="torch's kernel computes steps on the host (always so)"
    )
    use_precision_aware_optimizer: bool = flag(
        False, help="let --exp-avg-dtype and --exp-avg-sq-dtype choose the formats of the moments"
    )
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag(
        "fp32", supported=("fp32", "bf16"), wanted=_SCALED, help="format of the first moment"
    )
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = flag(
        "fp32", supported=("fp32", "bf16"), wanted=_SCALED, help="format of the second moment"
    )
    main_params_dtype: Literal["fp32", "fp16"] = flag(
        "fp32", supported=("fp32",), wanted=_MAIN, help="format of the main weights"
    )
    main_grads_dtype: Literal["fp32", "bf16"] = flag(
        "fp32", supported=("fp32",), wanted=_MAIN, help="format of the main gradients"
    )
