"""What is loaded and saved, under Megatron-LM's names."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag, refused


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is loaded and saved."""

    load: str | None = flag(
        place=True, help="checkpoint to go on from; without one there, from --ref-load, else --hf-checkpoint"
    )
    save: str | None = flag(place=True, help="directory of checkpoints")
    save_interval: int | None = flag(
        names=("--save-interval", "--persistent-save-interval"),
        above=0,
        help="rollouts between two checkpoints",
    )
    keep_checkpoints: int | None = flag(
        at_least=2,  # roles save one after the other: the newest that all have may be the last but one of one
        help="how many checkpoints --save holds; older ones are removed after each save; default all",
    )
    verify_checkpoint: Literal["none", "sizes", "checksums"] = flag(
        "sizes",
        help="what of the files of --load is held against what was written (checksums reads all of them); if "
        "the newest iteration is damaged, the one before it is loaded",
    )
    max_failed_saves: int = flag(
        2,
        at_least=0,
        help="saves in a row that may fail, as on a full disk, before the run ends; the last save of a run "
        "may not",
    )
    save_hf: str | None = flag(place=True, help="directory of HF exports, may hold {rollout_id}")
    ckpt_step: int | None = flag(at_least=0, help="iteration of --load; default the latest")
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
    exit_on_missing_checkpoint: bool = flag(False, help="stop when --load holds no checkpoint")
    no_ckpt_fully_parallel_save: bool = flag(
        False,
        names=("--no-ckpt-fully-parallel-save", "--disable-ckpt-fully-parallel-save"),
        help="one data-parallel rank writes for all",
    )
