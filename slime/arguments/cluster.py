"""Flags: how many GPUs there are, who uses them and how long to wait for them."""

from dataclasses import dataclass
from typing import Literal

from slime.arguments.flags import flag, refused


@dataclass(frozen=True)
class ClusterArgs:
    """Placement of the trainer and the engines, and the deadlines of the processes."""

    actor_num_nodes: int = flag(1, help="trainer nodes")
    actor_num_gpus_per_node: int = flag(8, help="trainer GPUs of each node")
    rollout_num_gpus: int | None = flag(
        help="inference GPUs in total; when colocated, default the trainer's total"
    )
    rollout_num_gpus_per_engine: int = flag(1, help="GPUs of one engine (TP times PP)")
    num_gpus_per_node: int = flag(8, help="GPUs of a physical node, used to place engines")
    colocate: bool = flag(False, help="trainer and engines share GPUs")
    offload: bool = flag(False, help="shorthand for --offload-train --offload-rollout")
    offload_train: bool | None = flag(help="put trainer memory on the host between its phases")
    offload_rollout: bool | None = flag(help="release engine memory between its phases")
    distributed_backend: Literal["nccl", "gloo"] | None = refused(
        help="torch.distributed backend of the trainer",
        wanted="leave it out, the hardware decides: nccl on GPUs, gloo elsewhere",
    )
    distributed_timeout_minutes: int = flag(10, help="timeout of collectives, in minutes")
    train_backend: Literal["megatron"] = flag("megatron", help="trainer")
    rollout_engine: Literal["auto", "sglang", "embedded"] = flag(
        "auto", help="engine server; auto is sglang where it is installed and a GPU is present, else embedded"
    )
    cluster_timeout: float = flag(120.0, help="seconds to wait for the cluster's GPUs")
    engine_startup_timeout: float = flag(600.0, help="seconds to wait for an engine to serve")
    rollout_timeout: float = flag(7200.0, help="seconds one rollout may take")
    train_timeout: float = flag(7200.0, help="seconds one training call may take")


@dataclass(frozen=True)
class FaultToleranceArgs:
    """Health checks of the engines while they generate."""

    use_fault_tolerance: bool = flag(False, help="replace engines that stop answering")
    rollout_health_check_interval: float = flag(30.0, help="seconds between two health checks of an engine")
    rollout_health_check_timeout: float = flag(30.0, help="seconds an engine has to answer a health check")
    rollout_health_check_first_wait: float = flag(
        0.0, help="seconds before the first check after each resume"
    )
