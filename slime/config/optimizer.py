"""The optimizer and its schedules, under Megatron-LM's names and defaults."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What Megatron-LM's optimizer group offers, where its name or default is not the dataclass's."""

    optimizer: Literal["adam", "sgd", "muon", "dist_muon"] = flag(
        "adam",
        supported=("adam", "sgd"),
        wanted="adam or sgd: Muon is not an optimizer of the trainer's",
        help="optimizer",
    )
    sgd_momentum: float = flag(0.9, at_least=0, below=1, help="momentum of --optimizer sgd")
    use_stateless_adam: bool = flag(False, help="Adam that keeps no moments: each step is like its first")
    lr: float = flag(1e-6, at_least=0, at_most=1, help="learning rate")
    min_lr: float = flag(0.0, at_least=0, at_most=1, help="learning rate at the end of the decay")
    weight_decay: float = flag(0.01, at_least=0, help="weight decay")
    start_weight_decay: float | None = flag(at_least=0, help="weight decay at the start of its schedule")
    end_weight_decay: float | None = flag(at_least=0, help="weight decay at the end of its schedule")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", help="schedule of the weight decay"
    )
    clip_grad: float = flag(1.0, at_least=0, help="largest global gradient norm")
    use_distributed_optimizer: bool | None = flag(
        True,
        supported=(True,),
        help="shard the optimizer's state over data-parallel ranks (always so)",
        wanted="leave it out, the state is always sharded",
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning-rate schedule; iterations are optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", help="shape of the decay"
    )
    lr_decay_iters: int | None = flag(
        above=0, help="steps of the decay; default all in which the role trains"
    )
    lr_warmup_iters: int = flag(0, at_least=0, help="steps of the warm-up")
    lr_warmup_fraction: float | None = flag(at_least=0, below=1, help="part of the decay steps that warms up")
    lr_warmup_init: float = flag(0.0, at_least=0, at_most=1, help="learning rate at the start of the warm-up")
    lr_wsd_decay_iters: int | None = flag(above=0, help="steps of the final decay of WSD")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", help="shape of the final decay of WSD"
    )
    override_opt_param_scheduler: bool = flag(
        False,
        names=("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
        help="flags win over the checkpoint's schedule",
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        names=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"),
        help="the checkpoint's schedule wins over flags",
    )
