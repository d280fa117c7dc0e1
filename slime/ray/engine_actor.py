"""The Ray actor that owns an engine's process. Imports little: engines start after it."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.backends.sglang_utils.server_engine import EnginePlacement, ServerEngine
from slime.backends.sglang_utils.servers import ENGINES
from slime.config.run import filled
from slime.config.server import ServerConfig
from slime.ray.local_gpu import number_of
from slime.ray.node import first_port, log_dir, node_host
from slime.ray.process_watch import ProcessLocation, process_location
from slime.utils.addresses import find_available_port, wrap_ipv6
from slime.utils.types import EngineEndpoint

PORTS = (15000, 12000)  # below the kernel's range for outgoing connections, 32768 and up
_MEETING_PORTS = 32  # in a row, of which SGLang takes some more the more data-parallel ranks it has


@dataclass(frozen=True)
class EngineShape:
    """What the engines of a group have in common.

    Attributes:
        num_gpus: of one engine.
        kind: "regular", "prefill" or "decode".
        overrides: option values of the server, instead of those of ``--sglang-*``.
    """

    num_gpus: int
    kind: str = "regular"
    overrides: Mapping[str, Any] = field(default_factory=dict)


class EngineActor:
    """Launches one HTTP server process, or one node's part of one, and answers for its life.

    Args:
        part: which part of an engine over ``parts`` nodes.
        base_gpu_id: the first GPU, as Ray calls it.
        meeting_point: where the parts find each other, as part 0 says.
        engine: which server, a key of `ENGINES`.
    """

    def __init__(
        self,
        args: Namespace,
        rank: int,
        shape: EngineShape,
        gpu_offset: int | None,
        base_gpu_id: int,
        part: int = 0,
        parts: int = 1,
        meeting_point: str | None = None,
        *,
        engine: str,
    ) -> None:
        config, kind = filled(ServerConfig, args), ENGINES[engine]
        # Ports of neighbours on a node start far apart, or two engines could pick the same one.
        port = find_available_port(first_port(*PORTS) + 40 * rank)
        host = node_host()
        if parts > 1 and meeting_point is None:
            meeting_point = f"{wrap_ipv6(host)}:{find_available_port(port + 20, _MEETING_PORTS)}"
        placement = EnginePlacement(
            rank=rank,
            host=host,
            port=port,
            nccl_port=find_available_port(port + 10),
            num_gpus=shape.num_gpus,
            base_gpu_id=number_of(str(base_gpu_id)),
            gpu_offset=gpu_offset,
            num_nodes=parts,
            node_rank=part,
            dist_init_addr=meeting_point,
            api_key=config.router.sglang_api_key,
            worker_type=shape.kind,
            bootstrap_port=find_available_port(port + 5) if shape.kind == "prefill" else None,
            puller_port=find_available_port(port + 7) if _needs_puller(config, kind) else None,
        )
        self._engine = kind(config, placement, log_dir(), shape.overrides)
        self._engine.launch()

    def meeting_point(self) -> str | None:
        """Returns where the other parts of this engine find this one; None if it has no others."""
        return self._engine.placement.dist_init_addr

    def wait_ready(self, timeout: float) -> EngineEndpoint:
        """Waits until the engine serves, and returns where; ``timeout`` in seconds."""
        self._engine.wait_ready(timeout)
        return self._engine.endpoint

    def process_location(self) -> ProcessLocation:
        """Returns the node and the process of this actor."""
        return process_location()

    def server_location(self) -> ProcessLocation:
        """Returns the node and the process that ends when nothing of the server is left."""
        node, _ = process_location()
        return node, self._engine.process.pid

    def failure_reason(self) -> str | None:
        """Returns None while the server lives, else why it ended, with its last log lines."""
        return self._engine.failure_reason()

    def shutdown(self) -> None:
        self._engine.shutdown()


def _needs_puller(config: ServerConfig, kind: type[ServerEngine]) -> bool:
    """Whether versions of the weights have to be fetched to this machine for a server that does not do so."""
    sync = config.weight_sync
    fetched = sync.update_weight_transport == "disk" and sync.update_weight_local_checkpoint_dir is not None
    return fetched and not kind.pulls_weights
