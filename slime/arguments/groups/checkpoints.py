"""What is loaded and saved, under Megatron-LM's names."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime.arguments.core.flag import flag, option_string, refused
from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.checkpoint_files import (
    CHECKPOINT_MARKER,
    bad_checkpoint,
    has_checkpoint,
    is_release,
    unusable_weights,
)
from slime.arguments.validate.outputs import bad_output


@dataclass(frozen=True)
class CheckpointArgs:
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


def notes(args: Namespace) -> Iterator[str]:
    """Places that nothing is written to or read from."""
    if args.save_interval is None:
        for name in ("save", "save_hf"):
            if getattr(args, name) is not None:
                yield f"{option_string(name)}: no checkpoint will be written without --save-interval"
    if args.async_save and (args.save is None or args.save_interval is None):
        yield "--async-save: has no effect without --save and --save-interval"
    if args.load is not None and args.load != args.save and not has_checkpoint(args.load):
        source = "--ref-load" if args.ref_load is not None else "--hf-checkpoint"
        yield f"--load {args.load}: no checkpoint there, the run begins with the weights of {source}"


def derive(args: Namespace) -> None:
    """``--load`` that holds no checkpoint yet, or what a converter wrote, is a run that starts."""
    converted = args.load is not None and args.ckpt_step is None and is_release(args.load)
    if args.load is not None and (Path(args.load) / CHECKPOINT_MARKER).is_file() and not converted:
        return
    args.no_load_optim = args.no_load_rng = args.finetune = True
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def contradictions(args: Namespace) -> Iterator[str]:
    """An interval without a place."""
    if args.save_interval is not None and args.save is None and args.save_hf is None:
        yield "--save-interval: needs --save or --save-hf"


def missing(args: Namespace) -> Iterator[str]:
    """A checkpoint that cannot be gone on from, and places to write to."""
    if args.load is not None and Path(args.load).exists() and not Path(args.load).is_dir():
        yield f"--load {args.load}: is no directory"
    elif args.load is not None and has_checkpoint(args.load):
        yield from bad_checkpoint(args, "load", args.ckpt_step)
    elif args.check:
        pass  # weights may be elsewhere
    elif args.load is not None and args.exit_on_missing_checkpoint:
        yield f"--load {args.load}: no checkpoint there (--exit-on-missing-checkpoint)"
    elif args.ckpt_step is not None:
        yield f"--ckpt-step {args.ckpt_step}: there is no checkpoint (--load {args.load})"
    yield from bad_output(args, "save", is_directory=True)
    yield from bad_output(args, "save_hf", is_directory=True)


def unusable(args: Namespace) -> Iterator[str]:
    """Weights to start from that cannot be read."""
    yield from unusable_weights(args, "load")


CONFIG_GROUP = ConfigGroup(
    {"checkpoints": CheckpointArgs},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
    missing=missing,
    unusable=unusable,
)
