"""Ray with several nodes on this machine, for tests of placement."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import ray
from ray.cluster_utils import Cluster

from slime.ray.local_start import start_ray

_START_TIMEOUT = 300.0  # seconds


@contextmanager
def joined_nodes(head: dict[str, int], *others: dict[str, int]) -> Iterator[Cluster]:
    """A cluster that this process has joined: a head and other nodes, with the CPUs and GPUs of each.

    It is started as a run starts Ray: with a long timeout and, on a busy machine, more than once.
    """
    started: list[Cluster] = []

    def start() -> None:
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for options in others:
            cluster.add_node(**options)
        ray.init(address=cluster.address, log_to_driver=False)
        started.append(cluster)

    start_ray(_START_TIMEOUT, start)
    yield started[0]
    ray.shutdown()
    started[0].shutdown()


def lose_node(cluster: Cluster, node_id: str) -> None:
    """Kills a node's raylet with all that runs on the node, as the loss of its host does."""
    (node,) = [node for node in cluster.list_all_nodes() if node.node_id == node_id]
    (raylet,) = [info.process.pid for info in node.all_processes["raylet"]]
    below = psutil.Process(raylet).children(recursive=True)
    for process in (psutil.Process(raylet), *below):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def node_with(cluster: Cluster, command: str) -> str:
    """Ray's id of a node on which a process with such a command line runs."""
    for node in cluster.list_all_nodes():
        for info in node.all_processes["raylet"]:
            below = psutil.Process(info.process.pid).children(recursive=True)
            if any(command in _command(process) for process in below):
                return str(node.node_id)
    raise LookupError(f"no node has a {command}")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
