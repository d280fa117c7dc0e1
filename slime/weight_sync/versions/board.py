"""What stands beside versions: which one is published, and which one each follower's engine has.

Trainer and followers know no more of each other than the place of the versions. Each note is a small file
with one writer; one that is being written cannot be read, and is not there yet.
"""

import json
import math
import re
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from slime.utils.stores import is_url
from slime.weight_sync.versions.manifest import as_json
from slime.weight_sync.versions.remote import LIMIT_S, Store, trainers_in

PUBLISHED = ".published"
FOLLOWERS = ".followers"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,118}")
_KEY = re.compile(_NAME.pattern + r"\.[0-9a-f]{8}")
JOINS = "join"
Note = TypeVar("Note", "Published", "Follower")


@dataclass(frozen=True)
class Published:
    """The version that engines are to have.

    Attributes:
        state: see `state_of`; of one number there may be several versions, after a failure for instance.
        edition: how often its trainer has published something; the same state comes again, in another form.
        trainer: who that is.
        pause_mode: what becomes of answers under way.
    """

    version: int
    state: str
    edition: int
    trainer: str
    pause_mode: str = "abort"


@dataclass(frozen=True)
class Follower:
    """What a follower says of its engine.

    Attributes:
        engine: its URL, as trainers know it.
        version, state: what it serves; None while that is not known.
        pause, commit: seconds for which it stood still for them, and of that those it took to load.
        failed: the edition that it could not bring, with the trainer's name before it; "" if it could.
        stage: how far that came: "fetch" or "commit"; `JOINS` of one that has not looked for a version yet.
        failure: why.
        beat: another one each time that it is written, which is often while the follower lives.
        claim: what it follows for, and no other follower may; see `presence`.
        home: of its local directory; "" if it holds none.
    """

    engine: str
    version: int | None = None
    state: str | None = None
    pause: float = 0.0
    commit: float = 0.0
    failed: str = ""
    stage: str = ""
    failure: str = ""
    beat: int = 0
    claim: str = ""
    home: str = ""

    def has(self, published: Published) -> bool:
        return (self.version, self.state) == (published.version, published.state)

    def could_not(self, published: Published) -> bool:
        return self.failed == edition_of(published)


def edition_of(published: Published) -> str:
    """A name that nothing else published has."""
    return f"{published.trainer}#{published.edition}"


def bad_name(name: str) -> str | None:
    """Why a follower cannot be called so; None if it may."""
    return None if _NAME.fullmatch(name) else f"{name!r} (wanted: letters, digits, '-', '_' and '.')"


def new_key(name: str) -> str:
    """The name of a follower's note, which no other process has, whatever it is called."""
    return f"{name}.{uuid.uuid4().hex[:8]}"


def name_of(key: str) -> str:
    """The follower whose note this is."""
    return key.rpartition(".")[0]


class Board:
    """The notes of a place of versions.

    Its methods raise OSError where the place does not answer.

    Args:
        place: a directory, or a URL.

    Raises:
        ImportError, ValueError: nothing opens the URL.
    """

    def __init__(self, place: str, limit_s: float = LIMIT_S) -> None:
        self._place = place.rstrip("/") if is_url(place) else str(Path(place).absolute())
        self._store = Store(self._place if is_url(place) else f"file://{self._place}", limit_s)

    def newest(self) -> tuple[str, Published] | None:
        """Where versions are read, and which one is published there; None if there is none yet."""
        trainers = trainers_in(self._store)
        folder = trainers[-1][1] if trainers else ""
        found = self._read(f"{folder}/{PUBLISHED}".lstrip("/"), Published)
        return None if found is None else (f"{self._place}/{folder}".rstrip("/"), found)

    def publish(self, source: str, published: Published) -> None:
        """Tells readers of a version that is there.

        Args:
            source: where the trainer writes, which is this place or in it.
        """
        folder = source.removeprefix(self._place).strip("/")
        self._write(f"{folder}/{PUBLISHED}".lstrip("/"), published)

    def followers(self) -> dict[str, Follower | None]:
        """Returns those that have come and not left, by key; None for one whose note cannot be read."""
        keys = [key for key in self._store.names(FOLLOWERS) if _KEY.fullmatch(key)]
        return {key: self._read(f"{FOLLOWERS}/{key}", Follower) for key in keys}

    def has(self, key: str) -> bool:
        """Whether this follower's note is there."""
        try:
            self._store.get(f"{FOLLOWERS}/{key}")
        except FileNotFoundError:
            return False
        return True

    def tell(self, key: str, follower: Follower) -> None:
        self._write(f"{FOLLOWERS}/{key}", follower)

    def forget(self, key: str) -> None:
        self._store.remove(f"{FOLLOWERS}/{key}")

    def _write(self, path: str, note: Published | Follower) -> None:
        self._store.put(path, [as_json(asdict(note)).encode()])

    def _read(self, path: str, kind: type[Note]) -> Note | None:
        try:
            note = kind(**json.loads(self._store.get(path)))
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            return None
        return note if _is_plausible(note) else None


def _is_plausible(note: Published | Follower) -> bool:
    """Whether its values are of the kinds that they are declared to be."""
    seconds: list[float] = []
    if isinstance(note, Published):
        counts, texts = [note.version, note.edition], [note.state, note.trainer, note.pause_mode]
    else:
        counts, seconds = [0 if note.version is None else note.version, note.beat], [note.pause, note.commit]
        texts = [note.engine, "" if note.state is None else note.state]
        texts += [note.failed, note.stage, note.failure, note.claim, note.home]
    known = all(isinstance(text, str) for text in texts) and all(type(count) is int for count in counts)
    return known and all(type(took) in (int, float) and 0 <= took < math.inf for took in seconds)
