"""An engine that is one HTTP server process on this machine.

engine.launch(); engine.wait_ready(600); engine.client.pause_generation(); ...; engine.shutdown()
"""

import argparse
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.backends.sglang_utils.command_line import command_line, parser_actions
from slime.config.lora import ADAPTERS_AT_ONCE
from slime.config.run import options_of
from slime.processes.child import ManagedProcess
from slime.processes.secret_options import hide_options
from slime.utils.addresses import http_url, is_loopback
from slime.utils.types import EngineEndpoint

if TYPE_CHECKING:
    from slime.config.server import ServerConfig

SHUTDOWN_GRACE_S = 5.0
HEALTH_TIMEOUT_S = 30.0
POLL_S = 0.1
_PULLER = "slime.weight_sync.versions.puller"


class EngineStartError(RuntimeError):
    """An engine did not come up."""


@dataclass(frozen=True)
class EnginePlacement:
    """The place where an engine, or one node's part of one, runs.

    Attributes:
        rank: index of this process among all engine processes of the run.
        host: address to bind; beyond loopback an ``api_key`` is required.
        num_gpus: GPUs of the whole engine.
        gpu_offset: absolute slot of its first GPU among the trainer's, None if it shares none.
        base_gpu_id: first GPU on this node.
        node_rank: which part of an engine over ``num_nodes`` nodes; only part 0 serves HTTP.
        dist_init_addr: where the parts meet.
        worker_type: "regular", "prefill" or "decode".
        bootstrap_port: where an engine that prefills hands on what it has computed.
        puller_port: where a helper of ours fetches weights to this machine, beside a server that does not.
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
    worker_type: str = "regular"
    bootstrap_port: int | None = None
    puller_port: int | None = None

    def __post_init__(self) -> None:
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(f"engine on {self.host}: an API key is required beyond loopback")


class ServerEngine(ABC):
    """One engine, or one node's part of an engine that spans nodes: ``python -m <module>`` with options.

    These come from ``args.sglang_*``; ``overrides`` win over them, and what the placement decides over both.
    """

    module: str
    """The server's module, started with ``python -m``."""
    can_be_forked = False
    """Whether a fork server may start it."""
    pulls_weights = False
    """Whether the server itself answers /pull_weights."""

    def __init__(
        self,
        config: "ServerConfig",
        placement: EnginePlacement,
        log_dir: str | Path,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.placement = placement
        self.overrides = dict(overrides or {})
        part = f"_node_{placement.node_rank}" if placement.num_nodes > 1 else ""
        self.log_path = Path(log_dir) / f"engine_{placement.rank}{part}.log"
        self._process: ManagedProcess | None = None
        self._puller: ManagedProcess | None = None

    @abstractmethod
    def parser(self) -> argparse.ArgumentParser:
        """The server's own command line."""

    @abstractmethod
    def environment(self) -> Mapping[str, str | None]:
        """Changes to the environment; None removes a variable."""

    def settings(self) -> dict[str, Any]:
        """Option values that the run decides."""
        config, placement = self.config, self.placement
        return {
            "trust_remote_code": config.hf_checkpoint.trust_remote_code,
            "host": placement.host,
            "port": placement.port,
            "api_key": placement.api_key,
            "random_seed": config.trainer.seed + placement.rank * config.cluster.num_gpus_per_node,
            "tp_size": placement.num_gpus // self._pipeline_stages(),
            "enable_memory_saver": self.frees_memory,
            **({"enable_return_routed_experts": True} if self._tells_routes() else {}),
            **(self._adapter_options() if self._serves_adapter() else {}),
        }

    def _serves_adapter(self) -> bool:
        """Whether it serves the model that is trained, and gets adapters beside it."""
        return bool(self.config.lora.serves_adapter and self.serves_trained_model)

    def _adapter_options(self) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_lora_rank": self.config.lora.lora_rank,
            "lora_target_modules": ["all"],
            # Updates bring no base that would take its place.
            **({"enable_weights_cpu_backup": True} if self.frees_memory else {}),
        }

    def _tells_routes(self) -> bool:
        """Whether it serves the model that is trained, and its routes are replayed."""
        return bool(self.config.off_policy.use_rollout_routing_replay and self.serves_trained_model)

    @property
    def serves_trained_model(self) -> bool:
        """Whether its weights are, or begin as, those of ``--hf-checkpoint``."""
        return bool(
            self.overrides.get("model_path", self.config.hf_checkpoint.hf_checkpoint)
            == self.config.hf_checkpoint.hf_checkpoint
        )

    def _pipeline_stages(self) -> int:
        return self.overrides.get("pp_size") or self.options.get("pp_size") or 1

    @cached_property
    def options(self) -> dict[str, Any]:
        """The values of ``--sglang-*``, under the names that the server's parser has for them."""
        return options_of(self.config, "sglang_")

    def preferences(self) -> dict[str, Any]:
        """Option values for what ``args.sglang_*`` leaves at the server's default."""
        dtype = "float16" if self.config.precision.fp16 else "float32" if self.config.precision.fp32 else None
        nuclei = self.config.nucleus.replays_nucleus and self.serves_trained_model
        at_once = self.config.lora.adapters_at_once if self._serves_adapter() else ADAPTERS_AT_ONCE
        return {
            "model_path": self.config.hf_checkpoint.hf_checkpoint,
            **({"dtype": dtype} if dtype else {}),
            **({"max_loras_per_batch": at_once} if at_once > ADAPTERS_AT_ONCE else {}),
            **({"sampling_mask_max_tokens": self.config.nucleus.nucleus_size} if nuclei else {}),
        }

    def command(self) -> list[str]:
        """The complete command; only options that differ from the server's defaults."""
        parser = self.parser()
        values = self.preferences()
        for dest, action in parser_actions(parser).items():
            value = self.options.get(dest)
            if value is not None and (value != action.default or dest not in values):
                values[dest] = value
        values |= self.overrides | self.settings()
        return [sys.executable, "-m", self.module, *command_line(parser, values)]

    @property
    def frees_memory(self) -> bool:
        """Whether a trainer needs its GPUs in turns with it."""
        return bool(self.config.cluster.offload_rollout and self.placement.gpu_offset is not None)

    @property
    def serves_http(self) -> bool:
        return self.placement.node_rank == 0

    @cached_property
    def endpoint(self) -> EngineEndpoint:
        """The address at which the engine serves; known before the launch."""
        placement = self.placement
        url = http_url(placement.host, placement.port)
        shares = placement.gpu_offset
        return EngineEndpoint(
            url,
            placement.api_key,
            placement.num_gpus,
            shares,
            bootstrap_port=placement.bootstrap_port,
            puller=self._puller_url,
        )

    @property
    def _puller_url(self) -> str | None:
        placement = self.placement
        return None if placement.puller_port is None else http_url(placement.host, placement.puller_port)

    @cached_property
    def client(self) -> EngineClient:
        """The client of the engine's control plane."""
        return EngineClient(self.endpoint)

    @property
    def process(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError(f"engine {self.placement.rank} was not launched")
        return self._process

    def launch(self) -> None:
        """Starts the server and returns at once."""
        if self._process is not None and self._process.is_alive():
            raise RuntimeError(f"engine {self.placement.rank} already runs")
        argv, secrets = hide_options(self.command())
        self._process = ManagedProcess(
            argv,
            name=f"engine {self.placement.rank} ({self.endpoint.url})",
            log_path=self.log_path,
            env={**self.environment(), **secrets},
            imports_much=self.can_be_forked,
        )
        if self.placement.puller_port is not None:
            self._puller = self._launch_puller(self.placement.puller_port)

    def _launch_puller(self, port: int) -> ManagedProcess:
        local, placement = self.config.weight_sync.update_weight_local_checkpoint_dir, self.placement
        key = [] if placement.api_key is None else [f"--api-key={placement.api_key}"]
        options = [f"--host={placement.host}", f"--port={port}", f"--local-checkpoint-dir={local}", *key]
        argv, secrets = hide_options([sys.executable, "-m", _PULLER, *options])
        return ManagedProcess(
            argv,
            name=f"engine {placement.rank}: helper that fetches weights ({self._puller_url})",
            log_path=self.log_path.with_name(f"{self.log_path.stem}_puller.log"),
            env={"OMP_NUM_THREADS": "1", **secrets},
        )

    def wait_ready(self, timeout: float) -> None:
        """Returns when the engine serves.

        Raises:
            EngineStartError: it ended, or did not serve within ``timeout`` seconds; quotes its log.
        """
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
        if reason := self.process.exit_reason() or (self._puller and self._puller.exit_reason()):
            raise EngineStartError(reason)
        # A process that lost the port to another server would find that server healthy: ask again.
        if self._puller is not None and not self._puller_serves():
            return False
        return not self.serves_http or (self.client.serves(HEALTH_TIMEOUT_S) and self.is_alive())

    def _puller_serves(self) -> bool:
        try:
            self.client.request("GET", f"{self._puller_url}/health", timeout=HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    def is_alive(self) -> bool:
        """Whether its process runs; says nothing about whether it answers."""
        mine = [process for process in (self._process, self._puller) if process is not None]
        return bool(mine) and all(process.is_alive() for process in mine)

    def failure_reason(self) -> str | None:
        """How it, or its helper, ended and the end of its log, or that it is stopped; None while both run."""
        return self.process.failure_reason() or (self._puller.failure_reason() if self._puller else None)

    def shutdown(self) -> None:
        """Ends it and everything it started. May be called again, and before the launch."""
        for process in (self._process, self._puller):
            if process is not None:
                process.terminate(SHUTDOWN_GRACE_S)
