"""What a checkpoint's directory holds, by sizes and checksums that were taken when it was written.

Each rank records the files that it wrote, in a ``record_00000.json`` of its own:

    {"ranks": 2, "files": {"__0_0.distcp": {"bytes": 40960, "xxh3": "9f..."}, ...}}

A directory without records, as earlier versions and others wrote, says nothing of its files.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

KEPT_SNAPSHOTS = 2
"""In memory. Roles write one after the other: the newest that all have may be the last but one of one."""
_RECORD, _RECORDS = "record_{:05d}.json", "record_[0-9]*.json"
_COMPLETE = "metadata.json"
_OF_A_RANK = re.compile(r"(?:__|rng_)(\d+)[_.]")  # torch's shards, and random generators
_ITERATION = re.compile(r"iter_(\d{7,})")
_REMOVED = ".removed"
_BLOCK = 1 << 24
_NONE: Mapping[str, Any] = MappingProxyType({})


class Summed(NamedTuple):
    """A file whose checksum was taken.

    Attributes:
        modified: when it was last written to, in nanoseconds.
    """

    bytes: int
    modified: int
    xxh3: str


Sums = dict[str, Summed]
"""By path below the directory."""


def take_sums(directory: Path, rank: int, known: Mapping[str, Summed] = _NONE) -> Sums:
    """Takes the checksums of the files that ``rank`` wrote; rank 0 also those of none.

    Args:
        known: what is not read again if it has not changed since.
    """
    sums = {}
    for path in sorted(directory.rglob("*")):
        named = _OF_A_RANK.match(path.name)
        owner = int(named[1]) if named else 0
        if owner == rank and path.is_file() and not path.match(_RECORDS):
            name, status = str(path.relative_to(directory)), path.stat()
            before, now = known.get(name), (status.st_size, status.st_mtime_ns)
            sums[name] = before if before and before[:2] == now else Summed(*now, _checksum(path))
    return sums


def write_record(directory: Path, rank: int, ranks: int, known: Mapping[str, Summed] = _NONE) -> None:
    """Records the files of a finished directory that ``rank`` wrote; rank 0 also those of none.

    Args:
        known: see `take_sums`.
    """
    sums = take_sums(directory, rank, known)
    files = {name: {"bytes": file.bytes, "xxh3": file.xxh3} for name, file in sums.items()}
    (directory / _RECORD.format(rank)).write_text(json.dumps({"ranks": ranks, "files": files}) + "\n")


def damage(directory: Path, checksums: bool = False) -> Iterator[str]:
    """Yields what is not as it was recorded, a sentence for each file; nothing where nothing was recorded.

    Args:
        checksums: reads all files; else their sizes are looked at.
    """
    if not any(directory.glob(_RECORDS)):
        return
    first = _read_record(directory, 0)
    for rank in range(first["ranks"] if first else 1):
        yield from damage_of_part(directory, rank, checksums)


def damage_of_part(directory: Path, rank: int, checksums: bool = False) -> Iterator[str]:
    """Yields what is not as ``rank`` has recorded it; see `damage`."""
    record = _read_record(directory, rank)
    if record is None:
        yield f"{_RECORD.format(rank)} is missing or cannot be read"
        return
    for name, wanted in record["files"].items():
        if reason := _damaged(directory / name, wanted, checksums):
            yield f"{name} {reason}"


def files_of_part(directory: Path, rank: int) -> list[str]:
    """The files that ``rank`` wrote, by path below the directory, and its record, which is the last one."""
    record = _read_record(directory, rank)
    return [*(record["files"] if record else ()), _RECORD.format(rank)]


def parts_there(directory: Path) -> list[int]:
    """The ranks whose record is in a directory, which may hold the parts of some ranks alone."""
    return sorted(int(path.stem.removeprefix("record_")) for path in directory.glob(_RECORDS))


def _read_record(directory: Path, rank: int) -> dict[str, Any] | None:
    try:
        record = json.loads((directory / _RECORD.format(rank)).read_text())
        rows = record["files"].values()
        whole = isinstance(record["ranks"], int) and all({"bytes", "xxh3"} <= row.keys() for row in rows)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return record if whole else None


def _damaged(path: Path, wanted: dict[str, Any], checksums: bool) -> str | None:
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != wanted["bytes"]:
        return f"has {size} bytes (wanted: {wanted['bytes']})"
    try:
        if checksums and _checksum(path) != wanted["xxh3"]:
            return "has other content than was written"
    except OSError as error:  # of a disk with bad blocks, say
        return f"cannot be read ({error.strerror})"
    return None


def _checksum(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def iterations(root: Path) -> dict[int, Path]:
    """Returns the complete checkpoints of a directory by their iteration, newest first."""
    found = {}
    for path in root.glob("iter_*"):
        named = _ITERATION.fullmatch(path.name)
        if named and (path / _COMPLETE).is_file():
            found[int(named[1])] = path
    return dict(sorted(found.items(), reverse=True))


def remove_older(root: Path, iteration: int, keep: int) -> None:
    """Removes the complete checkpoints before ``iteration`` but the newest ``keep`` - 1 of them.

    Later ones, which a run that went on from an earlier iteration finds, stay. A directory gets another name
    first: one that is half removed must not look complete.
    """
    older = [path for number, path in iterations(root).items() if number < iteration]
    for path in older[keep - 1 :]:
        path.rename(path.with_suffix(_REMOVED))
    for path in root.glob(f"iter_*{_REMOVED}"):
        shutil.rmtree(path, ignore_errors=True)
