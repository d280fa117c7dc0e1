"""Flags: the optimizer and its schedule, under Megatron-LM's names and defaults."""

from dataclasses import dataclass
from typing import Literal

from slime.arguments.flags import flag, refused


@dataclass(frozen=True)
class OptimizerArgs:
    """What Megatron-LM's optimizer group offers, where its name or default is not the dataclass's."""

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = flag(
        "adam", supported=("adam",), help="optimizer"
    )
    lr: float = flag(1e-6, help="learning rate")
    min_lr: float = flag(0.0, help="learning rate at the end of the decay")
    weight_decay: float = flag(0.01, help="weight decay")
    start_weight_decay: float | None = flag(help="weight decay at the start of its schedule")
    end_weight_decay: float | None = flag(help="weight decay at the end of its schedule")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", help="schedule of the weight decay"
    )
    clip_grad: float = flag(1.0, help="largest global gradient norm")
    use_distributed_optimizer: bool | None = flag(
        True,
        supported=(True,),
        help="shard the optimizer's state over data-parallel ranks (always so)",
        wanted="leave it out, the state is always sharded",
    )


@dataclass(frozen=True)
class ScheduleArgs:
    """The learning-rate schedule; iterations are optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", help="shape of the decay"
    )
    lr_decay_iters: int | None = flag(help="steps of the decay; default all steps of the run")
    lr_warmup_iters: int = flag(0, help="steps of the warm-up")
    lr_warmup_fraction: float | None = flag(help="part of the decay steps that warms up")
    lr_warmup_init: float = flag(0.0, help="learning rate at the start of the warm-up")
    lr_wsd_decay_iters: int | None = flag(help="steps of the final decay of WSD")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", help="shape of the final decay of WSD"
    )
    override_opt_param_scheduler: bool = flag(False, help="flags win over the checkpoint's schedule")
    use_checkpoint_opt_param_scheduler: bool = flag(False, help="the checkpoint's schedule wins over flags")


@dataclass(frozen=True)
class PrecisionArgs:
    """Number formats of the trainer."""

    bf16: bool | None = flag(const=True, help="train in bfloat16 (default)")
    fp16: bool = flag(False, help="train in float16")
    accumulate_allreduce_grads_in_fp32: bool = flag(False, help="sum and reduce gradients in float32")
    grad_reduce_in_bf16: bool = flag(False, help="sum and reduce gradients in bfloat16")
    no_check_for_nan_in_loss_and_grad: bool = flag(
        False, help="do not stop on NaN or Inf in loss or gradients"
    )
    initial_loss_scale: float = flag(2.0**32, help="first loss scale of float16 training")
    min_loss_scale: float = flag(1.0, help="smallest loss scale")
    loss_scale: float | None = flag(help="fixed loss scale")
    loss_scale_window: float = flag(1000.0, help="steps without overflow before the scale grows")
    hysteresis: int = flag(2, help="overflows before the scale shrinks")
    fp8_format: Literal["e4m3", "hybrid"] | None = refused(help="float8 training")
    fp8_recipe: str = refused("delayed", help="recipe of float8 scaling")
    fp8_param_gather: bool = refused(False, help="keep parameters in float8")
