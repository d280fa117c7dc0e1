"""Watches engines from one background thread and reports those that stopped answering.

monitor = HealthMonitor(fleet.checks, fleet.on_failure, interval=30, timeout=30)
monitor.start()    # paused
monitor.resume()   # while engines generate
monitor.pause()    # before they are offloaded or updated: they need not answer then
monitor.stop()
"""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial

logger = logging.getLogger(__name__)

Check = Callable[[float], bool]
"""Asks one engine; takes a timeout in seconds; False or an exception means that it is sick."""


class HealthMonitor:
    """Checks every engine each ``interval`` seconds while resumed.

    Args:
        checks: the engines to watch right now, by name. Asked anew in every round, so that engines may
            come and go.
        on_failure: called in the monitor's thread with name and reason of an engine that failed a check.
            Until ``checks`` stops naming the engine it is called in each round.
        interval: seconds between rounds.
        timeout: seconds that a check may take.
        first_wait: seconds between a resume and the first round, for engines that are slow to wake.
    """

    def __init__(
        self,
        checks: Callable[[], Mapping[str, Check]],
        on_failure: Callable[[str, str], None],
        *,
        interval: float,
        timeout: float,
        first_wait: float = 0.0,
    ) -> None:
        self._checks = checks
        self._on_failure = on_failure
        self._interval = interval
        self._timeout = timeout
        self._first_wait = first_wait
        self._changed = threading.Condition(threading.RLock())
        self._paused = True
        self._stopped = False
        self._resumes = 0
        self._thread: threading.Thread | None = None

    @property
    def is_checking_enabled(self) -> bool:
        with self._changed:
            return self._thread is not None and not self._paused and not self._stopped

    def start(self) -> bool:
        """Starts the thread, paused. False if it already runs."""
        with self._changed:
            if self._thread is not None:
                return False
            self._paused, self._stopped = True, False
            self._thread = threading.Thread(target=self._run, name="engine-health", daemon=True)
            self._thread.start()
            return True

    def pause(self) -> None:
        """On return no failure is being reported, and none will be until the next resume.

        A check that is under way is not waited for; its result is ignored.
        """
        with self._changed:
            self._paused = True
            self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            if self._paused:
                self._paused = False
                self._resumes += 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Ends the thread; waits for a check that is under way, ``timeout`` seconds at most."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._stopped = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout)

    def _run(self) -> None:
        last = 0
        while (resumes := self._await_round(last)) is not None:
            self._check_all(resumes)
            last = resumes

    def _await_round(self, last: int) -> int | None:
        """Waits until a round is due and returns the number of the resume it follows; None once stopped.

        ``last`` is that number for the previous round.
        """
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._stopped or not self._paused)
                if self._stopped:
                    return None
                resumes = self._resumes
                pause = self._interval if resumes == last else self._first_wait
                if not self._changed.wait_for(partial(self._is_outdated, resumes), pause):
                    return resumes

    def _is_outdated(self, resumes: int) -> bool:
        """Whether there was a pause, another resume or the stop since the ``resumes``-th resume."""
        return self._stopped or self._paused or self._resumes != resumes

    def _check_all(self, resumes: int) -> None:
        for name, check in self._checks().items():
            reason = self._failure(check)
            with self._changed:
                if self._is_outdated(resumes):
                    return
                if reason is not None:
                    logger.error("engine %s failed its health check: %s", name, reason)
                    self._on_failure(name, reason)

    def _failure(self, check: Check) -> str | None:
        try:
            return None if check(self._timeout) else f"no healthy answer within {self._timeout:g} s"
        except Exception as error:  # whatever goes wrong with a check is the finding, not a fault of ours
            return f"{type(error).__name__}: {error}"
