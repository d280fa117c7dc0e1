"""A router that someone else runs: we put our engines in, and take them out again."""

import logging
from collections.abc import Collection
from typing import Any

from slime.backends.sglang_utils.router import RouterError, RouterProcess
from slime.utils.addresses import http_url

logger = logging.getLogger(__name__)

_SILENT_LOOKS = 3


class _Elsewhere:
    """Stands for a process: of one on another machine nothing is known but what it answers."""

    def is_alive(self) -> bool:
        return True

    def exit_reason(self) -> None:
        return None

    def log_tail(self) -> str:
        return "(it writes elsewhere)"

    def terminate(self, grace: float) -> None:
        """Does nothing: the router is not ours to end."""


class ExternalRouter(RouterProcess):
    """The router at ``--sglang-router-ip`` and ``--sglang-router-port``."""

    def __init__(self, host: str, port: int, api_key: str | None = None) -> None:
        super().__init__(_Elsewhere(), http_url(host, port), api_key)  # type: ignore[arg-type]
        self._theirs: set[str] = set()
        self._ours: set[str] = set()
        self._silent = 0

    def join(self, known: Collection[str], timeout: float) -> None:
        """Returns when it answers, within ``timeout`` seconds.

        Args:
            known: engines that it may have already.

        Raises:
            RouterError: it does not answer, or has other engines.
        """
        self.wait_ready(timeout)
        self._theirs = {worker["url"].rstrip("/") for worker in self.list_workers()}
        if foreign := sorted(self._theirs - set(known)):
            raise RouterError(
                f"--sglang-router-ip: router {self.url} has engines of others, {', '.join(foreign)} "
                "(wanted: one without, since requests would reach other weights)"
            )

    def is_alive(self) -> bool:
        return self.failure_reason() is None

    def failure_reason(self) -> str | None:
        """One that answers none of three looks is gone; a single one may have come at a bad moment."""
        self._silent = 0 if self._answers() else self._silent + 1
        if self._silent < _SILENT_LOOKS:
            return None
        return f"router {self.url}: it no longer answers"

    def register_worker(self, url: str, *arguments: Any, **options: Any) -> None:
        super().register_worker(url, *arguments, **options)
        self._ours.add(url)

    def shutdown(self) -> None:
        """Takes our engines out of the router, which goes on with those that it had before."""
        for url in self._ours - self._theirs:
            try:
                self.remove_worker(url)
            except RouterError as error:
                logger.warning("engines of this run are left in the router: %s", error)
                break
        super().shutdown()
