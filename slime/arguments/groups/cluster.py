"""How many GPUs there are, who uses them, and how long to wait for them."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import flag
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.limits import MOST_MINUTES, MOST_SECONDS
from slime.arguments.groups.debug import trains_only


@dataclass(frozen=True)
class ClusterArgs:
    """Placement of the trainer and the engines, and the deadlines of the processes."""

    actor_num_nodes: int = flag(1, above=0, help="trainer nodes")
    actor_num_gpus_per_node: int = flag(8, above=0, help="trainer GPUs of each node")
    rollout_num_gpus: int | None = flag(
        at_least=0, help="inference GPUs in total; when colocated, default the trainer's total"
    )
    rollout_num_gpus_per_engine: int = flag(1, above=0, help="GPUs of one engine (TP times PP)")
    num_gpus_per_node: int = flag(8, above=0, help="GPUs of a physical node, used to place engines")
    colocate: bool = flag(False, help="trainer and engines share GPUs")
    offload: bool = flag(False, help="shorthand for --offload-train --offload-rollout")
    offload_train: bool | None = flag(help="put trainer memory on the host between its phases")
    offload_rollout: bool | None = flag(help="release engine memory between its phases")
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        help="torch.distributed backend of the trainer; the hardware decides: nccl on GPUs, gloo elsewhere"
    )
    distributed_timeout_minutes: int = flag(
        10, above=0, at_most=MOST_MINUTES, help="timeout of collectives, in minutes"
    )
    cluster_timeout: float = flag(
        120.0,
        above=0,
        at_most=MOST_SECONDS,
        help="seconds to start or reach the cluster, and to wait for its GPUs",
    )
    engine_startup_timeout: float = flag(
        600.0, above=0, at_most=MOST_SECONDS, help="seconds to wait for engines, and the router, to serve"
    )
    rollout_timeout: float = flag(7200.0, above=0, at_most=MOST_SECONDS, help="seconds one rollout may take")
    train_timeout: float = flag(
        7200.0, above=0, at_most=MOST_SECONDS, help="seconds one training call may take"
    )


@dataclass(frozen=True)
class FaultToleranceArgs:
    """Health checks of the engines while they generate."""

    use_fault_tolerance: bool = flag(False, help="replace engines that stop answering")
    rollout_health_check_interval: float = flag(
        30.0, above=0, at_most=MOST_SECONDS, help="seconds between two health checks of an engine"
    )
    rollout_health_check_timeout: float = flag(
        30.0, above=0, at_most=MOST_SECONDS, help="seconds an engine has to answer a health check"
    )
    rollout_health_check_first_wait: float = flag(
        0.0, at_least=0, at_most=MOST_SECONDS, help="seconds before the first check after each resume"
    )
    rollout_engine_hang_timeout: float = flag(
        300.0,
        above=0,
        at_most=MOST_SECONDS,
        help="seconds without a healthy answer after which an engine ends a run that does not tolerate it",
    )


@dataclass(frozen=True)
class DerivedCluster:
    """Who gets which GPUs; ``offload`` is no more.

    Attributes:
        trainer_world_size: GPUs of the trainer.
        world_size: the same, until a trainer process knows the number of its peers.
        rank: 0, until a trainer process knows its own.
    """

    rollout_num_gpus: int
    offload_train: bool
    offload_rollout: bool
    trainer_world_size: int
    world_size: int
    rank: int


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
    if args.rollout_num_gpus is None:
        wanted = "wanted: the GPUs of all engines, or --colocate"
        raise UsageError(f"--rollout-num-gpus: missing ({wanted})", unknown=["rollout_num_gpus"])


def contradictions(args: Namespace) -> Iterator[str]:
    """A run without engines, and a backend that GPUs are not used with."""
    if args.distributed_backend == "gloo" and _has_gpu():
        yield "--distributed-backend gloo: not supported on GPUs (wanted: nccl, or leave it out)"
    if args.rollout_num_gpus == 0 and not (args.debug_train_only or args.rollout_external):
        yield "--rollout-num-gpus 0: engines are needed (wanted: 1 or more, or --debug-train-only)"


CONFIG_GROUP = ConfigGroup(
    {"cluster": ClusterArgs, "fault tolerance": FaultToleranceArgs},
    derived=DerivedCluster,
    derive=derive,
    notes=notes,
    contradictions=contradictions,
)
