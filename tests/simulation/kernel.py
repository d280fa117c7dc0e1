"""Threads and time of a simulated world: one thread runs at a time, a seed says which, and time jumps.

Simulated threads are real ones that hand on a baton, so that product code needs no change and thread-local
state stays right. A thread that waits hands it on; when none can go on, time jumps to the next timer.
"""

import hashlib
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar


class Killed(BaseException):
    """Ends a simulated thread whose process, or world, has ended. No product code may handle it."""


class Violation(AssertionError):
    """What must never happen has happened."""


class Carrier:
    """A real thread that carries one simulated thread after the other."""

    free: ClassVar[list["Carrier"]] = []

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.job: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name="simulated", daemon=True).start()

    @classmethod
    def take(cls) -> "Carrier":
        return cls.free.pop() if cls.free else cls()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            self.job()


class SimThread:
    """A thread of the world.

    Attributes:
        process: whose it is; threads that it starts are of the same one.
        waits: what it waits for and since when, for messages.
    """

    def __init__(self, name: str, process: Any, carrier: Any) -> None:
        self.name, self.process, self.carrier = name, process, carrier
        self.killed = self.blocked = self.woken = False
        self.token = 0
        self.waits: tuple[str, float] = ("", 0.0)


Waiters = deque[tuple[SimThread, int]]
"""Threads that wait for the same, each with the number of its wait."""


class World:
    """Time, threads, chance and the trace of one history.

    Args:
        longest: virtual seconds that a history may last.
        most_events: that it may have.
        preemption: how likely a thread is held up where it takes a lock or begins something.
    """

    def __init__(
        self, seed: int, *, longest: float = 20_000.0, most_events: int = 60_000, preemption: float = 0.1
    ) -> None:
        self.seed, self.rng, self.now = seed, random.Random(seed), 0.0
        self._longest, self._most_events, self._preemption = longest, most_events, preemption
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ready: list[SimThread] = []
        self._count = self.events = 0
        self._host = SimThread("host", None, _Host())
        self.current = self._host
        self.threads: dict[SimThread, None] = {}
        self.failure: BaseException | None = None
        self.ending = False
        self._main: SimThread | None = None
        self.lines: list[str] = []
        self._keeps_lines = False
        self._digest = hashlib.blake2b(digest_size=16)
        self.on_event: Callable[[], None] = lambda: None

    def keep_trace(self) -> None:
        self._keeps_lines = True

    def note(self, line: str) -> None:
        """Adds to the trace, by which two runs of a seed are compared."""
        line = f"{self.now:.6f} {line}"
        self._digest.update(line.encode())
        if self._keeps_lines:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def run(self, body: Callable[[], None]) -> None:
        """Runs ``body`` as the first thread until it ends, then ends all others.

        Raises:
            Violation, or what ``body`` raised.
        """
        self._main = self.spawn("driver", body, process="driver")
        self._hand_to(self._pick())
        self.ending = True
        self._end_all()
        if self.failure is not None:
            raise self.failure

    def fail(self, message: str) -> None:
        """Ends the history; from a thread of the world, or from a timer."""
        self.fail_with(Violation(f"{message} [at {self.now:.3f} s]"))

    def fail_with(self, error: BaseException) -> None:
        self.failure = self.failure or error

    @property
    def is_over(self) -> bool:
        """Whether no thread is left."""
        return not self.threads

    def spawn(self, name: str, body: Callable[[], None], process: Any = None) -> SimThread:
        if self.ending:
            raise Killed
        thread = SimThread(name, self.current.process if process is None else process, Carrier.take())
        thread.carrier.job = lambda: self._carry(thread, body)
        self.threads[thread] = None
        self._ready.append(thread)
        return thread

    def after(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Calls it later, on no thread: it may wake threads, and must not wait."""
        self._count += 1
        heapq.heappush(self._timers, (self.now + max(seconds, 0.0), self._count, callback, arguments))

    def block(self, what: str, timeout: float | None = None, waiters: "Waiters | None" = None) -> bool:
        """Waits until somebody wakes ``waiters``; False if the time has run out before."""
        me = self.current
        if me.killed or self.ending:
            raise Killed
        me.token += 1
        me.blocked, me.woken, me.waits = True, False, (what, self.now)
        if waiters is not None:
            waiters.append((me, me.token))
        if timeout is not None:
            self.after(timeout, self._expire, me, me.token)
        self._switch()
        return me.woken

    def wake_all(self, waiters: "Waiters") -> None:
        while waiters:
            thread, token = waiters.popleft()
            if thread.blocked and thread.token == token:
                thread.blocked, thread.woken = False, True
                self._ready.append(thread)

    def sleep(self, seconds: float) -> None:
        self.block("sleep", seconds)

    def yield_(self) -> None:
        """Lets others go on that can."""
        if self.current.killed or self.ending:
            raise Killed
        self._ready.append(self.current)
        self._switch()

    def hold_up(self) -> None:
        """A place where the current thread may lose the processor, for a moment or for longer."""
        if self.rng.random() < self._preemption:
            self.sleep(self.rng.choice((0.0, 0.002, 0.02, 0.3)) * self.rng.random())

    def kill(self, process: Any) -> None:
        """Ends all threads of a process where they are."""
        for thread in [thread for thread in self.threads if thread.process is process]:
            thread.killed = True
            if thread.blocked:
                thread.blocked = False
                self._ready.append(thread)

    def waiting(self) -> str:
        """Who waits for what, since when."""
        return "; ".join(
            f"{t.name}: {t.waits[0]} since {t.waits[1]:.1f} s" for t in self.threads if t.blocked
        )

    def _expire(self, thread: SimThread, token: int) -> None:
        if thread.blocked and thread.token == token:
            thread.blocked = False
            self._ready.append(thread)

    def _pick(self) -> SimThread:
        """Who runs next; time goes on while nobody can."""
        while True:
            if self.failure is not None or self.ending:
                return self._host
            if self._ready:
                number = self.rng.randrange(len(self._ready)) if len(self._ready) > 1 else 0
                return self._ready.pop(number)
            if not self._timers:
                self.fail(f"nobody can go on: {self.waiting()}")
                continue
            self._take_timer()

    def _take_timer(self) -> None:
        when, _, callback, arguments = heapq.heappop(self._timers)
        self.now = max(self.now, when)
        self.events += 1
        if when > self._longest or self.events > self._most_events:
            self.fail(f"a wait without end after {self.events} events: {self.waiting()}")
            return
        try:
            callback(*arguments)
            self.on_event()
        except Exception as error:  # of a stand-in or an invariant: whoever runs must not see it
            self.fail_with(error)

    def _switch(self) -> None:
        me = self.current
        following = self._pick()
        if following is not me:
            self._hand_to(following)
        if me.killed:
            raise Killed

    def _hand_to(self, following: SimThread) -> None:
        me, self.current = self.current, following
        following.carrier.baton.release()
        me.carrier.baton.acquire()

    def _carry(self, thread: SimThread, body: Callable[[], None]) -> None:
        try:
            if not thread.killed:
                body()
        except Killed:
            pass
        except BaseException as error:
            self.fail_with(error)
        del self.threads[thread]
        if thread is self._main:
            self.ending = True
        Carrier.free.append(thread.carrier)
        self.current = self._pick()
        self.current.carrier.baton.release()

    def _end_all(self) -> None:
        while self.threads:
            thread = next(iter(self.threads))
            thread.killed = True
            self._hand_to(thread)


class _Host:
    """The real thread that a world runs on."""

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
