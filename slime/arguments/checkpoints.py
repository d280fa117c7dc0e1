"""What is loaded and saved, under Megatron-LM's names."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime.arguments.concern import Concern
from slime.arguments.flags import flag, option_string, refused
from slime.arguments.outputs import bad_output

CHECKPOINT_MARKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class CheckpointArgs:
    """What is loaded and saved."""

    load: str | None = flag(
        place=True, help="checkpoint to go on from; without one there, from --ref-load, else --hf-checkpoint"
    )
    save: str | None = flag(place=True, help="directory of checkpoints")
    save_interval: int | None = flag(above=0, help="rollouts between two checkpoints")
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
    exit_on_missing_checkpoint: bool = refused(False, help="stop when --load holds no checkpoint")
    no_ckpt_fully_parallel_save: bool = flag(False, help="one data-parallel rank writes for all")


def derive(args: Namespace) -> None:
    """``--load`` that holds no checkpoint yet is a run that starts: weights come from elsewhere."""
    if args.load is not None and (Path(args.load) / CHECKPOINT_MARKER).is_file():
        return
    args.no_load_optim = args.no_load_rng = args.finetune = True
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def contradictions(args: Namespace) -> Iterator[str]:
    """A place without an interval, or the other way round."""
    if args.save_interval is not None and args.save is None and args.save_hf is None:
        yield "--save-interval: needs --save or --save-hf"
    if args.save_hf is not None and args.save_interval is None and not args.debug_rollout_only:
        yield "--save-hf: needs --save-interval (a run without one would save nothing)"
    if args.save is not None and args.save_interval is None and not args.debug_rollout_only:
        yield "--save: needs --save-interval (a run without one would save nothing)"


def missing(args: Namespace) -> Iterator[str]:
    """The checkpoint to go on from, and places to write to."""
    if args.load != args.save:
        yield from no_checkpoint(args, "load")
    yield from bad_output(args, "save", is_directory=True)
    yield from bad_output(args, "save_hf", is_directory=True)
    if args.save_hf is not None and Path(args.save_hf).resolve() == Path(args.hf_checkpoint).resolve():
        yield f"--save-hf {args.save_hf}: is --hf-checkpoint itself"


def no_checkpoint(args: Namespace, name: str) -> Iterator[str]:
    """That there is neither one of ours nor an HF directory where this flag says."""
    path = getattr(args, name)
    if path is not None and not any(
        (Path(path) / file).is_file() for file in (CHECKPOINT_MARKER, "config.json")
    ):
        wanted = f"{CHECKPOINT_MARKER} or config.json with .safetensors in it"
        yield f"{option_string(name)} {path}: no checkpoint there (wanted: {wanted})"


CONCERN = Concern(
    {"checkpoints": CheckpointArgs},
    derive=derive,
    contradictions=contradictions,
    missing=missing,
)
