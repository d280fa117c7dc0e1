"""Where a bundle of a placement group is. Imports little: each start asks a new process for each GPU."""

import ray

from slime.ray.local_gpu import local_gpu

Location = tuple[str, int, str]
"""Address of a node, number of the GPU as CUDA counts there, Ray's id of the node: some share an address."""


class InfoActor:
    """Tells where a bundle landed."""

    def get_ip_and_gpu_id(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), local_gpu()

    def locate(self) -> Location:
        return *self.get_ip_and_gpu_id(), ray.get_runtime_context().get_node_id()
