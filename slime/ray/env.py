"""Environment variables of the processes that Ray starts for us."""

import os

# Ray would hide all but its own GPUs from each actor; CUDA IPC between colocated processes needs
# every GPU of the node visible, so device ids stay physical.
NOSET_VISIBLE_DEVICES_ENV_VARS_LIST = [
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR",
]

# Several processes share few cores: spinning OpenMP threads would starve them (10-20x, measured).
_THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}

_TRAINER = {"NCCL_CUMEM_ENABLE": "0", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}


def worker_env(extra: dict[str, str] | None = None, *, trainer: bool = False) -> dict[str, str]:
    """Variables for an actor; the launching shell's values win over our defaults, ``extra`` over both."""
    defaults = {**_THREADS, **(_TRAINER if trainer else {})}
    env = {name: os.environ.get(name, value) for name, value in defaults.items()}
    env |= dict.fromkeys(NOSET_VISIBLE_DEVICES_ENV_VARS_LIST, "1")
    # The actor's import path must match the driver's, or dotted paths of user code would not resolve.
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return env | {k: str(v) for k, v in (extra or {}).items()}
