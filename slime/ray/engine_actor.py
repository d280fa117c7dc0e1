"""One rollout engine's keeper: a Ray actor that runs on the engine's node and owns its server process."""

from argparse import Namespace
from typing import Any

import ray

from slime.backends.sglang_utils.server_engine import EnginePlacement
from slime.backends.sglang_utils.servers import ENGINES
from slime.ray.node import first_port, log_dir, node_host
from slime.utils.http_utils import find_available_port
from slime.utils.types import EngineEndpoint

PORTS = (15000, 12000)  # below the kernel's range for outgoing connections, 32768 and up


class EngineActor:
    """Launches one HTTP server process and answers for its life."""

    def __init__(
        self, args: Namespace, rank: int, api_key: str | None, gpu_offset: int | None, base_gpu_id: int
    ) -> None:
        # Ports of neighbours on a node start far apart, or two engines could pick the same one.
        port = find_available_port(first_port(*PORTS) + 40 * rank)
        placement = EnginePlacement(
            rank=rank,
            host=node_host(),
            port=port,
            nccl_port=find_available_port(port + 10),
            num_gpus=args.rollout_num_gpus_per_engine,
            base_gpu_id=base_gpu_id,
            gpu_offset=gpu_offset,
            api_key=api_key,
        )
        self._engine = ENGINES[args.rollout_engine](args, placement, log_dir())
        self._engine.launch()

    def wait_ready(self, timeout: float) -> EngineEndpoint:
        """Where it serves, once it does; ``timeout`` in seconds."""
        self._engine.wait_ready(timeout)
        return self._engine.endpoint

    def failure_reason(self) -> str | None:
        """None while the server lives, else why it ended, with its last log lines."""
        return self._engine.failure_reason()

    def shutdown(self) -> None:
        self._engine.shutdown()


def spawn_engine_actor(args: Namespace, rank: int, env: dict[str, str], strategy: Any, **kwargs: Any) -> Any:
    """Starts the keeper beside the engine's first GPU; it launches the server at once."""
    return (
        ray.remote(EngineActor)
        .options(num_gpus=0.2, num_cpus=0.2, scheduling_strategy=strategy, runtime_env={"env_vars": env})
        .remote(args, rank, **kwargs)
    )
