"""Versions of weights in a folder that a URL names: what order of writes and names can hold there.

Object stores rename nothing. A version is there when its manifest is, which is written last and removed
first. Each trainer writes to a folder of its own, so that one in whose place another one has come overwrites
nothing that is read.
"""

import re
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from slime.models.checkpoint.safetensors_file import Spec, layout
from slime.models.checkpoint.tensor_slices import bytes_of
from slime.training.hf_export import assets_of
from slime.utils.deadlines import within
from slime.utils.stores import opened
from slime.weight_sync.floor import speed_of
from slime.weight_sync.versions.manifest import MANIFEST, VersionManifest, as_json, directory_of, version_of
from slime.weight_sync.versions.owner import DirectoryTaken
from slime.weight_sync.writer import replaced

T = TypeVar("T")
LIMIT_S = 600.0
"""How long one file may take."""
_WAITS_S = (0.2, 1.0, 5.0)
_TRAINER = re.compile(r"trainer_(\d{6,})_(.+)")
_HERE = ".here"
"""A file in each trainer's folder: it is there before its first version."""
_PROBE = "probe"


class Store:
    """Files of a folder by their paths in it. What fails is tried four times, but for what is not allowed.

    Its methods raise OSError, which names the file, where all attempts fail or one takes longer than it may.

    Raises:
        ImportError, ValueError: nothing opens the URL.
    """

    def __init__(self, url: str, limit_s: float = LIMIT_S) -> None:
        self.url = url.rstrip("/")
        self._limit_s = limit_s
        self._files, self._root = opened(url)

    def put(self, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Writes a file, in place of one that is there."""

        def write() -> None:
            with self._files.open(self._at(path), "wb") as file:
                for piece in pieces:
                    if len(piece):  # pyarrow aborts the process where there is no memory
                        file.write(piece)

        self._tried(path, write)

    def get(self, path: str) -> bytes:
        """
        Raises:
            FileNotFoundError: there is no such file.
        """
        return self._tried(path, lambda: self._files.cat_file(self._at(path)))

    def fetch(self, path: str, target: Path) -> None:
        """
        Raises:
            FileNotFoundError: there is no such file.
        """
        self._tried(path, lambda: self._files.get_file(self._at(path), str(target)))

    def names(self, path: str = "") -> list[str]:
        """What a folder has; nothing if there is none."""
        try:
            found = self._tried(path, lambda: self._files.ls(self._at(path), detail=False))
        except FileNotFoundError:
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found} - {"", ".", ".."})

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that is in it, if there is one."""
        try:
            self._tried(path, lambda: self._files.rm(self._at(path), recursive=True))
        except FileNotFoundError:
            return

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _tried(self, path: str, act: Callable[[], T]) -> T:
        where = f"{self.url}/{path}".rstrip("/")
        for wait_s in (*_WAITS_S, None):
            try:
                return within(self._limit_s, f"access to {where}", act)
            except FileNotFoundError:
                raise FileNotFoundError(f"{where}: is not there") from None
            except Exception as error:  # libraries raise many kinds
                if wait_s is None or isinstance(error, PermissionError | TimeoutError):
                    raise OSError(f"{where}: {type(error).__name__}: {error}") from error
                time.sleep(wait_s)
        raise AssertionError


class Remote:
    """See `Storage`. The folder has one for each trainer that came; the last one's is read."""

    def __init__(self, url: str, limit_s: float = LIMIT_S) -> None:
        self._store = Store(url, limit_s)
        self._own = ""

    def __str__(self) -> str:
        return self._store.url

    @property
    def source(self) -> str:
        return f"{self._store.url}/{self._own}".rstrip("/")

    def take(self, writer: str) -> None:
        known = self._trainers()
        mine = [name for _, name in known if name.endswith(f"_{_as_name(writer)}")]
        if not mine:
            number = known[-1][0] + 1 if known else 1
            mine = [f"trainer_{number:06d}_{_as_name(writer)}"]
            self._store.put(f"{mine[0]}/{_HERE}", [writer.encode()])
        self._own = mine[0]
        self.require(writer)

    def require(self, writer: str) -> None:
        """Makes a folder that somebody has removed anew."""
        known = self._trainers()
        if not known:
            self.take(writer)
        elif (last := known[-1][1]) != self._own:
            name = last.split("_", 2)[2]
            raise DirectoryTaken(f"--update-weight-disk-dir {self}: {replaced(writer, name)}")

    def has_taken(self, writer: str) -> bool:
        last = [name for _, name in self._trainers()][-1:]
        if not last or not last[0].endswith(f"_{_as_name(writer)}"):
            return False
        self._own = last[0]
        return True

    def draft(self, version: int) -> "RemoteDraft":
        return RemoteDraft(self._store, self._path(directory_of(Path(), version).name))

    def draft_part(self, version: int) -> "RemotePart":
        return RemotePart(self._store, self._path(directory_of(Path(), version).name))

    def remove_others(self, kept: Container[int]) -> None:
        for name in self._store.names(self._own):
            version = version_of(Path(name))
            if version is not None and version not in kept:
                _remove_version(self._store, self._path(name))
        names = [name for _, name in self._trainers()]
        for name in names[: names.index(self._own)] if self._own in names else ():
            self._store.remove(name)  # of a trainer in whose place this one has come

    def speed(self, nbytes: int) -> float:
        data = memoryview(bytes(nbytes))
        found = speed_of(nbytes, lambda: self._store.put(self._path(_PROBE), [data]))
        self._store.remove(self._path(_PROBE))
        return found

    def _path(self, name: str) -> str:
        return f"{self._own}/{name}".lstrip("/")

    def _trainers(self) -> list[tuple[int, str]]:
        return trainers_in(self._store)


class RemotePart:
    """See `DraftPart`. It is not read again: a reader holds each tensor against its checksum."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self._names: list[str] = []

    def file(self, name: str, specs: Mapping[str, Spec]) -> "RemoteTensorFile":
        self._names.append(name)
        return RemoteTensorFile(self._store, f"{self._path}/{name}", specs)

    def check(self, files: Mapping[str, str], written: Mapping[str, str], algorithm: str) -> None:
        return

    def discard(self) -> None:
        with suppress(OSError):
            for name in self._names:
                self._store.remove(f"{self._path}/{name}")


class RemoteDraft(RemotePart):
    """See `Draft`.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, store: Store, path: str) -> None:
        super().__init__(store, path)
        _remove_version(store, path)

    def write_json(self, name: str, content: object) -> None:
        self._store.put(f"{self._path}/{name}", [as_json(content).encode()])

    def copy_assets(self, assets: Path) -> None:
        for file in assets_of(assets):
            self._store.put(f"{self._path}/{file.name}", [file.read_bytes()])

    def publish(self, manifest: VersionManifest) -> None:
        self.write_json(MANIFEST, manifest.content())

    def remove(self) -> None:
        with suppress(OSError):  # without a manifest it is no version
            _remove_version(self._store, self._path)


class RemoteTensorFile:
    """``with ... as file: file.write(name, tensor)``, each of ``specs`` once; it is sent at the end.

    Tensors have to stay as they are until then.
    """

    def __init__(self, store: Store, path: str, specs: Mapping[str, Spec]) -> None:
        self._store, self._path, self._specs = store, path, dict(specs)
        self._tensors: dict[str, torch.Tensor] = {}

    def __enter__(self) -> "RemoteTensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            header, offsets, _ = layout(self._specs)
            self._store.put(self._path, [header, *(bytes_of(self._tensors[name]) for name in offsets)])

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor.detach().cpu().contiguous()


def trainers_in(store: Store) -> list[tuple[int, str]]:
    """The folders of trainers that came, in order; of two that came at once all see the same one last."""
    found = (_TRAINER.fullmatch(name) for name in store.names())
    return sorted((int(match[1]), match[0]) for match in found if match)


def _remove_version(store: Store, path: str) -> None:
    """The manifest goes first: what is left of the rest is no version."""
    store.remove(f"{path}/{MANIFEST}")
    store.remove(path)


def _as_name(writer: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", writer)
