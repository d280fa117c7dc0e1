"""The client of engines that take weights, which says whose they are."""

import math
from time import monotonic
from typing import Any

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.utils.types import EngineEndpoint
from slime.weight_sync.writer import HEADER

CONFLICT = 409
"""The status with which an engine refuses a trainer in whose place another one has come."""
_STOPPED_S = 1.0  # no trainer takes another's place sooner


class WriterClient(EngineClient):
    """Says with each request which trainer asks, so that an engine can refuse one that has been replaced.

    SGLang cannot. There this client looks, before what changes or starts the engine, whether it still has the
    version that this trainer gave it, if nothing was asked for so long that another one may have come: a
    trainer that was stopped in between is found out, but for the one request that it was stopped at.

    Args:
        writer: the trainer; without one nothing is said or looked at.
    """

    def __init__(self, endpoint: EngineEndpoint, timeout: float, writer: str | None = None) -> None:
        super().__init__(endpoint, timeout=timeout)
        self.writer = writer
        self._given: str | None = None
        self._asked_at = -math.inf
        if writer is not None:
            self._headers.append((HEADER.encode(), writer.encode()))

    def request(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        self._asked_at = monotonic()
        return super().request(method, path, *arguments, **options)

    def take_weights(self) -> bool:
        """Has the engine take weights from this trainer alone, until another one takes them.

        Returns:
            Whether it had an update open, as far as it can tell, which is closed.

        Raises:
            EngineError: another trainer has come after this one.
        """
        if self.writer is None:
            return False
        try:
            answer = self.request("POST", "/take_weights", {"writer": self.writer})
        except EngineError as error:
            if error.status != 404:
                raise
            self._given = self.weight_version()
            return False
        return bool(answer["interrupted"])

    def has_given(self, version: str) -> None:
        """The engine has this version, whichever client has sent it."""
        if self._given is not None:
            self._given = version

    def require_own(self) -> None:
        """
        Raises:
            EngineError: somebody else has given the engine weights since, where it does not refuse that.
        """
        if self._given is None or monotonic() - self._asked_at < _STOPPED_S:
            return
        if (found := self.weight_version()) != self._given:
            wanted = f"{self._given!r}, which {self.writer} found there or gave it"
            told = f"weight version {found!r} (wanted: {wanted}): another trainer has taken its place"
            raise self._error("/model_info", CONFLICT, told)

    def pause_generation(self, mode: str = "abort") -> None:
        self.require_own()
        super().pause_generation(mode)

    def continue_generation(self) -> None:
        self.require_own()
        super().continue_generation()

    def update(self, path: str, body: dict[str, Any], version: str | None, flush: bool = False) -> None:
        self.require_own()
        super().update(path, body, version, flush)
        if version is not None:
            self.has_given(version)

    def update_weight_version(self, version: str) -> None:
        self.require_own()
        super().update_weight_version(version)
        self.has_given(version)
