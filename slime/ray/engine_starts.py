"""Engines that are started in place of others that died."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence

import ray

from slime.backends.sglang_utils.server_engine import EngineStartError
from slime.ray.engine import Engine, EngineState
from slime.ray.engine_watch import EngineFailure
from slime.ray.served_model import ServedModel
from slime.ray.waiting import ProcessDied

logger = logging.getLogger(__name__)

END_TIMEOUT = 180.0  # seconds for a dead engine to leave its router and to end
MAX_FAILED_STARTS = 3  # of the replacements of one engine in a row
START_ERRORS = (EngineStartError, ProcessDied, ray.exceptions.RayError, TimeoutError)


class EngineStarts:
    """Starts replacements, until it is stopped.

    Args:
        timeout: seconds for an engine to serve.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._launching = threading.Lock()
        self._stopped = False

    def await_ends(self, dead: Sequence[Engine]) -> None:
        """A replacement may need a dead engine's GPUs, and be given its address.

        Raises:
            EngineFailure: one has not ended.
        """
        deadline = time.monotonic() + END_TIMEOUT
        for engine in dead:
            if not engine.gone.wait(max(0.0, deadline - time.monotonic())):
                raise EngineFailure(f"{engine} is dead and has not ended after {END_TIMEOUT:.0f} s")

    def replacements(self, model: ServedModel) -> list[Engine]:
        """Starts engines in place of those that are gone, and others for those that end while they start.

        Raises:
            EngineFailure: those of one place end again and again.
        """
        deadline = time.monotonic() + self._timeout
        fresh, failures = self._launch(model), Counter[int]()
        while model.starting:
            try:
                model.wait_ready(max(deadline - time.monotonic(), 0.0))
            except START_ERRORS as error:
                _bury(model, failures, error)
                fresh += self._launch(model)
        return [engine for engine in fresh if engine.state is EngineState.READY]

    def stop(self) -> None:
        """From now on none is started; what has been is among the model's engines."""
        with self._launching:
            self._stopped = True

    @property
    def stopped(self) -> bool:
        return self._stopped

    def _launch(self, model: ServedModel) -> list[Engine]:
        with self._launching:
            return [] if self._stopped else model.replace_gone()


def _bury(model: ServedModel, failures: Counter[int], error: Exception) -> None:
    """Ends the engines that have ended while they started, so that others can take their places.

    Args:
        failures: so far, by rank.
        error: the failed start, which is raised if none has ended.

    Raises:
        EngineFailure: one has ended too often.
    """
    ended = [(engine, reason) for engine in model.starting if (reason := engine.handle.failure_reason())]
    if not ended:
        raise error
    for engine, reason in ended:
        failures[engine.rank] += 1
        if (count := failures[engine.rank]) > MAX_FAILED_STARTS:
            raise EngineFailure(
                f"{engine}: {count} replacements in a row ended while they started: {reason}"
            ) from error
        logger.warning("%s ended while it started, and is started again: %s", engine, reason)
        engine.become(EngineState.DEAD, reason)
        engine.end()
