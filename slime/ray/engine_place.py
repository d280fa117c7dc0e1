"""A place among the engines of a run: what outlasts the engine that has it."""

import time


class EnginePlace:
    """Who has it may change; since when, and why the last engine there failed, is known all the same.

    Attributes:
        since: when something there changed last, in Unix seconds.
        failure: why the last engine that died there did; empty if none has.
        failed: when that was, in Unix seconds.
        ailment: what the last health check of the engine there has found wrong; empty if nothing.
    """

    def __init__(self) -> None:
        self.since, self.failed = time.time(), 0.0
        self.failure = self.ailment = ""

    def changed(self, failure: str = "") -> None:
        """Takes note that an engine there has another state, has come or has gone.

        Args:
            failure: why it has died.
        """
        self.since, self.ailment = time.time(), ""
        if failure:
            self.failure, self.failed = failure, self.since
