"""Where a reader has versions from: a directory, or a URL whose files it fetches first."""

import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from slime.models.checkpoint.safetensors_index import INDEX
from slime.utils.stores import is_url, shown
from slime.weight_sync.versions.folder import remove_others, verify
from slime.weight_sync.versions.manifest import MANIFEST, NO_VERSION, VersionManifest, directory_of
from slime.weight_sync.versions.remote import LIMIT_S, Store

_FETCHED = ".fetched"
_AT_ONCE = 4
"""Files; a connection alone is often slower than the machine."""


class Version(NamedTuple):
    """A version, and the directory that it is in."""

    path: Path
    manifest: VersionManifest

    @classmethod
    def read(cls, path: Path) -> "Version":
        """
        Raises:
            ValueError: see `VersionManifest.read`.
        """
        return cls(path, VersionManifest.read(path))


class Source(Protocol):
    """Its methods raise ValueError, with a name, where a version is not there or damaged, and OSError."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def version(self, number: int) -> Version:
        """What its manifest says; there may be no more of it yet."""

    def fetched(self, version: Version) -> Version:
        """The version with its files."""

    def whole(self, version: Version, kept: Collection[int] = ()) -> Version:
        """A whole version with its files; one that was fetched is held by this machine from now on.

        Args:
            kept: versions that stay there then.
        """


class _Directory:
    def __init__(self, root: Path) -> None:
        self._root = root

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def version(self, number: int) -> Version:
        return Version.read(directory_of(self._root, number))

    def fetched(self, version: Version) -> Version:
        return version

    def whole(self, version: Version, kept: Collection[int] = ()) -> Version:
        return version


class _Fetching:
    """Fetches to a directory in ``local`` of which nothing is left at the end."""

    def __init__(self, url: str, local: Path, limit_s: float) -> None:
        self._store, self._local = Store(url, limit_s), local
        self._here = local / _FETCHED

    def __enter__(self) -> Self:
        shutil.rmtree(self._here, ignore_errors=True)  # of a reader that was killed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._here, ignore_errors=True)
        if isinstance(error, ValueError):
            raise ValueError(f"{self._store.url}: {error}") from error

    def version(self, number: int) -> Version:
        path = directory_of(self._here, number)
        where = f"{self._store.url}/{path.name}"
        try:
            content = self._store.get(f"{path.name}/{MANIFEST}")
        except FileNotFoundError:
            raise ValueError(f"{where}: {NO_VERSION}") from None
        return Version(path, VersionManifest.parse(content, where))

    def fetched(self, version: Version) -> Version:
        path, manifest = version
        files = {entry.file for entry in manifest.tensors.values()}
        there = self._store.names(path.name)
        if missing := sorted((files | {INDEX}) - {*there}):
            raise ValueError(f"{path.name}: {missing[0]} is missing (wanted: what {MANIFEST} names)")
        others = (name for name in there if name != MANIFEST and not name.endswith(".safetensors"))
        wanted = [*files, *others]
        path.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
            list(pool.map(lambda name: self._store.fetch(f"{path.name}/{name}", path / name), wanted))
        manifest.write(path)
        return version

    def whole(self, version: Version, kept: Collection[int] = ()) -> Version:
        path, manifest = self.fetched(version)
        verify(path, {name: entry.digest for name, entry in manifest.tensors.items()}, manifest.checksum)
        held = directory_of(self._local, manifest.version)
        remove_others(self._local, {*kept} - {manifest.version})
        return Version(path.rename(held), manifest)


def source_of(place: Path | str, local: Path, limit_s: float = LIMIT_S) -> Source:
    """
    Args:
        local: the reader's directory, to which files may be fetched.
        limit_s: how long each may take.

    Raises:
        ValueError: the URL is none that can be read.
    """
    if isinstance(place, Path) or not is_url(place):
        return _Directory(Path(place))
    try:
        return _Fetching(place, local, limit_s)
    except ImportError as error:
        raise ValueError(f"{shown(place)}: {error}") from error
