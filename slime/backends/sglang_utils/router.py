"""What a run asks of a router, and sglang-router or slime's own as a managed process.

    router = start_router(config, host="127.0.0.1", port=3000, prometheus_port=4000, log_path="router.log")
    router.register_worker(engine.endpoint.url)
    router.url  # POST {url}/generate

Generation through the stock router is at least once: it sends a request again after a connection error or a
5xx, four times in half a second, perhaps to another engine. With a dead engine still listed, a request may
use them all up and be answered 500: clients retry, and whoever watches the engines removes the dead one.

It rewrites requests and drops fields it does not know, among them ``return_routed_experts`` and, in the
sampling parameters, ``custom_params``, ``logit_bias`` and misspelt names.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx
from tenacity import (
    RetryError,
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
    wait_fixed,
)

from slime.backends.sglang_utils.router_commands import metrics_address, router_command, slime_router_command
from slime.config.fleet import FleetConfig
from slime.processes.child import ManagedProcess
from slime.processes.secret_options import hide_options
from slime.processes.silence import Silence
from slime.utils.addresses import http_url
from slime.utils.http_client import KEEPALIVE_S
from slime.utils.http_utils import bearer_header

REGISTER_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 60.0
SHUTDOWN_GRACE_S = 1.0
_ATTEMPTS, _ATTEMPT_PAUSE_S = 3, 0.2  # at a request whose connection breaks
_HEARTBEAT_S = 10.0  # for one answer to `RouterProcess.failure_reason`


class RouterError(RuntimeError):
    """The router ended, did not start, or did not do what it was asked in time."""


class Router(Protocol):
    """A running router in front of the engines of one model, which are its workers.

    To the rollout code it serves ``POST /generate``, and ``GET /workers`` as ``list_workers`` gives it. All
    methods may raise RouterError, and every request of theirs has a deadline.

    Attributes:
        metrics_url: where it shows its metrics to Prometheus; None where that is not known.
    """

    url: str
    metrics_url: str | None

    def register_worker(self, url: str, kind: str = "regular") -> None:
        """Adds an engine that already serves and returns when it gets traffic."""

    def remove_worker(self, url: str) -> None:
        """Takes an engine out, dead or alive; nothing happens if it is not listed."""

    def list_workers(self) -> list[dict[str, Any]]:
        """``url``, ``is_healthy`` and more for each engine."""

    def is_alive(self) -> bool:
        """Whether it runs."""

    def failure_reason(self) -> str | None:
        """How it ended, or why it will not answer; None while it runs."""

    def shutdown(self) -> None:
        """Ends it; dead or alive."""


class RouterProcess:
    """A router that serves ``/workers`` as sglang-router does: that one, or slime's own.

    Args:
        hang_timeout: seconds without an answer after which it has failed, though it runs.
        metrics_url: where it shows its metrics.
    """

    def __init__(
        self,
        process: ManagedProcess,
        url: str,
        api_key: str | None = None,
        hang_timeout: float = math.inf,
        metrics_url: str | None = None,
    ) -> None:
        self.process, self.metrics_url = process, metrics_url
        self._hang_timeout = hang_timeout
        self._silence = Silence()
        self.url = url
        self._api_key = api_key
        self._http = httpx.Client(
            base_url=url,
            headers=bearer_header(api_key),
            timeout=REQUEST_TIMEOUT_S,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
            verify=url.startswith("https"),
            trust_env=False,
        )

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def failure_reason(self) -> str | None:
        """How it ended and the end of its log, that it is stopped, or that it hangs; None while it runs."""
        return self.process.failure_reason() or self._hangs()

    def _hangs(self) -> str | None:
        """Whether it has answered neither looks nor requests of the last seconds; a look may take ten."""
        if self._hang_timeout == math.inf:
            return None
        began = time.monotonic()
        if self._answers(min(_HEARTBEAT_S, self._hang_timeout)):
            self._silence.end()
            return None
        silent = self._silence.seconds(began)
        if silent < self._hang_timeout:
            return None
        return f"router {self.url} hangs, {silent:.0f} s without an answer (--rollout-router-hang-timeout)"

    def wait_ready(self, timeout: float) -> None:
        """Returns when it answers; RouterError after ``timeout`` seconds or if it ended."""
        self._wait(self._answers, timeout, "to start (--engine-startup-timeout)")

    def list_workers(self) -> list[dict[str, Any]]:
        """What ``GET /workers`` lists: ``id``, ``url``, ``is_healthy``, ``load`` and more for each."""
        return self._request("GET", "/workers")["workers"]

    def register_worker(
        self,
        url: str,
        kind: str = "regular",
        timeout: float = REGISTER_TIMEOUT_S,
        bootstrap_port: int | None = None,
    ) -> None:
        """Adds an engine that already serves and returns when it gets traffic.

        Args:
            bootstrap_port: of one that prefills.

        Raises:
            RouterError: it is not listed as healthy after ``timeout`` seconds.
        """
        body: dict[str, Any] = {"url": url, "worker_type": kind}
        if bootstrap_port is not None:
            body["bootstrap_port"] = bootstrap_port
        self._request("POST", "/workers", {**body, "api_key": self._api_key} if self._api_key else body)
        self._wait(lambda: self._is_listed(url, healthy=True), timeout, f"to list {url} as healthy")

    def remove_worker(self, url: str, timeout: float = REGISTER_TIMEOUT_S) -> None:
        """Takes an engine out, dead or alive; nothing happens if it is not listed."""
        for worker in self.list_workers():
            if worker["url"] == url:
                self._request("DELETE", f"/workers/{quote(worker['id'], safe='')}")
        self._wait(lambda: not self._is_listed(url), timeout, f"to drop {url}")

    def shutdown(self) -> None:
        self.process.terminate(SHUTDOWN_GRACE_S)
        self._http.close()

    def _is_listed(self, url: str, healthy: bool = False) -> bool:
        return any(
            worker["url"] == url and (worker["is_healthy"] or not healthy) for worker in self.list_workers()
        )

    def _answers(self, timeout: float = REQUEST_TIMEOUT_S) -> bool:
        try:
            return self._http.get("/liveness", timeout=timeout).status_code == 200
        except httpx.TransportError:
            return False
        except RuntimeError:
            if not self._http.is_closed:
                raise
            return False

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        began = time.monotonic()
        try:
            response = self._sent(method, path, body)
        except httpx.TransportError as error:
            self._silence.seconds(began)
            reason = self.failure_reason() or f"{type(error).__name__}: {error}"
            raise RouterError(f"router {self.url}: {method} {path}: {reason}") from error
        except RuntimeError as error:
            if not self._http.is_closed:
                raise
            raise RouterError(f"router {self.url}: {method} {path}: it was shut down") from error
        if response.status_code == 404 and method == "DELETE":
            return None  # it has done so, and its answer was lost
        if response.status_code >= 400:
            answer = f"HTTP {response.status_code}: {response.text}"
            raise RouterError(f"router {self.url}: {method} {path}: {answer}")
        return response.json()

    def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """The answer; what may be done twice is asked again where a connection breaks."""
        attempts = Retrying(
            stop=stop_after_attempt(1 if method == "POST" else _ATTEMPTS),
            wait=wait_fixed(_ATTEMPT_PAUSE_S),
            retry=retry_if_exception_type((httpx.NetworkError, httpx.RemoteProtocolError)),
            reraise=True,
        )
        return attempts(self._http.request, method, path, json=body)

    def _wait(self, condition: Callable[[], bool], timeout: float, purpose: str) -> None:
        def holds() -> bool:
            if reason := self.process.exit_reason():
                raise RouterError(reason)
            return condition()

        retrying = Retrying(
            stop=stop_after_delay(timeout),
            wait=wait_exponential(multiplier=0.02, max=0.5),
            retry=retry_if_result(lambda done: not done),
        )
        try:
            retrying(holds)
        except RetryError:
            tail = self.process.log_tail()
            raise RouterError(
                f"router {self.url}: waited {timeout:g} s for it {purpose}; its log ends with:\n{tail}"
            ) from None


def start_router(
    config: FleetConfig,
    *,
    host: str,
    port: int,
    prometheus_port: int,
    log_path: str | Path,
    api_key: str | None = None,
) -> RouterProcess:
    """Starts a router and returns when it answers; takes about half a second, slime's own one or two.

    ``prometheus_port`` is the stock router's; slime's own shows its metrics on its own port. ``api_key`` is
    the engines' key: the router asks its clients for it and shows it to the engines.

    Raises:
        RouterError: it ended or does not answer within ``--engine-startup-timeout``; quotes its log.
    """
    metrics = http_url(host, port)
    if config.slime_router.use_slime_router:
        args_path = Path(log_path).with_suffix(".args.json")
        command = slime_router_command(config, host=host, port=port, api_key=api_key, args_path=args_path)
    else:
        command = router_command(
            config, host=host, port=port, prometheus_port=prometheus_port, api_key=api_key
        )
        metrics = metrics_address(config, host, prometheus_port)
    argv, secrets = hide_options(command)
    process = ManagedProcess(
        argv,
        name=f"router ({http_url(host, port)})",
        log_path=log_path,
        env={"NO_COLOR": "1", **secrets},
    )
    hang_timeout = config.fault_tolerance.rollout_router_hang_timeout
    router = RouterProcess(process, http_url(host, port), api_key, hang_timeout, f"{metrics}/metrics")
    try:
        router.wait_ready(config.cluster.engine_startup_timeout)
    except RouterError:
        router.shutdown()
        raise
    return router
