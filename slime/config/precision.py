"""The number formats of the trainer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.config.flag import flag, refused

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the trainer."""

    bf16: bool = flag(const=True, help="train in bfloat16 (default)")
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

    @property
    def params_dtype(self) -> "torch.dtype":
        """The one format that parameters have."""
        import torch  # takes a second, and the driver reads no number format

        return torch.float16 if self.fp16 else torch.float32 if self.fp32 else torch.bfloat16
