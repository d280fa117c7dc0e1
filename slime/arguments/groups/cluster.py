"""How many GPUs there are, who uses them, and how long to wait for them."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from slime.arguments.core.errors import UsageError
from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.debug import trains_only
from slime.arguments.validate.outputs import bad_output
from slime.config.cluster import ClusterConfig, FaultToleranceConfig, snapshots_are_on_hosts
from slime.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class ClusterFlags(ClusterConfig):
    """Placement of the trainer and the engines, and the deadlines of the processes."""

    offload: bool = flag(False, help="shorthand for --offload-train --offload-rollout")


def notes(args: Namespace) -> Iterator[str]:
    """A backend that needs other hardware; scripts spell out what they were written for."""
    if args.distributed_backend == "nccl" and not _has_gpu():
        yield "--distributed-backend nccl: there is no GPU, gloo is used"


def _has_gpu() -> bool:
    from slime.utils.hardware import has_gpu

    return has_gpu()


def derive(args: Namespace) -> None:
    """The GPUs of the engines, and who leaves memory to whom."""
    if args.offload:
        args.offload_train = args.offload_rollout = True
    del args.offload
    trainer = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.rollout_num_gpus is None and trains_only(args):
        args.rollout_num_gpus = 0
    if args.rollout_num_gpus is None and args.rollout_external_engine_addrs:
        args.rollout_num_gpus = len(args.rollout_external_engine_addrs) * args.rollout_num_gpus_per_engine
    if args.rollout_num_gpus is None and args.colocate:
        args.rollout_num_gpus = trainer
    if trains_only(args) or args.debug_rollout_only:
        args.colocate = args.offload_train = args.offload_rollout = False
    args.offload_train = args.colocate if args.offload_train is None else args.offload_train
    args.offload_rollout = args.colocate if args.offload_rollout is None else args.offload_rollout
    args.trainer_world_size = args.world_size = trainer
    args.rank = 0
    args.trainer_snapshots = None
    if args.trainer_snapshot_copies is None:
        faults, taken = cast(FaultToleranceConfig, args), args.trainer_snapshot_interval is not None
        args.trainer_snapshot_copies = int(taken and snapshots_are_on_hosts(faults, args.actor_num_nodes))
    if args.rollout_num_gpus is None:
        wanted = "wanted: the GPUs of all engines, or --colocate"
        raise UsageError(f"--rollout-num-gpus: missing ({wanted})", unknown=["rollout_num_gpus"])


def contradictions(args: Namespace) -> Iterator[str]:
    """A run without engines, and a backend that GPUs are not used with."""
    if args.distributed_backend == "gloo" and _has_gpu():
        yield "--distributed-backend gloo: not supported on GPUs (wanted: nccl, or leave it out)"
    if args.trainer_standbys:
        yield from _idle_standbys(args, f"--trainer-standbys {args.trainer_standbys}")
    if args.trainer_snapshot_interval is not None:
        yield from _bad_snapshots(args, f"--trainer-snapshot-interval {args.trainer_snapshot_interval}")
    if args.trainer_snapshot_copies:
        yield from _bad_copies(args, f"--trainer-snapshot-copies {args.trainer_snapshot_copies}")
    if args.rollout_num_gpus == 0 and not (args.debug_train_only or args.rollout_external):
        yield "--rollout-num-gpus 0: engines are needed (wanted: 1 or more, or --debug-train-only)"


def _without_recovery(args: Namespace, name: str) -> Iterator[str]:
    """Runs in which no rank takes another's place."""
    if args.debug_rollout_only:
        yield f"{name}: --debug-rollout-only has no trainer"
    elif not args.use_fault_tolerance or not args.max_trainer_restarts:
        wanted = "wanted: --use-fault-tolerance, and --max-trainer-restarts of 1 or more"
        yield f"{name}: a trainer rank that is lost ends the run ({wanted})"


def _idle_standbys(args: Namespace, name: str) -> Iterator[str]:
    """Standbys that would never take a place."""
    reasons = list(_without_recovery(args, name))
    if not reasons and args.save is None and args.trainer_snapshot_interval is None:
        told = f"{name}: ranks start again from a checkpoint of the run, and it writes none"
        reasons = [f"{told} (wanted: --save, or --trainer-snapshot-interval)"]
    yield from reasons


def _bad_snapshots(args: Namespace, name: str) -> Iterator[str]:
    """Snapshots that nobody would go on from, or that not all ranks could."""
    yield from _without_recovery(args, name)
    if args.release_train:
        yield f"{name}: with --release-train, whose trainer starts again from what it saves (leave one out)"
    yield from bad_output(args, "trainer_snapshot_dir", is_directory=True)


def _bad_copies(args: Namespace, name: str) -> Iterator[str]:
    """Copies of nothing, or with no other node to keep them."""
    if args.trainer_snapshot_interval is None:
        yield f"{name}: no snapshots are taken (wanted: --trainer-snapshot-interval)"
    elif args.actor_num_nodes == 1:
        yield (
            f"{name}: --actor-num-nodes 1: no other node of the trainer could keep them "
            "(wanted: --actor-num-nodes of 2 or more, or the checkpoints of --save)"
        )


CONFIG_GROUP = ConfigGroup(
    {"cluster": ClusterFlags, "fault tolerance": FaultToleranceConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
