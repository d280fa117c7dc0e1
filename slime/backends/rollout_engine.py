"""What the rest of the project knows about a generation engine.

Two implementations: SGLang, and the embedded engine for machines without SGLang. Both serve SGLang's
HTTP protocol, so they differ only in how a server is started; nothing outside this room asks which runs.
"""

from abc import ABC, abstractmethod

from slime.backends.sglang_utils.client import EngineClient
from slime.utils.types import EngineEndpoint


class RolloutEngine(ABC):
    """One engine, or one node's part of an engine that spans nodes.

    engine.launch(); engine.wait_ready(600); engine.client.pause_generation(); ...; engine.shutdown()
    """

    @property
    @abstractmethod
    def endpoint(self) -> EngineEndpoint:
        """Where it serves; known before the launch."""

    @property
    @abstractmethod
    def client(self) -> EngineClient:
        """Its control plane."""

    @abstractmethod
    def launch(self) -> None:
        """Starts the server and returns at once."""

    @abstractmethod
    def wait_ready(self, timeout: float) -> None:
        """Returns when the engine serves.

        Raises:
            EngineStartError: it ended, or did not serve within ``timeout`` seconds; quotes its log.
        """

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether its process runs; says nothing about whether it answers."""

    @abstractmethod
    def failure_reason(self) -> str | None:
        """How it ended and the end of its log; None while it runs."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends it and everything it started. May be called again, and before the launch."""


class EngineStartError(RuntimeError):
    """An engine did not come up."""
