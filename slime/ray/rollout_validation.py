"""Whether a group of engines fits its GPUs, for plug-ins that place engines themselves."""


def validate_server_group_gpu_indices(
    *,
    worker_type: str,
    gpu_offset: int,
    num_gpus_per_engine: int,
    num_gpus_per_engine_on_node: int,
    num_engines: int,
    num_available_gpus: int,
    rollout_num_gpus: int,
    rollout_num_gpus_per_engine: int,
) -> None:
    """Raises ValueError if an engine of the group would begin or end beyond the GPUs that there are.

    Args:
        gpu_offset: the first GPU of the group.
        num_gpus_per_engine_on_node: those of an engine's process, of which it may have several.
        num_engines: processes.
    """
    end = gpu_offset + num_engines * num_gpus_per_engine_on_node
    if gpu_offset < 0 or end > num_available_gpus:
        raise ValueError(
            f"{worker_type} engines: {num_engines} x {num_gpus_per_engine_on_node} GPUs from {gpu_offset} on "
            f"(of engines of {num_gpus_per_engine}), but {num_available_gpus} are there (wanted: fewer; "
            f"--rollout-num-gpus is {rollout_num_gpus}, --rollout-num-gpus-per-engine "
            f"{rollout_num_gpus_per_engine})"
        )
