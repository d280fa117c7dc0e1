"""One model of the fleet: its engines, and the router in front of them."""

from collections.abc import Callable, Sequence
from typing import Any

from slime.backends.sglang_utils.router import Router, RouterError
from slime.ray.engine import Engine, EngineState
from slime.ray.engine_group import EngineGroup


class ServedModel:
    """Engines that serve the same model behind one router.

    Args:
        start_router: starts it and returns when it answers.
        takes_updates: whether the trainer's weights go to the engines.
    """

    def __init__(
        self,
        name: str,
        groups: Sequence[EngineGroup],
        start_router: Callable[[], Router],
        *,
        takes_updates: bool = True,
    ) -> None:
        self.name, self.takes_updates = name, takes_updates
        self._groups = list(groups)
        self._start_router = start_router
        self.router: Router | None = None

    @property
    def engines(self) -> list[Engine]:
        return [engine for group in self._groups for engine in group.engines]

    @property
    def living(self) -> list[Engine]:
        """The engines that have started and not died since."""
        return [engine for engine in self.engines if engine.lives]

    @property
    def dead(self) -> list[Engine]:
        """The dead engines that have not been replaced yet."""
        return [engine for engine in self.engines if engine.state is EngineState.DEAD]

    @property
    def launches(self) -> int:
        """Engines started so far."""
        return sum(group.launches for group in self._groups)

    @property
    def replaced(self) -> int:
        """Engines that were started in place of others."""
        return self.launches - len(self.engines)

    def restarts_alone(self, engine: Engine) -> bool:
        """Whether another one may take its place at once: it needs no weights and no GPU of the trainer's."""
        return not self.takes_updates and not engine.is_colocated

    def launch(self) -> None:
        """Begins to start all engines, then starts the router."""
        for group in self._groups:
            group.launch()
        self.router = self._start_router()

    def replace_gone(self) -> list[Engine]:
        """Begins to start engines in place of those that are gone, and returns them."""
        return [engine for group in self._groups for engine in group.replace_gone()]

    def wait_ready(self, timeout: float) -> None:
        """Returns when all engines that were launched serve; ``timeout`` in seconds."""
        for group in self._groups:
            group.wait_ready(timeout)

    def admit(self, engine: Engine) -> None:
        """Lets requests through to an engine that is ready, unless it dies meanwhile.

        Raises:
            RouterError: the router does not take it.
        """
        assert self.router is not None, f"model {self.name} has not been launched"
        port = engine.endpoint.bootstrap_port
        half: dict[str, Any] = {} if port is None else {"bootstrap_port": port}
        try:
            self.router.register_worker(engine.url, engine.kind, **half)
        except RouterError:
            if engine.state is not EngineState.DEAD:
                raise
        if not engine.become(EngineState.SERVING):
            # Whoever found it dead may have asked the router before it was listed there.
            self.router.remove_worker(engine.url)

    def dismiss(self, engine: Engine) -> None:
        """Takes an engine out of the router.

        Raises:
            RouterError: the router keeps it.
        """
        if self.router is not None:
            self.router.remove_worker(engine.url)

    def stop_router(self) -> None:
        if self.router is not None:
            self.router.shutdown()
