"""Engines that someone else runs: endpoints, and no process of ours."""

import time
from collections.abc import Sequence

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.backends.sglang_utils.server_engine import HEALTH_TIMEOUT_S, POLL_S, EngineStartError
from slime.utils.types import EngineEndpoint


class ExternalEngine:
    """An engine that lives as long as it answers."""

    def __init__(self, endpoint: EngineEndpoint) -> None:
        self.endpoint = endpoint
        self.client = EngineClient(endpoint, timeout=HEALTH_TIMEOUT_S)

    def failure_reason(self) -> str | None:
        """Asks what a paused or released engine answers too; any answer will do."""
        try:
            self.client.model_info()
        except EngineError as error:
            if error.status is None:
                return f"it no longer answers: {error.body}"
        return None

    def end(self) -> None:
        """Not ours to end."""


class ExternalEngines:
    """A source of engines at these endpoints. What dies is not replaced."""

    replaces = False

    def __init__(self, endpoints: Sequence[EngineEndpoint]) -> None:
        self._endpoints = list(endpoints)

    def __len__(self) -> int:
        return len(self._endpoints)

    def launch(self, place: int, rank: int) -> ExternalEngine:
        return ExternalEngine(self._endpoints[place])

    def wait_ready(self, handles: Sequence[ExternalEngine], timeout: float) -> list[EngineEndpoint]:
        deadline = time.monotonic() + timeout
        for handle in handles:
            while not handle.client.serves():
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"engine {handle.endpoint.url}: does not serve after {timeout:g} s "
                        "(--engine-startup-timeout)"
                    )
                time.sleep(POLL_S)
        return [handle.endpoint for handle in handles]
