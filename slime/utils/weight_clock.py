"""Which weights the engines have, for code that goes on to generate while the weights change.

The rollout manager tells; rollout functions and adapters ask::

    begun = clock.updates
    ...                        # generate
    if clock.updates != begun: # an update has interrupted it
        await clock.settled()
"""

import asyncio
import threading
import uuid
from collections.abc import Mapping
from typing import Any


class WeightClock:
    """One per process; may be told from any thread.

    Attributes:
        version: of the weights after the last update that ended; None before the first.
        updates: that have begun so far.
        ahead: updates that will come before the rollout that is asked for now is trained on.
        keeps_prefixes: engines keep what older weights computed, for requests that go on with it.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.updates = 0
        self.ahead = 0
        self.keeps_prefixes = False
        # Engines may have prefixes under the keys of a process before this one, or of another run.
        self._key = f"weights-{uuid.uuid4().hex[:8]}-"
        self._open = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def begin_update(self) -> None:
        """The engines are about to be paused. An update that is begun again counts once."""
        with self._lock:
            self.updates += not self._open
            self._open = True

    def end_update(self, version: int) -> None:
        """All engines go on, with these weights."""
        with self._lock:
            self.version, self._open = version, False
            waiting, self._waiting = self._waiting, []
        for loop, settled in waiting:
            loop.call_soon_threadsafe(settled.set)

    @property
    def updating(self) -> bool:
        """Whether an update has begun and not ended; the pause of the engines may be yet to come."""
        return self._open

    def cache_key(self) -> dict[str, str]:
        """The part of a request by which it starts from no prefix that weights before it have computed.

        Nothing, where there are none. One that is sent while an update is open is answered after it.
        """
        return {"extra_key": f"{self._key}{self.updates}"} if self.keeps_prefixes else {}

    def keyed(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request with `cache_key`, within which an ``extra_key`` of its own goes on to count.

        One that was made before an update, and is sent after it, has the later key alone.
        """
        if not self.keeps_prefixes:
            return request
        key, own = self.cache_key()["extra_key"], request.get("extra_key")
        within = lambda one: key if not one or one.startswith(self._key) else f"{key} {one}"
        return {**request, "extra_key": list(map(within, own)) if isinstance(own, list) else within(own)}

    async def settled(self) -> None:
        """Returns when no update is open."""
        settled = asyncio.Event()
        with self._lock:
            if not self._open:
                return
            self._waiting.append((asyncio.get_running_loop(), settled))
        await settled.wait()

    def age(self, version: int | None) -> int:
        """How far weights are behind those that the rollout asked for now is trained on; 0 if not known."""
        if version is None or self.version is None:
            return 0
        return self.version + self.ahead - version


clock = WeightClock()
"""The one of this process."""
