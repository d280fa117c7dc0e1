"""Shared memory of trainers, mapped once for all buckets that come through it."""

import mmap
import os
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

_DIRECTORY = "/dev/shm"
_NAME = re.compile(r"/torch_\w+")
_REQUESTS = 3
_HEADER = 64
"""Bytes in which torch counts who has mapped a file of its own; the data follow."""


@dataclass(frozen=True)
class _Mapping:
    file: tuple[int, int]
    data: torch.Tensor
    readers: memoryview
    """One number, beside that of the owner."""

    def leave(self) -> None:
        """Takes a reader off, as torch does at the end of its mapping."""
        if self.readers[0] > 1:
            self.readers[0] -= 1


class KeptMemory:
    """Mappings of the files of the last requests.

    A trainer keeps the files of its buckets too, of which two take turns: each is met again within three
    requests. Mapping one anew, and touching its pages, costs more than a copy out of it.

    Torch does not map them: it would stay connected to the trainer's ``torch_shm_manager``, which a killed
    trainer leaves behind for as long, and whoever is the last to let go of a file that is gone already is
    aborted. A trainer counts a reader in its file for each request; who reads takes itself off again.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Mapping] = {}
        self._used: dict[str, _Mapping] = {}
        self._recent: deque[set[str]] = deque(maxlen=_REQUESTS)

    def storage(
        self, handle: bytes, nbytes: int, mapped: Callable[[], torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        """Returns the memory by a mapping that is kept; what torch has ``mapped`` where there can be none."""
        name = handle.decode(errors="replace")
        if not _NAME.fullmatch(name):
            return mapped()
        found = self._used.get(name) or self._kept.get(name)
        if found is None or found.file != _file(name) or found.data.numel() != nbytes:
            self._kept = dict(self._there())  # or there would be a bucket too many for a while
            found = _mapped(name, nbytes)
            if found is None:
                return mapped()
        found.leave()
        self._used[name] = found
        return found.data.untyped_storage()

    def forget_others(self) -> None:
        """Ends a request: lets go of files that the last ones did not use, and of those that are gone."""
        self._recent.append({*self._used})
        self._kept |= self._used
        self._used = {}
        recent = set().union(*self._recent)
        self._kept = {name: one for name, one in self._there() if name in recent}

    def _there(self) -> list[tuple[str, _Mapping]]:
        """What is kept of files that are still there."""
        return [(name, one) for name, one in self._kept.items() if _file(name) == one.file]


def _file(name: str) -> tuple[int, int] | None:
    """Returns which file has the name now."""
    try:
        found = os.stat(_DIRECTORY + name, follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _mapped(name: str, nbytes: int) -> _Mapping | None:
    try:
        opened = os.open(_DIRECTORY + name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = os.fstat(opened)
        if nbytes == 0 or found.st_size < _HEADER + nbytes:  # what lies behind its end must not be touched
            return None
        memory = mmap.mmap(opened, _HEADER + nbytes, flags=mmap.MAP_SHARED | _populate())
    except OSError:
        return None
    finally:
        os.close(opened)
    data = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=_HEADER)
    return _Mapping((found.st_dev, found.st_ino), data, memoryview(memory)[:4].cast("i"))


def _populate() -> int:
    """Returns what has all pages mapped at once, where the system can."""
    return getattr(mmap, "MAP_POPULATE", 0)
