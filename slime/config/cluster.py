"""How many GPUs there are, who uses them, and how long to wait for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime.config.flag import flag, place_flag
from slime.config.limits import MAX_MINUTES, MAX_SECONDS

MEMORY_OF_ONE_HOST = "/dev/shm"
MAX_STANDBYS = 8  # of a rank: losses in a row, faster than a process starts


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Placement of the trainer and the engines, and the deadlines of the processes.

    Attributes:
        trainer_world_size: GPUs of the trainer.
        world_size: the same, until a trainer process knows the number of its peers.
        rank: 0, until a trainer process knows its own.
    """

    actor_num_nodes: int = flag(1, above=0, help="trainer nodes")
    actor_num_gpus_per_node: int = flag(8, above=0, help="trainer GPUs of each node")
    rollout_num_gpus: int = flag(
        at_least=0, help="inference GPUs in total; when colocated, default the trainer's total"
    )
    rollout_num_gpus_per_engine: int = flag(1, above=0, help="GPUs of one engine (TP times PP)")
    rollout_spare_gpus: int | None = flag(
        at_least=0,
        same_as_default=(0,),
        help="GPUs beside --rollout-num-gpus, reserved for engines that join the run (slime engines add)",
    )
    num_gpus_per_node: int = flag(8, above=0, help="GPUs of a physical node, used to place engines")
    colocate: bool = flag(False, help="trainer and engines share GPUs")
    offload_train: bool = flag(help="put trainer memory on the host between its phases")
    offload_rollout: bool = flag(help="release engine memory between its phases")
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        help="torch.distributed backend of the trainer; the hardware decides: nccl on GPUs, gloo elsewhere"
    )
    distributed_timeout_minutes: int = flag(
        10, above=0, at_most=MAX_MINUTES, help="timeout of collectives, in minutes"
    )
    cluster_timeout: float = flag(
        120.0,
        above=0,
        at_most=MAX_SECONDS,
        help="seconds to start or reach the cluster, and to wait for its GPUs",
    )
    engine_startup_timeout: float = flag(
        600.0, above=0, at_most=MAX_SECONDS, help="seconds to wait for engines, and the router, to serve"
    )
    rollout_timeout: float = flag(7200.0, above=0, at_most=MAX_SECONDS, help="seconds one rollout may take")
    train_timeout: float = flag(
        7200.0, above=0, at_most=MAX_SECONDS, help="seconds one training call may take"
    )
    trainer_world_size: int
    world_size: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class FaultToleranceConfig:
    """Health checks of the engines while they generate, and what lost trainer ranks are built again from.

    Attributes:
        trainer_snapshots: the run's own directory in ``--trainer-snapshot-dir``, or the pattern of their
            names where each host has its own; None until it is known.
    """

    use_fault_tolerance: bool = flag(
        False, help="replace engines that stop answering, and start routers that end again"
    )
    rollout_health_check_interval: float = flag(
        30.0, above=0, at_most=MAX_SECONDS, help="seconds between two health checks of an engine"
    )
    rollout_health_check_timeout: float = flag(
        30.0, above=0, at_most=MAX_SECONDS, help="seconds an engine has to answer a health check"
    )
    rollout_health_check_first_wait: float = flag(
        0.0, at_least=0, at_most=MAX_SECONDS, help="seconds before the first check after each resume"
    )
    rollout_engine_hang_timeout: float = flag(
        300.0,
        above=0,
        at_most=MAX_SECONDS,
        help="seconds without a healthy answer after which an engine ends a run that does not tolerate it; "
        "the seconds that it may take over its memory (offload, onload) and over other requests of the run, "
        "with --use-fault-tolerance over those of a weight update too",
    )
    rollout_router_hang_timeout: float = flag(
        60.0,
        above=0,
        at_most=60,
        help="seconds without an answer after which a router that runs is taken for one that has ended",
    )
    max_trainer_restarts: int = flag(
        3,
        at_least=0,
        help="with --use-fault-tolerance: how often trainer ranks that were lost start again from the latest "
        "checkpoint without getting further than before; 0 has a lost rank end the run",
    )
    trainer_standbys: int = flag(
        0,
        at_least=0,
        at_most=MAX_STANDBYS,
        help="with --use-fault-tolerance: processes for each trainer rank that wait with everything imported "
        "and become the ranks when one is lost; each holds host memory and nothing of a GPU",
    )
    trainer_snapshot_interval: int | None = flag(
        above=0,
        help="with --use-fault-tolerance: rollouts between two snapshots of the trainer's whole state in the "
        "memory of its host, from which ranks that were lost start again; default none are taken",
    )
    trainer_snapshot_dir: str = place_flag(
        default="/dev/shm",
        help="where snapshots are; a file system in memory with room for two of them, which the driver and "
        "all trainer ranks see. With --actor-num-nodes above 1 each host has its own in /dev/shm",
    )
    trainer_snapshot_copies: int | None = flag(
        at_least=0,
        at_most=1,
        help="with --actor-num-nodes above 1: other nodes that keep each node's part of a snapshot too, "
        "so that a lost node costs no more than a lost rank; each host has its own --trainer-snapshot-dir "
        "then. Default 1 where that is in /dev/shm, else 0",
    )
    trainer_snapshots: str | None


def snapshots_are_on_hosts(faults: FaultToleranceConfig, nodes: int) -> bool:
    """Whether each host of a trainer on so many nodes keeps its own part of a snapshot."""
    in_memory_of_one = Path(faults.trainer_snapshot_dir).is_relative_to(MEMORY_OF_ONE_HOST)
    return nodes > 1 and (in_memory_of_one or bool(faults.trainer_snapshot_copies))
