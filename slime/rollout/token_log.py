"""The token log: files with the answers under way, from which another rollout manager goes on.

A line is a checksum and a JSON object: the tokens that an answer has got since its line before, with what is
known of each. A file is written by one process, which only appends to it. A process that goes on begins
another one, with what is still of use, and removes those before it::

    answers, problems = read_answers(directory)
    log = TokenLog(directory, max_bytes=2**30)
    log.begin(answers.values())
    log.append(record)
"""

import fcntl
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from slime.rollout.base_types import RolloutError
from slime.utils.engine_meta import VersionSpans

Key = tuple[int | None, int]
"""Group and running index of a sample."""

Record = dict[str, Any]

_PREFIX = "tokens_"
_DIGITS = 8  # of a checksum, and of the number of a file
_PER_TOKEN = ("tokens", "log_probs", "loss_mask")


@dataclass
class LoggedAnswer:
    """What the log knows of an answer.

    Attributes:
        attempt: tells records of one call of the generate function from those of another.
        start: how many response tokens came before those that are here; 0 of an answer that was read.
        rollout: which one it was made for.
        status: of the sample, by its value.
        spans: versions of the weights that made the tokens, from the first one of the response on.
        versions: of the engine's answers, as ``Sample.weight_versions``.
        response: the text of a finished answer; None before.
    """

    group: int | None
    index: int
    attempt: str
    rollout: int
    prompt: list[int]
    start: int = 0
    status: str = "aborted"
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    spans: VersionSpans = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    response: str | None = None

    @property
    def key(self) -> Key:
        return self.group, self.index

    def takes(self, record: Record) -> bool:
        """Whether a record goes on where this ends; then it does from now on.

        Where a record before it was lost it does not, and the answer is known up to there.
        """
        if record["attempt"] != self.attempt or record["start"] != len(self.tokens):
            return False
        for name in _PER_TOKEN:
            getattr(self, name).extend(record[name])
        for name in ("status", "spans", "versions", "response"):
            setattr(self, name, record[name])
        return True


def read_answers(directory: Path) -> tuple[dict[Key, LoggedAnswer], list[str]]:
    """The answers of a log, and which of its lines are damaged.

    The last line of a file may be torn: the process that wrote it was killed.
    """
    answers: dict[Key, LoggedAnswer] = {}
    problems: list[str] = []
    for path in _files(directory):
        *lines, _torn = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            record = _record_in(line)
            if record is None:
                problems.append(f"{path}:{number}: damaged, by its checksum; what it held is made anew")
            else:
                _apply(record, answers)
    return answers, problems


def _apply(record: Record, answers: dict[Key, LoggedAnswer]) -> None:
    key = record["group"], record["index"]
    if record["start"] == 0:
        answers[key] = LoggedAnswer(**record)
    elif key in answers:
        answers[key].takes(record)


def _line_of(record: LoggedAnswer) -> bytes:
    body = orjson.dumps(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _record_in(line: bytes) -> Record | None:
    body = line[_DIGITS + 1 :]
    if line[: _DIGITS + 1] != b"%08x " % zlib.crc32(body):
        return None
    record: Record = orjson.loads(body)
    return record


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"{_PREFIX}{'[0-9]' * _DIGITS}.jsonl"))


class TokenLog:
    """Writes the log of one run. Not to be used by two threads at once.

    Args:
        max_bytes: nothing is written to a file beyond that.

    Attributes:
        failure: why nothing is written any more, until another file begins; None while all is well.

    Raises:
        RolloutError: another run writes there.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(directory / "lock")
        self._file: BinaryIO | None = None
        self._size = 0
        self.failure: str | None = None

    def begin(self, answers: Iterable[LoggedAnswer]) -> None:
        """Goes on in another file, which holds these answers; those before it are gone then."""
        earlier = _files(self._directory)
        number = int(earlier[-1].stem.removeprefix(_PREFIX)) + 1 if earlier else 0
        path = self._directory / f"{_PREFIX}{number:0{_DIGITS}d}.jsonl"
        self.close()
        try:
            # Under its name when it is whole: a reader must not take half of it for all there is.
            partial = path.with_suffix(".partial")
            partial.write_bytes(b"".join(map(_line_of, answers)))
            os.replace(partial, path)
            self._file, self._size, self.failure = path.open("ab", buffering=0), path.stat().st_size, None
            for old in earlier:
                old.unlink()
        except OSError as error:
            self.failure = str(error)

    def append(self, record: LoggedAnswer) -> bool:
        """Adds what an answer has got; whether it is in the log now."""
        if self._file is None or self.failure is not None:
            return False
        line = _line_of(record)
        if self._size + len(line) > self._max_bytes:
            self.failure = f"{self._directory} would have more than {self._max_bytes} bytes"
            return False
        try:
            written = self._file.write(line)
        except OSError as error:
            self.failure = str(error)
            return False
        self._size += written
        if written < len(line):
            self.failure = f"{self._directory}: {written} of {len(line)} bytes were written"
        return self.failure is None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _locked(path: Path) -> BinaryIO:
    """A file that this process alone holds until it ends; processes that it forks do not."""
    file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise RolloutError(
            f"--token-log-dir {path.parent}: another run writes there (wanted: a directory for each run)"
        ) from error
    return file
