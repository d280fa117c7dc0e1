"""What a trainer makes of the notes of followers: who lives, who is waited for, and who is set aside."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from slime.utils.worker_url import spelling
from slime.weight_sync.versions.board import JOINS, Board, Follower, Published, name_of
from slime.weight_sync.versions.pulse import SILENT_S, Pulse

logger = logging.getLogger(__name__)

WHOLE_IN_A_ROW = 3
"""Versions that come whole for one follower, which could use none of the changes in between."""
BACK_S = 120.0
"""How long an engine of the run waits for a follower in place of one that is gone."""

Notes = Mapping[str, Follower | None]


class Followers:
    """Knows the followers of one board, by key. The note of one that lives is never removed."""

    def __init__(self, board: Board) -> None:
        self._board, self._pulse = board, Pulse()
        self._late: set[str] = set()
        self._whole_for: Counter[str] = Counter()
        self._aside: set[str] = set()
        self._gone: dict[str, tuple[str, float]] = {}
        self._now: Published | None = None
        self._before: Published | None = None

    def announce(self, published: Published) -> None:
        """Expects this version of followers; it may have been announced in another form before."""
        known = self._now
        if known is not None and (known.version, known.state) != (published.version, published.state):
            self._before = known
        self._now = published

    def look(self) -> dict[str, Follower | None]:
        """Returns the notes of those that live; those that are gone are named, and their notes removed.

        Raises:
            OSError: the place does not answer.
        """
        notes = self._board.followers()
        for key in self._pulse.silent(notes):
            note = notes.pop(key)
            where = "" if note is None else f" of engine {note.engine}"
            logger.warning("follower %s%s is gone: no heart-beat for %g s", name_of(key), where, SILENT_S)
            if note is not None and (url := spelling(note.engine)):
                self._gone.setdefault(url, (name_of(key), time.monotonic()))
            self._board.forget(key)
        for note in notes.values():
            self._gone.pop((note and spelling(note.engine)) or "", None)
        self._late = {key for key in self._late if key in notes and not self._has_come(notes[key])}
        return notes

    def _has_come(self, note: Follower | None) -> bool:
        known = [one for one in (self._now, self._before) if one is not None]
        return note is not None and any(map(note.has, known))

    def behind(self, notes: Notes, published: Published) -> list[str]:
        """Returns those that are waited for, and do not have the version."""
        return [
            key
            for key, note in notes.items()
            if key not in self._late and (note is None or not (note.stage == JOINS or note.has(published)))
        ]

    def unread(self, notes: Notes, published: Published, own: Iterable[str]) -> list[str]:
        """Returns those for which changes are to come whole, as they could not make use of them.

        One of another engine than the run's ``own`` (URLs) is set aside once that has not helped: it gets a
        whole version when one comes anyway.
        """
        own, found = set(own), []
        for key, note in notes.items():
            if note is None or not note.could_not(published) or note.stage != "fetch":
                continue
            if spelling(note.engine) not in own:
                if self._whole_for[key] == WHOLE_IN_A_ROW:
                    self._set_aside(key, note)
                    continue
                self._whole_for[key] += 1
            found.append(key)
        return found

    def took_changes(self, notes: Notes, published: Published) -> None:
        """Notes that who has a version of changes can make use of them."""
        for key, note in notes.items():
            if note is not None and note.has(published):
                self._whole_for.pop(key, None)
                self._aside.discard(key)

    def _set_aside(self, key: str, note: Follower) -> None:
        if key not in self._aside:
            logger.warning(
                "follower %s of engine %s is set aside: %d versions in a row came whole for it: %s",
                *(name_of(key), note.engine, WHOLE_IN_A_ROW, note.failure),
            )
        self._aside.add(key)

    def leave_behind(self, notes: Notes, published: Published) -> None:
        """Waits no more for those that do not have the version, until they have come to one."""
        for key in self.behind(notes, published):
            note = notes[key]
            why = f": {note.failure}" if note is not None and note.could_not(published) else ""
            logger.warning("follower %s stays behind version %s%s", name_of(key), published.version, why)
            self._late.add(key)

    def gone(self, engine: str) -> tuple[str, float] | None:
        """Returns the follower that an engine had until it was gone, and seconds since that was found."""
        found = self._gone.get(engine)
        return None if found is None else (found[0], time.monotonic() - found[1])
