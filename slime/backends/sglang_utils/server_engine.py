"""An engine that is one HTTP server process on this machine."""

import argparse
import sys
import time
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

from slime.backends.rollout_engine import EngineStartError, RolloutEngine
from slime.backends.sglang_utils.client import EngineClient
from slime.backends.sglang_utils.command_line import command_line, parser_actions
from slime.processes.child import ManagedProcess
from slime.utils.http_utils import http_url, is_loopback
from slime.utils.types import EngineEndpoint

SHUTDOWN_GRACE_S = 5.0
HEALTH_TIMEOUT_S = 30.0
POLL_S = 0.1


@dataclass(frozen=True)
class EnginePlacement:
    """Where an engine, or one node's part of one, runs.

    Attributes:
        rank: index of this process among all engine processes of the run.
        host: address to bind; beyond loopback an ``api_key`` is required.
        num_gpus: GPUs of the whole engine.
        gpu_offset: absolute slot of its first GPU among the trainer's, None if it shares none.
        base_gpu_id: first GPU on this node.
        node_rank: which part of an engine over ``num_nodes`` nodes; only part 0 serves HTTP.
    """

    rank: int
    host: str
    port: int
    num_gpus: int = 1
    gpu_offset: int | None = None
    base_gpu_id: int = 0
    num_nodes: int = 1
    node_rank: int = 0
    nccl_port: int | None = None
    dist_init_addr: str | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(f"engine on {self.host}: an API key is required beyond loopback")


class ServerEngine(RolloutEngine):
    """Starts ``python -m <module>`` with options taken from ``args`` and the placement."""

    module: str
    """The server's module, started with ``python -m``."""

    def __init__(self, args: Namespace, placement: EnginePlacement, log_dir: str | Path) -> None:
        self.args = args
        self.placement = placement
        self.log_path = Path(log_dir) / f"engine_{placement.rank}.log"
        self._process: ManagedProcess | None = None

    @abstractmethod
    def parser(self) -> argparse.ArgumentParser:
        """The server's own command line."""

    @abstractmethod
    def environment(self) -> Mapping[str, str | None]:
        """Changes to the environment; None removes a variable."""

    def settings(self) -> dict[str, Any]:
        """Option values that the run decides: they win over ``args.sglang_*``."""
        args, placement = self.args, self.placement
        return {
            "model_path": args.hf_checkpoint,
            "trust_remote_code": getattr(args, "trust_remote_code", False),
            "host": placement.host,
            "port": placement.port,
            "api_key": placement.api_key,
            "random_seed": args.seed + placement.rank * args.num_gpus_per_node,
            "tp_size": getattr(args, "sglang_tp_size", None) or placement.num_gpus,
            "enable_memory_saver": bool(args.offload_rollout and placement.gpu_offset is not None),
        }

    def preferences(self) -> dict[str, Any]:
        """Option values for what ``args.sglang_*`` leaves at the server's default."""
        if self.args.fp16:
            return {"dtype": "float16"}
        return {"dtype": "float32"} if self.args.fp32 else {}

    def command(self) -> list[str]:
        """The complete command; only options that differ from the server's defaults."""
        parser = self.parser()
        values = self.preferences()
        for dest, action in parser_actions(parser).items():
            value = getattr(self.args, f"sglang_{dest}", None)
            if value is not None and (value != action.default or dest not in values):
                values[dest] = value
        return [sys.executable, "-m", self.module, *command_line(parser, {**values, **self.settings()})]

    @property
    def serves_http(self) -> bool:
        return self.placement.node_rank == 0

    @cached_property
    def endpoint(self) -> EngineEndpoint:
        placement = self.placement
        url = http_url(placement.host, placement.port)
        return EngineEndpoint(url, placement.api_key, placement.num_gpus, placement.gpu_offset)

    @cached_property
    def client(self) -> EngineClient:
        return EngineClient(self.endpoint)

    @property
    def process(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError(f"engine {self.placement.rank} was not launched")
        return self._process

    def launch(self) -> None:
        if self._process is not None and self._process.is_alive():
            raise RuntimeError(f"engine {self.placement.rank} already runs")
        self._process = ManagedProcess(
            self.command(),
            name=f"engine {self.placement.rank} ({self.endpoint.url})",
            log_path=self.log_path,
            env=self.environment(),
        )

    def wait_ready(self, timeout: float) -> None:
        started = time.monotonic()
        retrying = Retrying(
            stop=stop_after_delay(timeout),
            wait=wait_fixed(POLL_S),
            retry=retry_if_result(lambda ready: not ready),
        )
        try:
            retrying(self._is_ready)
        except RetryError:
            waited = time.monotonic() - started
            raise EngineStartError(
                f"{self.process.name}: does not serve after {waited:.0f} s (--engine-startup-timeout); "
                f"last lines of {self.log_path}:\n{self.process.log_tail()}"
            ) from None

    def _is_ready(self) -> bool:
        if reason := self.failure_reason():
            raise EngineStartError(reason)
        # A process that lost the port to another server would find that server healthy: ask again.
        return not self.serves_http or (self.client.health(HEALTH_TIMEOUT_S) and self.is_alive())

    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def failure_reason(self) -> str | None:
        return self.process.exit_reason()

    def shutdown(self) -> None:
        if self._process is not None:
            self._process.terminate(SHUTDOWN_GRACE_S)
