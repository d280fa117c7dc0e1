"""Which followers live: those whose notes change, by the clock of whoever reads them.

Clocks of two hosts are never compared: what a note says is only held against what it said before.
"""

import time
from collections.abc import Mapping

from slime.weight_sync.versions.board import Follower

BEAT_S = 2.0
"""A follower writes its note so often."""
SILENT_S = 15.0
"""One whose note has not changed for so long is gone."""
_TORN = -1


class Pulse:
    """Remembers since when each note says what it says."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def silent(self, notes: Mapping[str, Follower | None]) -> set[str]:
        """Looks at all notes there are, and returns the keys of followers that are gone.

        One that cannot be read any more is being written: that is a change as well, or a follower would be
        gone whose note was found so after nobody had looked for a while.
        """
        now, before = time.monotonic(), self._seen
        self._seen = {}
        for key, note in notes.items():
            known, since = before.get(key, (_TORN, now))
            beat = _TORN if note is None else note.beat
            self._seen[key] = beat, since if beat == known else now
        return {key for key, (_, since) in self._seen.items() if now - since >= SILENT_S}

    def has_changed(self, key: str, notes: Mapping[str, Follower | None]) -> bool:
        """Whether the note is another one than when `silent` looked last."""
        note = notes.get(key)
        return note is not None and key in self._seen and self._seen[key][0] not in (_TORN, note.beat)
