"""A follower's place on the board: taken once nobody else has it, kept by a heart-beat, given up at the end.

    presence = Presence(board, "of-engine-3", "http://127.0.0.1:30000", home, note)
    with presence:        # Taken: somebody else follows for that engine
        presence.tell(note)

There is nothing that compares and sets on an object store. So whoever comes writes its note and looks again:
of two that come at once both see each other, go, and come again after different times.
"""

import logging
import random
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from urllib.parse import urlsplit

from slime.utils.addresses import is_loopback
from slime.utils.worker_url import spelling
from slime.weight_sync.versions.board import JOINS, Board, Follower, name_of, new_key
from slime.weight_sync.versions.home import machine
from slime.weight_sync.versions.pulse import BEAT_S, SILENT_S, Pulse

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.25
_BACK_OFF_S = 1.0
_TRIES = 5
_END_S = 30.0  # a beat that is being written


class Taken(RuntimeError):
    """Another follower has the engine, or the name."""


class Presence:
    """
    Args:
        engine: its URL, as this process reaches it.
        home: the local directory that this process holds, if it holds one: another note of that home was
            left by a process that has ended.
        note: the first one.
    """

    def __init__(self, board: Board, name: str, engine: str, home: str, note: Follower) -> None:
        self._board, self._name, self._engine, self.key = board, name, engine, new_key(name)
        self._note = replace(note, claim=_claim_on(engine), home=home, stage=JOINS)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._beating: threading.Thread | None = None
        self._is_lost = False

    def __enter__(self) -> "Presence":
        """
        Raises:
            Taken: another one lives that has the engine or the name.
            OSError: the place does not answer.
        """
        self._come()
        self._beating = threading.Thread(target=self._beat, name="heart-beat", daemon=True)
        self._beating.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No trainer waits for this one any more."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join(_END_S)
        with suppress(OSError):  # it is found to be gone without
            self._board.forget(self.key)

    def require(self) -> None:
        """Comes again if somebody has taken this one for gone, and its note away.

        Raises:
            Taken: another one has come since.
            OSError: the place does not answer.
        """
        if self._is_lost:
            self._come()
            logger.warning("this follower was taken for gone, and is there again")

    def tell(self, note: Follower) -> None:
        """
        Raises:
            OSError: the place does not answer; the next beat tells it.
        """
        with self._lock:
            self._note = replace(note, claim=self._note.claim, home=self._note.home, beat=self._note.beat)
            self._write()

    def _write(self) -> None:
        self._note = replace(self._note, beat=self._note.beat + 1)
        self._board.tell(self.key, self._note)

    def _beat(self) -> None:
        warned = ""
        while not self._ended.wait(BEAT_S):
            try:
                with self._lock:
                    if self._board.has(self.key):
                        self._write()
                    else:
                        self._is_lost = True
                warned = ""
            except OSError as error:
                if str(error) != warned:
                    logger.warning("heart-beat: %s", error)
                warned = str(error)

    def _come(self) -> None:
        for _ in range(_TRIES):
            self._require_none()
            with self._lock:
                self._write()
                rivals = self._rivals()
                if not rivals:
                    self._is_lost = False
                    return
                self._board.forget(self.key)
            time.sleep(random.uniform(0, _BACK_OFF_S))
        raise self._taken(next(iter(rivals)))

    def _require_none(self) -> None:
        """Returns when nobody else has the engine or the name; notes of those that are gone are removed."""
        pulse, deadline = Pulse(), time.monotonic() + 2 * SILENT_S
        while rivals := self._rivals():
            for key in rivals:
                if pulse.has_changed(key, rivals) or time.monotonic() >= deadline:
                    raise self._taken(key)
            for key in pulse.silent(rivals):
                self._board.forget(key)
            time.sleep(_LOOK_AGAIN_S)

    def _rivals(self) -> dict[str, Follower | None]:
        """Others with this one's engine or name, as far as can be told, but for those that have ended."""
        rivals: dict[str, Follower | None] = {}
        for key, note in self._board.followers().items():
            if key == self.key:
                continue
            if note is not None and note.home and note.home == self._note.home:
                self._board.forget(key)
            elif note is None or note.claim == self._note.claim or name_of(key) == self._name:
                rivals[key] = note
        return rivals

    def _taken(self, key: str) -> Taken:
        if name_of(key) == self._name:
            return Taken(
                f"another follower is called {self._name} (wanted: another --name, or the end of it)"
            )
        told = f"follower {name_of(key)} gives it weights (wanted: one follower for an engine)"
        return Taken(f"engine {self._engine}: {told}")


def _claim_on(engine: str) -> str:
    """What followers of one engine have in common, as far as its URL tells."""
    local = is_loopback(urlsplit(engine).hostname or "")
    return f"{spelling(engine) or engine}{' of ' + machine() if local else ''}"
