"""What keeps the snapshots of a trainer's ranks on one node, where each host has its own part of them.

    <directory>/actor/iter_0000007/record_00002.json    with the files of rank 2, one part

A directory holds the parts of the ranks of its node and copies of those of others, under the same names. It
goes with this process.
"""

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slime.arguments.validate.checkpoint_files import CHECKPOINT_MARKER
from slime.config.limits import FREE
from slime.processes.exclusive import DirectoryUnusable
from slime.processes.memory_directory import memory_directory
from slime.ray.snapshot_place import PREFIX
from slime.ray.waiting import wait_one
from slime.utils.checkpoint_record import damage_of_part, files_of_part, parts_there

_CHUNK = 1 << 24  # bytes that are asked of another holder at once
_READ_TIMEOUT = 120.0  # seconds for these
_ITERATION = re.compile(r"iter_(\d+)(\..*)?")
_GIB = 2**30

Parts = dict[int, list[int]]
"""The ranks whose part is here as it was recorded, by iteration."""


class SnapshotHolder:
    """An actor on each node of the trainer. Methods may run beside each other, on different iterations.

    The ``name`` of a role is that of its directory.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._root: Path | None = None

    def open(self, parent: str, label: str, wanted: int) -> str | None:
        """Makes the directory, once.

        Args:
            wanted: bytes that there must be room for.

        Returns:
            Why there is none, or nothing can be written there.
        """
        if self._root is not None:
            return None
        what = f"--trainer-snapshot-dir {parent} of {self.host()}"
        try:
            self._root = self._open.enter_context(memory_directory(Path(parent), PREFIX, what, label))
        except DirectoryUnusable as error:
            return str(error)
        return self._lack(wanted)

    def host(self) -> str:
        return os.uname().nodename

    def prepare(self, name: str, iteration: int) -> None:
        """Comes before the ranks write, of which the first one makes its own directory alone."""
        temporary = self._temporary(name, iteration)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def publish(self, name: str, iteration: int) -> None:
        """Comes after all ranks have written; the first one has put its own directory in place."""
        temporary, final = self._temporary(name, iteration), self._final(name, iteration)
        if temporary.exists():
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)

    def lacks_room(self, names: Sequence[str]) -> str | None:
        """Why the next snapshot might not fit: as large as the newest, copies among it."""
        newest = [max(self._iterations(name).items(), default=(0, None)) for name in names]
        return self._lack(sum(_bytes(path) for _, path in newest if path is not None))

    def _lack(self, wanted: int) -> str | None:
        try:
            found = shutil.disk_usage(self._directory)
        except OSError as error:  # somebody has removed it
            return f"{self._directory} of {self.host()}: {error.strerror}"
        wanted += int(FREE * found.total)
        if found.free >= wanted:
            return None
        free = f"{found.free / _GIB:.2f} GiB left (wanted: {wanted / _GIB:.2f})"
        return f"{self._directory} of {self.host()} has {free}"

    def parts(self, names: Sequence[str], checksums: bool) -> dict[str, Parts]:
        """What is here.

        Args:
            checksums: reads all of it; else sizes are looked at.
        """
        return {
            name: {
                number: [rank for rank in parts_there(path) if not any(damage_of_part(path, rank, checksums))]
                for number, path in self._iterations(name).items()
            }
            for name in names
        }

    def files(self, name: str, iteration: int, rank: int) -> dict[str, int]:
        """Names and bytes of a part's files; its record comes last."""
        path = self._final(name, iteration)
        return {file: (path / file).stat().st_size for file in files_of_part(path, rank)}

    def read(self, name: str, iteration: int, file: str, offset: int) -> bytes:
        """The next bytes of a file, as many as are asked for at once."""
        with _inside(self._final(name, iteration), file).open("rb") as stream:
            stream.seek(offset)
            return stream.read(_CHUNK)

    def copy_parts(
        self, name: str, iteration: int, source: Any, ranks: Iterable[int], checksums: bool
    ) -> None:
        """Gets parts from another holder.

        Raises:
            ValueError: one has not come as it was recorded.
            ProcessDied, DeadlineExceeded: the other holder does not answer.
        """
        place = self._final(name, iteration)
        for rank in ranks:
            what = f"the part of rank {rank} in iteration {iteration} of {name}"
            files: Mapping[str, int] = wait_one(
                source.files.remote(name, iteration, rank), what, _READ_TIMEOUT
            )
            for file, size in files.items():
                target = _inside(place, file)
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f"{target.name}.partial")
                with partial.open("wb") as stream:
                    for offset in range(0, size, _CHUNK):
                        asked = source.read.remote(name, iteration, file, offset)
                        stream.write(wait_one(asked, what, _READ_TIMEOUT))
                partial.replace(target)
            for reason in damage_of_part(place, rank, checksums):
                raise ValueError(f"{what}: {reason}")

    def keep(self, names: Sequence[str], iteration: int | None) -> None:
        """Removes all other iterations, and what is half written."""
        for name in names:
            for path in (self._directory / name).glob("iter_*"):
                if path != self._final(name, -1 if iteration is None else iteration):
                    shutil.rmtree(path, ignore_errors=True)

    def forget_after(self, names: Sequence[str], iteration: int) -> None:
        """Removes the iterations after this one, and what is half written."""
        for name in names:
            for path in (self._directory / name).glob("iter_*"):
                found = _ITERATION.fullmatch(path.name)
                if found and (found[2] or int(found[1]) > iteration):
                    shutil.rmtree(path, ignore_errors=True)

    def mark(self, name: str, iteration: int) -> None:
        """Makes an iteration what ranks on this node start from."""
        (self._directory / name / CHECKPOINT_MARKER).write_text(str(iteration))

    def keep_parts(self, name: str, iteration: int, ranks: Iterable[int]) -> None:
        """Removes the parts of all other ranks."""
        path = self._final(name, iteration)
        for rank in {*parts_there(path)} - {*ranks}:
            for file in reversed(files_of_part(path, rank)):  # without its record a part is not there
                _inside(path, file).unlink(missing_ok=True)

    @property
    def _directory(self) -> Path:
        assert self._root is not None, "open comes first"
        return self._root

    def _final(self, name: str, iteration: int) -> Path:
        return self._directory / name / f"iter_{iteration:07d}"

    def _temporary(self, name: str, iteration: int) -> Path:
        return self._final(name, iteration).with_suffix(".tmp")

    def _iterations(self, name: str) -> dict[int, Path]:
        paths = (self._directory / name).glob("iter_*")
        found = ((_ITERATION.fullmatch(path.name), path) for path in paths)
        return {int(named[1]): path for named, path in found if named and not named[2]}


def _inside(directory: Path, file: str) -> Path:
    """Raises ValueError for a name that leads out of the directory."""
    path = directory / file
    if not Path(os.path.normpath(path)).is_relative_to(directory):
        raise ValueError(f"{file!r} is not in {directory}")
    return path


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
