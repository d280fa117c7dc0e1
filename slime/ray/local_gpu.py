"""Which GPU of those that a process sees is the one that Ray assigned to it. Imports Ray alone."""

import os

import ray

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def local_gpu() -> int:
    """Its number as CUDA counts, 0 for a process without one.

    Ray tells what the GPU is called where the node's Ray was started: an entry of ``CUDA_VISIBLE_DEVICES``,
    which may be a number of the machine or a UUID, else its number. Processes inherit that list, and Ray
    narrows it for none of them (`slime.ray.node`), so that CUDA counts its entries.
    """
    ids = ray.get_gpu_ids()
    if not ids:
        return 0
    assigned = str(ids[0])
    for variable in _VISIBLE:
        visible = [name.strip() for name in os.environ.get(variable, "").split(",")]
        if assigned in visible:
            return visible.index(assigned)
    return int(assigned)
