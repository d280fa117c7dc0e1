"""Requests to engines that take them on the run's behalf: weights, memory, versions."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.ray.engine import Engine, EngineState
from slime.ray.engine_watch import EngineWatch
from slime.ray.served_model import ServedModel

Answer = TypeVar("Answer")


class ControlRequests:
    """Asks engines, and tells the watch of those that have died meanwhile.

    Args:
        may_die: whether the death of an engine does not end the run.
    """

    def __init__(self, watch: EngineWatch, may_die: Callable[[Engine], bool]) -> None:
        self._watch, self._may_die = watch, may_die

    def ask(
        self, model: ServedModel, engine: Engine, request: Callable[[EngineClient], Answer]
    ) -> Answer | None:
        """The answer to a control request; None from one that has died, if that is tolerated, or has left.

        Raises:
            EngineError: it refused, or gave no answer.
            EngineFailure: it gave no answer, and its process has ended, of which the reason says more.
        """
        try:
            return request(engine.client)
        except EngineError as error:
            if engine.state is EngineState.DRAINING:
                return None
            # One that was found dead meanwhile may refuse while it is being ended.
            refused = error.status is not None and engine.lives
            if refused or not self._may_die(engine):
                if error.status is None:
                    self._watch.look()
                    self._watch.check()
                raise
            self._watch.declare_dead(model, engine, str(error))
            return None

    def ask_colocated(self, models: Iterable[ServedModel], request: Callable[[EngineClient], None]) -> None:
        """Asks the living engines that share GPUs with a trainer."""
        for model in models:
            for engine in model.living:
                if engine.is_colocated:
                    self.ask(model, engine, request)
