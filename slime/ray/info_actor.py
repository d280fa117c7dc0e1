"""Where a bundle of a placement group is. Imports Ray alone: each start asks a new process for each GPU."""

import ray

Location = tuple[str, int, str]
"""Address of a node, GPU id, Ray's id of the node: several nodes may have one address."""


class InfoActor:
    """Tells where a bundle landed."""

    def get_ip_and_gpu_id(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])

    def locate(self) -> Location:
        return *self.get_ip_and_gpu_id(), ray.get_runtime_context().get_node_id()
