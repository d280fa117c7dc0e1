"""One trainer process: a Ray actor around the backend's worker."""

import os
import socket
from argparse import Namespace
from typing import Any

import ray


class TrainRayActor:
    """Rank ``rank`` of a training group.

    Ray decides where it runs; the backend's plain worker class (``MegatronTrainActor``) does the work.
    """

    def __init__(self, args: Namespace, role: str, rank: int, world_size: int) -> None:
        self._args, self._role = args, role
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(_local_gpu()))

    def address_and_free_port(self) -> tuple[str, int]:
        """Where rank 0 will host the rendezvous of the group."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def init(self, master_addr: str, master_port: int, with_ref: bool) -> int:
        """Joins the group, builds and loads the model.

        Returns:
            The rollout id to start from.
        """
        os.environ.update(MASTER_ADDR=master_addr, MASTER_PORT=str(master_port))
        from slime.backends.megatron_utils.actor import MegatronTrainActor

        self._worker = MegatronTrainActor(self._args, role=self._role, with_ref=with_ref)
        return self._worker.init()

    def parallel_config(self) -> dict[str, int]:
        return self._worker.parallel_config()

    def train(self, rollout_id: int, data_refs: list[ray.ObjectRef]) -> dict[str, Any]:
        """Trains on this rank's shard; only the main rank returns metrics.

        The references come inside a list, which Ray does not resolve: each rank fetches its own
        shard and no other.
        """
        shard = ray.get(data_refs[self._worker.parallel_config()["dp_rank"]])
        return self._worker.train(rollout_id, shard)

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        self._worker.save_model(rollout_id, force_sync=force_sync)

    def connect_rollout_engines(self, endpoints: list[Any]) -> None:
        self._worker.connect_rollout_engines(endpoints)

    def update_weights(self) -> int:
        """Sends the weights to the connected engines and returns their new version."""
        return self._worker.update_weights()

    def offload_training_state(self) -> None:
        self._worker.offload_training_state()

    def sleep(self) -> None:
        self._worker.sleep()

    def wake_up(self) -> None:
        self._worker.wake_up()


def _local_gpu() -> int:
    """The physical GPU id that Ray assigned: every GPU of the node stays visible to the process."""
    ids = ray.get_gpu_ids()
    return int(ids[0]) if ids else 0
