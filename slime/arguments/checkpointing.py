"""Flags: checkpoints, under Megatron-LM's names."""

from dataclasses import dataclass
from typing import Literal

from slime.arguments.flags import flag, refused


@dataclass(frozen=True)
class CheckpointArgs:
    """What is loaded and saved."""

    load: str | None = flag(
        help="checkpoint to go on from; without one there, from --ref-load, else --hf-checkpoint"
    )
    save: str | None = flag(help="directory of checkpoints")
    save_interval: int | None = flag(help="rollouts between two checkpoints")
    save_hf: str | None = flag(help="directory of HF exports, may hold {rollout_id}")
    ckpt_step: int | None = flag(help="iteration of --load; default the latest")
    ckpt_format: Literal["torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"] = flag(
        "torch_dist", supported=("torch_dist",), help="format of checkpoints"
    )
    async_save: bool = flag(False, help="write checkpoints while training goes on")
    no_save_optim: bool | None = flag(const=True, help="leave the optimizer out of checkpoints")
    no_save_rng: bool | None = flag(const=True, help="leave random-number state out of checkpoints")
    no_load_optim: bool | None = flag(const=True, help="do not load the optimizer")
    no_load_rng: bool | None = flag(const=True, help="do not load random-number state")
    finetune: bool = flag(False, help="load weights only and start at iteration 0")
    pretrained_checkpoint: str | None = refused(
        help="checkpoint to fine-tune", wanted="use --load --finetune"
    )
    exit_on_missing_checkpoint: bool = refused(False, help="stop when --load holds no checkpoint")
    no_ckpt_fully_parallel_save: bool = flag(False, help="one data-parallel rank writes for all")
