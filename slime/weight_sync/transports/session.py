"""Sends the same control request to several engines at once."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from slime.backends.sglang_utils.client import EngineClient
from slime.utils.types import EngineEndpoint


class EngineClients:
    """Clients of some engines. A request goes to all of them in parallel; each has the client's deadline."""

    def __init__(self, endpoints: Sequence[EngineEndpoint], timeout_s: float) -> None:
        self.endpoints = list(endpoints)
        self.clients = [EngineClient(endpoint, timeout=timeout_s) for endpoint in endpoints]

    def each(self, request: Callable[[EngineClient], object]) -> None:
        """Calls ``request`` with every client.

        Raises:
            EngineError: of the first engine, in the order of the endpoints, that failed.
        """
        if not self.clients:
            return
        with ThreadPoolExecutor(len(self.clients), thread_name_prefix="engine-control") as pool:
            futures = [pool.submit(request, client) for client in self.clients]
        for future in futures:
            future.result()

    def close(self) -> None:
        for client in self.clients:
            client.close()
