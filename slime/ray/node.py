"""What a process knows about its node: the environment, the log directory, free ports, its address."""

import json
import os
import tempfile
import zlib
from pathlib import Path

import ray

from slime.processes.private import private_directory, remove_older
from slime.utils.deadlines import within

LOOPBACK = "127.0.0.1"
_LOGS_KEPT_DAYS = 30.0
_ANSWER_TIMEOUT = 60.0  # seconds

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


def node_is_alive() -> bool:
    """Whether Ray still counts this node among those that live.

    One whose raylet has been silent for too long is given up for good: nothing can be started there any more.
    Nor can it where Ray does not say, for which its calls have no deadline.
    """
    here = ray.get_runtime_context().get_node_id()
    try:
        nodes = within(_ANSWER_TIMEOUT, "the list of Ray's nodes", ray.nodes)
    except TimeoutError:
        return False
    return any(node["NodeID"] == here and node["Alive"] for node in nodes)


def process_env(extra: dict[str, str] | None = None, *, trainer: bool = False) -> dict[str, str]:
    """Variables for a process of ours; the launching shell wins over our defaults, ``extra`` over both."""
    defaults = {**_THREADS, **(_TRAINER if trainer else {})}
    env = {name: os.environ.get(name, value) for name, value in defaults.items()}
    env |= dict.fromkeys(NOSET_VISIBLE_DEVICES_ENV_VARS_LIST, "1")
    # Its import path must match the driver's, or dotted paths of user code would not resolve.
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([os.getcwd(), *filter(None, others)]))
    return env | {k: str(v) for k, v in (extra or {}).items()}


_INHERITED = "SLIME_INHERITED_ENVIRONMENT"


def share_environment() -> None:
    """Gives this process the variables that those of a cluster which it is about to start need.

    They inherit them then. Ray starts a process with an environment of its own by way of an agent and of
    another interpreter, which imports Ray too.
    """
    from slime.utils.hardware import has_gpu

    env = process_env(trainer=not has_gpu())
    os.environ |= env | {_INHERITED: json.dumps(env)}


def forget_shared_environment() -> None:
    """Forgets what only this machine's processes share: those of a joined cluster inherit nothing from this
    one.
    """
    os.environ.pop(_INHERITED, None)


def runtime_env(env: dict[str, str]) -> dict[str, dict[str, str]]:
    """What Ray is to be told of the environment ``env``: what its processes do not inherit anyway."""
    inherited = json.loads(os.environ.get(_INHERITED, "{}"))
    own = {name: value for name, value in env.items() if inherited.get(name) != value}
    return {"env_vars": own} if own else {}


def log_dir() -> Path:
    """A directory of this run on this node, named after the user and Ray's session and job.

    Logs hold prompts and settings: only this user can read them. Those of old runs are removed.

    Raises:
        DirectoryNotOurs: the user's directory is a link, or another user's.
    """
    root = private_directory(Path(tempfile.gettempdir()) / f"slime-{os.getuid()}")
    remove_older(root, _LOGS_KEPT_DAYS)
    return root / _run_name()


def first_port(base: int, spread: int) -> int:
    """Returns where this run starts to look for free ports: ``base`` plus up to ``spread``.

    Two runs that start together would otherwise find the same port free, and the one whose server loses
    it would find the other's server healthy.
    """
    return base + zlib.crc32(_run_name().encode()) % spread


def _run_name() -> str:
    context = ray.get_runtime_context()
    return f"{context.get_session_name()}/{context.get_job_id()}"


def node_host() -> str:
    """The address that servers on this node listen on."""
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return listening_host(nodes, ray.util.get_node_ip_address())


def listening_host(nodes: set[str], node: str) -> str:
    """Loopback if the cluster's ``nodes`` are one machine, else the address of ``node``."""
    return LOOPBACK if len(nodes) <= 1 else node
