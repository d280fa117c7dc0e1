"""Profiles of the trainer, and the history of its memory."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.flag import given
from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.outputs import bad_output
from slime.config.profiling import ProfilingConfig


def derive(args: Namespace) -> None:
    """Where profiles go."""
    if args.use_pytorch_profiler and args.tensorboard_dir is None:
        args.tensorboard_dir = f"{args.run_dir or args.save or 'outputs'}/profile"


def contradictions(args: Namespace) -> Iterator[str]:
    """Profiles of nothing."""
    if args.use_pytorch_profiler:
        yield from _empty_profiles(args)
    elif args.tensorboard_dir is not None:
        yield (
            f"--tensorboard-dir {args.tensorboard_dir}: only profiles go there (wanted: "
            "--use-pytorch-profiler, or --use-tensorboard with --tb-project-name)"
        )
    if args.debug_rollout_only:
        for name, _ in given(args, "use_pytorch_profiler", "record_memory_history"):
            yield f"{name}: --debug-rollout-only has no trainer"
    if "/" in args.memory_snapshot_path:
        yield (
            f"--memory-snapshot-path {args.memory_snapshot_path}: is a path (wanted: the end of a file name, "
            "and --memory-snapshot-dir)"
        )


def _empty_profiles(args: Namespace) -> Iterator[str]:
    start, end = args.profile_step_start, args.profile_step_end
    if end <= start:
        yield f"--profile-step-end {end}: wanted more than --profile-step-start {start}"
    if args.num_rollout is not None and start >= args.num_rollout:
        yield f"--profile-step-start {start}: wanted less than --num-rollout {args.num_rollout}"
    beyond = [rank for rank in args.profile_ranks or () if rank >= args.trainer_world_size]
    if beyond:
        yield f"--profile-ranks {beyond[0]}: wanted less than {args.trainer_world_size}, the trainer's ranks"
    if "train_overall" in args.profile_target and len(set(args.profile_target)) > 1:
        yield (
            f"--profile-target {' '.join(args.profile_target)}: train_overall holds the others (wanted: it "
            "alone, or the others)"
        )


def missing(args: Namespace) -> Iterator[str]:
    """Places to write to, and a GPU."""
    if args.use_pytorch_profiler:
        yield from bad_output(args, "tensorboard_dir", is_directory=True)
    if args.record_memory_history:
        yield from bad_output(args, "memory_snapshot_dir", is_directory=True)
        if not args.check and not _has_gpu():
            yield "--record-memory-history: there is no GPU here (wanted: one, whose memory is recorded)"


def _has_gpu() -> bool:
    from slime.utils.hardware import has_gpu

    return has_gpu()


CONFIG_GROUP = ConfigGroup(
    {"profiling": ProfilingConfig}, derive=derive, contradictions=contradictions, missing=missing
)
