"""Which GPU of those that a process sees Ray means. Imports Ray alone."""

import os

import ray

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def local_gpu() -> int:
    """The number of the assigned GPU as CUDA counts, 0 for a process without one."""
    ids = ray.get_gpu_ids()
    return number_of(str(ids[0])) if ids else 0


def number_of(gpu: str) -> int:
    """The number, as CUDA counts in this process, of a GPU that Ray calls ``gpu``.

    Ray takes its name from where the node's Ray was started: an entry of ``CUDA_VISIBLE_DEVICES``, else its
    number. Processes inherit that list, and CUDA counts its entries. Ray narrows it to the GPUs of a
    process where ours do not tell it to leave it (`slime.ray.node`): only ranks and actors may ask here.
    """
    for variable in _VISIBLE:
        visible = [name.strip() for name in os.environ.get(variable, "").split(",")]
        if gpu in visible:
            return visible.index(gpu)
    return int(gpu)
