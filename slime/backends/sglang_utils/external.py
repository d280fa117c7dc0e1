"""Engines that someone else runs: endpoints, and no process of ours.

infos = discover_external_engines(["http://10.0.0.5:30000"], api_key="...")
for line in differences(config, infos[0]): ...
ExternalEngines(infos)
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from slime.arguments.core.errors import UsageError
from slime.arguments.validate.external_engines import external_addresses
from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.backends.sglang_utils.command_line import parser_actions
from slime.backends.sglang_utils.external_adapters import without_adapters
from slime.backends.sglang_utils.external_router import ExternalRouter
from slime.backends.sglang_utils.server_engine import (
    HEALTH_TIMEOUT_S,
    POLL_S,
    EnginePlacement,
    EngineStartError,
)
from slime.backends.sglang_utils.servers import ENGINES
from slime.config.fleet import FleetConfig
from slime.config.served_models import DEFAULT
from slime.utils.types import EngineEndpoint

logger = logging.getLogger(__name__)

DISCOVERY_TIMEOUT_S = 30.0
_INFO_TIMEOUT_S = 5.0
_THEIR_OWN = frozenset(
    {
        *("api_key", "admin_api_key", "tokenizer_path", "served_model_name", "random_seed", "weight_version"),
        *("log_level", "log_level_http", "enable_metrics", "download_dir", "disaggregation_mode"),
    }
)
"""Options about which engine and run may differ, beside those that a launcher decides."""
_KINDS = {"null": "regular", "": "regular"}


class ExternalEngineError(UsageError):
    """An engine of somebody else's is not there, or is not what the run needs."""


@dataclass(frozen=True)
class ExternalEngineInfo:
    """What an engine says of itself.

    Attributes:
        worker_type: "regular", "prefill", "decode" or "encoder".
        server_info: all of its options, as ``/server_info`` has them.
    """

    url: str
    host: str | None = None
    port: int | None = None
    worker_type: str = "regular"
    num_gpus: int = 1
    server_info: Mapping[str, Any] = field(default_factory=dict)
    bootstrap_port: int | None = None
    api_key: str | None = None

    @property
    def parallel_config(self) -> dict[str, int]:
        """How its model is split: ``tp_size``, ``pp_size``, ``ep_size`` and ``moe_dp_size``."""
        names = ("tp_size", "pp_size", "ep_size", "moe_dp_size")
        return {name: int(self.server_info.get(name) or 1) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Its fields as plain data, but for its key."""
        return {name: value for name, value in vars(self).items() if name != "api_key"}

    @property
    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(
            self.url, self.api_key, self.num_gpus, gpu_offset=None, bootstrap_port=self.bootstrap_port
        )


def discover_external_engines(
    addrs: Sequence[str], timeout: float = DISCOVERY_TIMEOUT_S, api_key: str | None = None
) -> list[ExternalEngineInfo]:
    """Asks each engine what it is; ``timeout`` in seconds for all of them.

    Raises:
        ExternalEngineError: one did not answer, or refused.
    """
    deadline = time.monotonic() + timeout
    return [_discover(url if "://" in url else f"http://{url}", deadline, api_key) for url in addrs]


def _discover(url: str, deadline: float, api_key: str | None) -> ExternalEngineInfo:
    client = EngineClient(EngineEndpoint(url, api_key, 1, None), timeout=_INFO_TIMEOUT_S)
    while True:
        try:
            return _read(url, api_key, _server_info(client))
        except EngineError as error:
            if error.status is not None or time.monotonic() > deadline:
                raise ExternalEngineError(
                    f"--rollout-external-engine-addrs {url}: {error} (wanted: an engine that serves)"
                ) from error
            time.sleep(POLL_S)


def _server_info(client: EngineClient) -> dict[str, Any]:
    try:
        return client.server_info()
    except EngineError as error:
        if error.status != 404:
            raise
        return client.request("GET", "/get_server_info")


def _read(url: str, api_key: str | None, info: Mapping[str, Any]) -> ExternalEngineInfo:
    mode = str(info.get("disaggregation_mode") or "")
    kind = "encoder" if info.get("encoder_only") else _KINDS.get(mode, mode)
    gpus = info.get("num_gpus") or int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)
    port = info.get("disaggregation_bootstrap_port") if kind == "prefill" else None
    parts = urlsplit(url)
    return ExternalEngineInfo(
        url, parts.hostname, parts.port, kind, int(gpus), info, bootstrap_port=port, api_key=api_key
    )


def apply_external_engine_info_to_args(args: Any, logger: logging.Logger | None = None) -> None:
    """Asks the engines of ``args.rollout_external_engine_addrs``, for plug-ins that parse their own flags.

    Sets ``rollout_external_engine_infos``, ``rollout_num_engines`` and ``rollout_num_gpus``.
    """
    key = vars(args).get("sglang_api_key")
    infos = discover_external_engines(args.rollout_external_engine_addrs, api_key=key)
    gpus = sum(info.num_gpus for info in infos)
    told = {"rollout_external_engine_infos": [info.to_dict() for info in infos]}
    vars(args).update(told, rollout_num_engines=len(infos), rollout_num_gpus=gpus)
    if logger is not None:
        logger.info("%d external engines on %d GPUs", len(infos), gpus)


@dataclass(frozen=True)
class ExternalRolloutServer:
    """Engines of somebody else's behind a router, for plug-ins. They are not ours to put to sleep."""

    router_ip: str
    router_port: int
    router: ExternalRouter
    infos: Sequence[ExternalEngineInfo]

    @property
    def engine_urls(self) -> list[str]:
        return [info.url for info in self.infos]

    def offload(self) -> None:
        """Does nothing: the engines share no GPU with this run."""

    def onload(self, tags: Sequence[str] | None = None) -> None:
        """Does nothing, as `offload` does."""

    def recover(self) -> None:
        """Starts none: whoever runs the engines does."""
        logger.warning("engines at %s are not this run's to recover", ", ".join(self.engine_urls))

    def stop(self) -> None:
        """Takes the engines out of the router."""
        self.router.shutdown()


def start_external_rollout_servers(
    args: Any, *, start_router: Callable[..., tuple[str, int]]
) -> dict[str, ExternalRolloutServer]:
    """Puts the engines of ``args.rollout_external_engine_addrs`` behind a router, for a plug-in's own loop.

    Runs of ours do it in `slime.ray.fleet_setup`, and hold the engines against their flags besides.

    Args:
        start_router: called as (args, has_pd_disaggregation=...), returns host and port of a router.

    Returns:
        The server of the only model, under "default".

    Raises:
        ExternalEngineError: an engine does not answer.
        RouterError: the router does not take one.
    """
    apply_external_engine_info_to_args(args)
    told = vars(args)
    infos = [ExternalEngineInfo(**info) for info in told["rollout_external_engine_infos"]]
    halves = any(info.worker_type in ("prefill", "decode") for info in infos)
    host, port = start_router(args, has_pd_disaggregation=halves)
    router = ExternalRouter(host, port, told.get("sglang_api_key"))
    router.wait_ready(DISCOVERY_TIMEOUT_S)
    for info in [info for info in infos if info.worker_type != "encoder"]:
        router.register_worker(info.url, info.worker_type, bootstrap_port=info.bootstrap_port)
    return {DEFAULT: ExternalRolloutServer(host, port, router, infos)}


def differences(config: FleetConfig, info: ExternalEngineInfo) -> Iterator[str]:
    """Yields the options with which an engine was started and the run asks otherwise, one line each."""
    where = f"--rollout-external-engine-addrs {info.url}"
    if info.worker_type == "encoder":
        yield f"{where}: only encodes images (wanted: an engine that generates)"
    if config.off_policy.use_rollout_routing_replay and not info.server_info.get(
        "enable_return_routed_experts", True
    ):
        yield f"{where}: was started without --enable-return-routed-experts (--use-rollout-routing-replay)"
    told = info.server_info.get("sampling_mask_max_tokens")
    wanted = config.nucleus.nucleus_top_k
    if config.nucleus.replays_nucleus and told is not None and told < wanted:
        yield (
            f"{where}: was started with --sampling-mask-max-tokens {told} (wanted: {wanted}, or "
            "--rollout-top-k, or --sglang-sampling-mask-max-tokens)"
        )
    yield from without_adapters(config.lora, where, info.server_info)
    for dest, wanted in _asked_for(config).items():
        found = info.server_info.get(dest, wanted)
        # What was left to the engine cannot be told from here.
        if found not in (wanted, None, "auto"):
            option = f"--sglang-{dest.replace('_', '-')}"
            yield f"{where}: was started with {dest} {found} (wanted: {wanted}, see {option})"


def _asked_for(config: FleetConfig) -> dict[str, Any]:
    """Options of the server that the user has set, and those by which it computes as the trainer does."""
    nowhere = EnginePlacement(rank=0, host="127.0.0.1", port=1)
    engine = ENGINES[config.engines.rollout_engine](config, nowhere, "")
    values = {key: value for key, value in engine.preferences().items() if key == "dtype"}
    for dest, action in parser_actions(engine.parser()).items():
        value = engine.options.get(dest)
        if value is not None and value != action.default:
            values[dest] = value
    decided = {*engine.settings(), "model_path", *_THEIR_OWN}
    return {dest: value for dest, value in values.items() if dest not in decided}


def external_engines(config: FleetConfig, timeout: float = DISCOVERY_TIMEOUT_S) -> list[ExternalEngineInfo]:
    """The engines of a run, once each is known to be what the run needs.

    Raises:
        ExternalEngineError: one is not there, or differs; names it and the field.
    """
    addresses = external_addresses(config.engines.rollout_external_engine_addrs)
    infos = discover_external_engines(addresses, timeout, config.router.sglang_api_key)
    for info in infos:
        for line in differences(config, info):
            raise ExternalEngineError(line)
    kinds = {info.worker_type for info in infos}
    if len(kinds) > 1 and kinds != {"prefill", "decode"}:
        raise ExternalEngineError(
            f"--rollout-external-engine-addrs: there are {' and '.join(sorted(kinds))} engines "
            "(wanted: regular ones, or prefill and decode)"
        )
    if kinds & {"prefill", "decode"} and len(kinds) == 1:
        raise ExternalEngineError(
            f"--rollout-external-engine-addrs: all engines {kinds.pop()} (wanted: both halves)"
        )
    return infos


class ExternalEngine:
    """An engine that lives as long as it answers with the weights that it was given."""

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self.endpoint = endpoint
        self.client = EngineClient(endpoint, timeout=HEALTH_TIMEOUT_S)
        self._version: str | None = None

    def failure_reason(self) -> str | None:
        """Asks what a paused engine answers too; any answer will do, unless it tells of other weights."""
        try:
            found = self.client.model_info().get("weight_version")
        except EngineError as error:
            if error.status is None:
                return f"it no longer answers: {error.body}"
            return None
        if found is None or self._may_serve(str(found)):
            return None
        return (
            f"it serves weight version {str(found)!r}, and was given {self._version!r}: "
            "it was restarted, or somebody else updates it too"
        )

    def _may_serve(self, found: str) -> bool:
        """An update that is under way may have brought the next version already."""
        given = self._version
        if given is None or found == given:
            return True
        return given.isdecimal() and found == str(int(given) + 1)

    def processes(self) -> list[tuple[str, int]]:
        """None: they are not ours to end."""
        return []

    def updated(self, version: str) -> None:
        self._version = version

    def end(self) -> None:
        """Does nothing: the engine is not ours to end."""


class ExternalEngines:
    """A source of engines at these endpoints. One that died serves again if its owner has started it anew.

    Args:
        gets_weights: whether they are given weights before they generate. One in which a run before this was
            killed while it updated it stands still until then.
    """

    def __init__(self, endpoints: Sequence[EngineEndpoint], *, gets_weights: bool = True) -> None:
        self._endpoints, self._gets_weights = list(endpoints), gets_weights

    def __len__(self) -> int:
        return len(self._endpoints)

    def can_fill(self, place: int) -> bool:
        return self._is_up(ExternalEngine(self._endpoints[place]))

    def launch(self, place: int, rank: int) -> ExternalEngine:
        return ExternalEngine(self._endpoints[place])

    def wait_ready(self, handles: Sequence[ExternalEngine], timeout: float) -> list[EngineEndpoint]:
        deadline = time.monotonic() + timeout
        for handle in handles:
            while not self._is_up(handle):
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"engine {handle.endpoint.url}: does not serve after {timeout:g} s "
                        "(--engine-startup-timeout)"
                    )
                time.sleep(POLL_S)
        return [handle.endpoint for handle in handles]

    def _is_up(self, engine: ExternalEngine) -> bool:
        return engine.client.health() if self._gets_weights else engine.client.serves()
