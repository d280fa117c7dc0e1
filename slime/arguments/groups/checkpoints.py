"""What is loaded and saved, under Megatron-LM's names."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.core.flag import given
from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.checkpoint_files import (
    CHECKPOINT_MARKER,
    bad_checkpoint,
    has_checkpoint,
    is_release,
    newest_whole,
    unusable_weights,
)
from slime.arguments.validate.outputs import bad_output
from slime.config.checkpoints import CheckpointConfig


def notes(args: Namespace) -> Iterator[str]:
    """Places that nothing is written to or read from."""
    saves = args.save_interval is not None or args.release_train
    if not saves:
        for name, _ in given(args, "save", "save_hf"):
            yield f"{name}: no checkpoint will be written without --save-interval"
    if args.async_save and (args.save is None or not saves):
        yield "--async-save: has no effect without --save and --save-interval"
    if args.load is not None and args.load != args.save and not has_checkpoint(args.load):
        source = "--ref-load" if args.ref_load is not None else "--hf-checkpoint"
        yield f"--load {args.load}: no checkpoint there, the run begins with the weights of {source}"
    if args.ckpt_step is None:
        step, skipped = newest_whole(args.load, args.verify_checkpoint)
        for reason in skipped if step is not None else ():  # without a whole one it is refused
            yield f"--load {args.load}: {reason}: iteration {step} is loaded"
    if args.keep_checkpoints is not None and (args.save is None or not saves):
        yield "--keep-checkpoints: has no effect without --save and --save-interval"


def derive(args: Namespace) -> None:
    """``--load`` that holds no checkpoint yet, or what a converter wrote, is a run that starts.

    One whose newest iteration is damaged goes on from the newest whole one.
    """
    converted = args.load is not None and args.ckpt_step is None and is_release(args.load)
    if args.ckpt_step is None:
        step, skipped = newest_whole(args.load, args.verify_checkpoint)
        args.ckpt_step = step if skipped else None
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
        yield f"--load {args.load}: is not a directory"
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
    {"checkpoints": CheckpointConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
    missing=missing,
    unusable=unusable,
)
