"""The Ray cluster of a run: join a running one or start one on this machine."""

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from slime.arguments.views import FleetView
from slime.processes.reaper import start_run_reaper
from slime.utils.accelerator import has_gpu

# Logical CPUs beside one per GPU: the rollout manager and Ray's own bookkeeping tasks.
_SPARE_CPUS = 4

_reapers: list[subprocess.Popen[bytes]] = []


class ClusterTooSmall(RuntimeError):
    """The cluster has fewer resources than the placement needs."""


@contextmanager
def ray_cluster(args: FleetView) -> Iterator[None]:
    """Connects to the cluster named by ``RAY_ADDRESS``, or starts a local one, and leaves it on exit.

    Without a GPU the local cluster declares ``--num-gpus-per-node`` logical GPUs, so that placement
    runs the same code as on GPU machines.
    """
    quiet = dict(log_to_driver=bool(os.environ.get("SLIME_LOG_TO_DRIVER")), logging_level=logging.ERROR)
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], **quiet)
    else:
        # All processes of a local cluster are this run's: none may outlive it. The reference is kept
        # until this process ends.
        _reapers.append(start_run_reaper())
        ray.init(address="local", include_dashboard=False, **local_resources(args), **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def local_resources(args: FleetView) -> dict[str, int]:
    """``num_gpus`` and ``num_cpus`` of a cluster on this machine; CPUs are logical, as Ray's always are."""
    import torch

    num_gpus = torch.cuda.device_count() if has_gpu() else args.num_gpus_per_node
    return {"num_gpus": num_gpus, "num_cpus": max(os.cpu_count() or 1, num_gpus + _SPARE_CPUS)}


def require_resources(num_gpus: int) -> None:
    """Refuses a cluster that can never hold the placement group.

    Raises:
        ClusterTooSmall: with what is needed and what was found.
    """
    found = ray.cluster_resources()
    for kind, needed in (("GPU", num_gpus), ("CPU", num_gpus)):
        if found.get(kind, 0) < needed:
            nodes = sum(1 for node in ray.nodes() if node["Alive"])
            raise ClusterTooSmall(
                f"the cluster is too small: the run needs {needed} {kind}s, found {found.get(kind, 0):g} "
                f"on {nodes} node(s)"
            )
