"""Ray with several nodes on this machine, for tests of placement."""

from collections.abc import Iterator
from contextlib import contextmanager

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
