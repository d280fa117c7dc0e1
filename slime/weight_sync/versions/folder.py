"""A directory of versions, each a directory that gets its name when it is complete."""

import shutil
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path

from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.models.checkpoint.safetensors_file import SafetensorFile, Spec
from slime.training.hf_export import copy_assets
from slime.weight_sync.floor import disk_speed
from slime.weight_sync.versions.codec import bytes_in, checksum
from slime.weight_sync.versions.manifest import VersionManifest, directory_of, version_of, write_json
from slime.weight_sync.versions.owner import is_taken_by, require_directory, take_directory

_UNFINISHED = ".weight_v*.partial"


class Folder:
    """See `Storage`. Its methods raise OSError if the directory cannot be written."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def __str__(self) -> str:
        return str(self._root)

    @property
    def source(self) -> str:
        return str(self._root)

    def take(self, writer: str) -> None:
        take_directory(self._root, writer)

    def require(self, writer: str) -> None:
        require_directory(self._root, writer)

    def has_taken(self, writer: str) -> bool:
        return is_taken_by(self._root, writer)

    def draft(self, version: int) -> "FolderDraft":
        return FolderDraft(self._root, version)

    def draft_part(self, version: int) -> "FolderPart":
        return FolderPart(self._root, version)

    def remove_others(self, kept: Container[int]) -> None:
        remove_others(self._root, kept)

    def speed(self, nbytes: int) -> float:
        return disk_speed(nbytes, self._root)


class FolderPart:
    """See `DraftPart`. Its directory is made by the first rank, and nothing is written where it is not."""

    def __init__(self, root: Path, version: int) -> None:
        self._final = directory_of(root, version)
        self._partial = root / f".{self._final.name}.partial"
        self._names: list[str] = []

    def file(self, name: str, specs: Mapping[str, Spec]) -> SafetensorFile:
        self._names.append(name)
        return SafetensorFile(self._partial / name, specs)

    def check(self, files: Mapping[str, str], written: Mapping[str, str], algorithm: str) -> None:
        if written:
            with _Files(self._partial, files) as reader:
                _require_written(reader, written, algorithm)

    def discard(self) -> None:
        for name in self._names:
            with suppress(OSError):
                (self._partial / name).unlink()


class FolderDraft(FolderPart):
    """See `Draft`. What killed writers have left is removed.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, root: Path, version: int) -> None:
        super().__init__(root, version)
        for left in root.glob(_UNFINISHED):
            shutil.rmtree(left, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def write_json(self, name: str, content: object) -> None:
        write_json(self._partial / name, content)

    def copy_assets(self, assets: Path) -> None:
        copy_assets(assets, self._partial)

    def publish(self, manifest: VersionManifest) -> None:
        """Gives the version its name."""
        manifest.write(self._partial)
        if self._final.exists():  # of an earlier run, or the changes in whose place all weights come
            shutil.rmtree(self._final)
        self._partial.rename(self._final)

    def remove(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


class _Files(SafetensorReader):
    """Reads some files of a directory whose index is not there yet.

    Args:
        files: by the names of tensors.
    """

    def __init__(self, path: Path, files: Mapping[str, str]) -> None:
        paths = {file: path / file for file in set(files.values())}
        self._paths = {name: paths[file] for name, file in files.items()}
        super().__init__(path)

    def _index(self) -> dict[str, Path]:
        return self._paths


def verify(version: Path, digests: Mapping[str, str], algorithm: str) -> None:
    """Reads what a version's files hold, and holds it against checksums by name.

    Raises:
        ValueError: a file cannot be read, or a tensor is another than was written; it is named.
    """
    if digests:
        with SafetensorReader(version) as reader:
            _require_written(reader, digests, algorithm)


def _require_written(reader: SafetensorReader, digests: Mapping[str, str], algorithm: str) -> None:
    for name, wanted in digests.items():
        tensor = reader.read(name).contiguous()
        found = checksum(algorithm, bytes_in(tensor))
        if found != wanted:
            raise ValueError(
                f"{reader.path}: {name}: {algorithm} {found} is read (wanted: {wanted}, as was written)"
            )


def remove_others(root: Path, kept: Container[int]) -> None:
    """Removes all versions but these, and what killed writers have left of others.

    Later ones are of a run that went further than the checkpoint from which this one goes on.
    """
    for path in root.iterdir():
        version = version_of(path)
        if version is not None and version not in kept:
            shutil.rmtree(path)
