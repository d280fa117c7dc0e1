"""Where snapshots of the trainer are kept: in one directory, which the driver and all ranks see.

`slime.ray.host_snapshots` has the other way, by which each host keeps its own part.
"""

import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slime.arguments.validate.checkpoint_files import CHECKPOINT_MARKER, marked_iteration, newest_of_all
from slime.config.limits import FREE
from slime.utils.checkpoint_record import iterations, remove_older

if TYPE_CHECKING:  # bad flags are answered without waiting for it
    from slime.ray.train_group import RayTrainGroup

_GIB = 2**30


class SnapshotStore(Protocol):
    """What `slime.ray.trainer_snapshots.TrainerSnapshots` asks for."""

    def make_room(self) -> str | None:
        """Keeps the newest that all roles have; returns why the next one cannot be written."""

    def write(self, group: "RayTrainGroup", iteration: int) -> list[str]:
        """Has a role write its snapshot; returns why it failed."""

    def kept(self) -> set[int]:
        """The iterations of which a role has something."""

    def newest(self, among: Container[int]) -> int | None:
        """The newest iteration that is whole of all roles.

        Args:
            among: those that ranks could go on from.
        """

    def bring(self, iteration: int) -> None:
        """Puts it where ranks are to load it.

        Raises:
            ValueError: that is not possible.
        """

    def go_back(self, iteration: int) -> None:
        """Forgets what comes after an iteration, with which ranks have started again."""

    def discard(self) -> None:
        """Forgets all."""


class OneDirectory:
    """A `SnapshotStore` with a directory of each role, as of checkpoints.

    Args:
        root: of these directories.
        verify: how files are looked at, as --verify-checkpoint says.
    """

    def __init__(self, root: Path, places: "Mapping[RayTrainGroup, Path]", verify: str) -> None:
        self._root, self._places, self._verify = root, places, verify

    def make_room(self) -> str | None:
        """Keeps the newest one that all roles have, which may be the last but one of some."""
        of_all = set.intersection(*({*iterations(place)} for place in self._places.values()))
        newest = max(of_all, default=-1)
        for place in self._places.values():
            forget_after(place, newest)
            remove_older(place, newest, keep=1)
        return self._too_full()

    def write(self, group: "RayTrainGroup", iteration: int) -> list[str]:
        return [*filter(None, group.try_to_save(iteration, True, str(self._places[group])))]

    def kept(self) -> set[int]:
        return {number for place in self._places.values() for number in iterations(place)}

    def newest(self, among: Container[int]) -> int | None:
        found = newest_of_all([*self._places.values()], self._verify)
        return found if found is not None and found in among else None

    def bring(self, iteration: int) -> None:
        """Does nothing: ranks load it where it is."""

    def go_back(self, iteration: int) -> None:
        for place in self._places.values():
            forget_after(place, iteration)

    def discard(self) -> None:
        for place in self._places.values():
            shutil.rmtree(place, ignore_errors=True)

    def _too_full(self) -> str | None:
        """Whether the next one might fill the file system: as long as it is written there are two."""
        sizes = [max(map(_bytes, iterations(place).values()), default=0) for place in self._places.values()]
        try:
            found = shutil.disk_usage(self._root)
        except OSError as error:  # somebody has removed it
            return f"{self._root}: {error.strerror}"
        wanted = sum(sizes) + FREE * found.total
        if found.free >= wanted:
            return None
        return f"{self._root} has {found.free / _GIB:.2f} GiB left (wanted: {wanted / _GIB:.2f})"


def forget_after(place: Path, iteration: int) -> None:
    """Removes what a directory of snapshots has after an iteration, so that no marker names it."""
    there = iterations(place)
    for path in [*place.glob("iter_*.tmp"), *(there[number] for number in there if number > iteration)]:
        shutil.rmtree(path, ignore_errors=True)
    marker, newest = place / CHECKPOINT_MARKER, max((n for n in there if n <= iteration), default=None)
    if newest is None:
        marker.unlink(missing_ok=True)
    elif marked_iteration(place) not in (None, newest):
        _mark(marker, newest)


def _mark(marker: Path, iteration: int) -> None:
    partial = marker.with_suffix(".partial")
    try:
        partial.write_text(str(iteration))
        partial.replace(marker)
    except OSError:  # the file system is full: without a marker there is no snapshot
        marker.unlink(missing_ok=True)


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
