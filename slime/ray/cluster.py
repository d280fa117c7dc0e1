"""The Ray cluster of a run: join a running one or start one on this machine."""

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils

from slime.config.cluster import ClusterConfig
from slime.config.fleet import FleetConfig
from slime.processes.forked import VARIABLE as FORK_SERVER
from slime.processes.forked import ForkServer, worker_python
from slime.processes.reaper import start_run_reaper
from slime.processes.termination import was_terminated
from slime.ray.ending import CannotStart, leaving_within
from slime.ray.local_start import start_ray
from slime.ray.node import forget_shared_environment, share_environment
from slime.ray.preload import modules_of
from slime.ray.ray_watch import own_processes, ray_watch
from slime.utils.hardware import can_fork_workers, has_gpu

logger = logging.getLogger(__name__)

# Logical CPUs beside one per GPU: the rollout manager and Ray's own bookkeeping tasks.
_SPARE_CPUS = 4
_LEAVE_TIMEOUT = 30.0  # seconds to disconnect from Ray
_PROBE_TIMEOUT = 5.0  # seconds for one try to reach a cluster
_PROBE_PAUSE = 0.5
_SEVERAL_MACHINES = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR

_reapers: list[subprocess.Popen[bytes]] = []
_fork_servers: list[ForkServer] = []


class ClusterTooSmall(CannotStart):
    """The cluster has fewer resources than the placement needs."""


class ClusterUnreachable(CannotStart):
    """Nobody answers at ``RAY_ADDRESS``, or not to us."""


@contextmanager
def ray_cluster(config: FleetConfig) -> Iterator[None]:
    """Connects to the cluster named by ``RAY_ADDRESS``, or starts a local one, and leaves it on exit.

    Without a GPU the local cluster declares ``--num-gpus-per-node`` logical GPUs, so that placement
    runs the same code as on GPU machines.

    Raises:
        RayNotStarted: it did not come up on this machine.
        ClusterUnreachable: nobody answers within ``--cluster-timeout`` seconds, or the token is not the
            cluster's.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        _join(address, config.cluster.cluster_timeout)
    else:
        _start_local(config)
    try:
        with ray_watch({} if address else own_processes()):
            yield
    finally:
        if not reaper_ends_it():
            with leaving_within(_LEAVE_TIMEOUT, "leaving the Ray cluster"):
                ray.shutdown()


def reaper_ends_it() -> bool:
    """Whether everything that runs is left to the run's reaper.

    A SIGTERM to the process group has ended Ray too, and what is asked of it then is not answered in time.
    """
    return was_terminated() and bool(_reapers)


def _join(address: str, timeout: float) -> None:
    forget_shared_environment()
    _await_answer(address, timeout)
    _use_token_if_there_is_one()
    failures: tuple[type[BaseException], ...] = (ConnectionError, ray.exceptions.RayError)
    try:
        # Whoever listens there may be no cluster, and never say so.
        with leaving_within(timeout, f"RAY_ADDRESS {address}: connecting (--cluster-timeout)"):
            _init(address=address)
    except failures as error:
        raise ClusterUnreachable(
            f"RAY_ADDRESS {address}: somebody listens there and refuses us (wanted: a Ray head node, and its "
            f"token in RAY_AUTH_TOKEN or ~/.ray/auth_token): {str(error).strip().splitlines()[0]}"
        ) from error
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        logger.warning(
            "RAY_ADDRESS %s: the cluster asks for no token: whoever reaches its ports can run code in it",
            address,
        )


def _start_local(config: FleetConfig) -> None:
    # All processes of a local cluster are this run's: none may outlive it. The reference is kept
    # until this process ends.
    _reapers.append(start_run_reaper())
    if not any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        # Ray would leave a token file behind, by which a later `ray start` decides who may join.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    _listen_on_loopback()
    share_environment()
    # Else raylet starts processes for tasks that a run does not have.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # A run's own processes are all that this machine is for; niced, they would starve beside others.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Else every call of an actor is reported to gcs_server, which keeps 100,000 of them for a dashboard that
    # a run does not start.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    resources = local_resources(config.cluster)
    with _forking_workers(config):
        start_ray(
            config.cluster.cluster_timeout,
            lambda: _init(address="local", include_dashboard=False, **resources),
            _logs_are_shown(),
        )
    try:
        session_directory().chmod(0o700)
    except OSError as error:
        logger.warning(
            "Ray's logs may be readable for everybody on this machine, --train-env-vars included: %s", error
        )


def _listen_on_loopback() -> None:
    """All processes of Ray; by default most of them, `gcs_server` too, listen on all interfaces.

    It is what Ray does where it knows no clusters of several machines. Its processes read the variable; here
    it was read when Ray was imported.
    """
    os.environ.setdefault(_SEVERAL_MACHINES, "0")
    ray_constants.ENABLE_RAY_CLUSTER = os.environ[_SEVERAL_MACHINES] != "0"


@contextmanager
def _forking_workers(config: FleetConfig) -> Iterator[None]:
    """Ray that is started within forks its workers, where that can be done.

    It starts them with the interpreter that starts Ray, by ``sys.executable``.
    """
    if not can_fork_workers() or os.environ.get("SLIME_FORK_WORKERS") == "0":
        yield
        return
    # A run without workers to fork costs nothing but this process, which ends with this one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    server = ForkServer()
    _fork_servers.append(server)
    server.preload(modules_of(config))
    os.environ[FORK_SERVER] = server.address
    python = sys.executable
    sys.executable = worker_python(server)
    try:
        yield
    finally:
        sys.executable = python


def session_directory() -> Path:
    """Returns Ray's session directory on this node.

    Its logs hold the values of ``--train-env-vars``; Ray opens it to everybody.
    """
    return Path(ray._private.worker._global_node.get_session_dir_path())


def _logs_are_shown() -> bool:
    """Whether what Ray's workers print comes to the driver's screen."""
    return bool(os.environ.get("SLIME_LOG_TO_DRIVER"))


def _init(**options: Any) -> None:
    """Joins or starts."""
    with _sigterm_left_alone():
        ray.init(log_to_driver=_logs_are_shown(), logging_level=logging.ERROR, **options)


@contextmanager
def _sigterm_left_alone() -> Iterator[None]:
    """Within, Ray sets no handlers of SIGTERM: one would wait for its processes, one print a stack of C++.

    Without the latter Python's `faulthandler`, which Ray turns on, tells of a crash.
    """
    set_handler, in_cpp = ray_utils.set_sigterm_handler, ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER
    ray_utils.set_sigterm_handler = lambda handler: None
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = set_handler
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = in_cpp


def _use_token_if_there_is_one() -> None:
    """Uses a token if there is one, as ``ray start`` does; a driver of Ray asks too late."""
    try:
        from ray._private.authentication import authentication_token_setup as setup
    except ImportError:  # before tokens
        return
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of what it should
    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _await_answer(address: str, timeout: float) -> None:
    """Returns when somebody listens at ``HOST:PORT``; other forms of an address are left to Ray.

    Raises:
        ClusterUnreachable: nobody did within ``timeout`` seconds.
    """
    host, separator, port = address.rpartition(":")
    if not separator or "/" in host or not port.isdigit():
        return
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterUnreachable(
                    f"RAY_ADDRESS {address}: nobody answers within {timeout:g} s (--cluster-timeout): {error}"
                ) from error
            time.sleep(_PROBE_PAUSE)


def local_resources(config: ClusterConfig) -> dict[str, int]:
    """``num_gpus`` and ``num_cpus`` of a cluster on this machine; CPUs are logical, as Ray's always are."""
    num_gpus = config.num_gpus_per_node
    if has_gpu():
        from slime.utils.accelerator import gpu_count  # imports torch

        num_gpus = gpu_count()
    return {"num_gpus": num_gpus, "num_cpus": max(os.cpu_count() or 1, num_gpus + _SPARE_CPUS)}


def require_resources(num_gpus: int) -> None:
    """Refuses a cluster that can never hold the placement group.

    Raises:
        ClusterTooSmall: with what is needed and what was found.
    """
    found = ray.cluster_resources()
    for kind, needed in (("GPU", num_gpus), ("CPU", num_gpus)):
        if found.get(kind, 0) < needed:
            nodes = sum(1 for node in ray.nodes() if node["Alive"])
            without = " (nodes without GPUs are started with ray start --num-gpus N)"
            raise ClusterTooSmall(
                f"the cluster is too small: the run needs {needed} {kind}s, found {found.get(kind, 0):g} "
                f"on {nodes} node(s){'' if found.get('GPU') else without}"
            )
