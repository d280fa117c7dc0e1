"""A directory of versions, each a directory that gets its name when it is complete."""

import shutil
from collections.abc import Container, Mapping
from pathlib import Path

from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.models.checkpoint.safetensors_file import SafetensorFile, Spec
from slime.training.hf_export import copy_assets
from slime.weight_sync.floor import disk_speed
from slime.weight_sync.versions.codec import bytes_in, checksum
from slime.weight_sync.versions.manifest import VersionManifest, directory_of, version_of, write_json
from slime.weight_sync.versions.owner import require_directory, take_directory

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

    def draft(self, version: int) -> "FolderDraft":
        return FolderDraft(self._root, version)

    def remove_others(self, kept: Container[int]) -> None:
        remove_others(self._root, kept)

    def speed(self, nbytes: int) -> float:
        return disk_speed(nbytes, self._root)


class FolderDraft:
    """See `Draft`. What killed writers have left is removed.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, root: Path, version: int) -> None:
        self._final = directory_of(root, version)
        self._partial = root / f".{self._final.name}.partial"
        for left in root.glob(_UNFINISHED):
            shutil.rmtree(left, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def file(self, name: str, specs: Mapping[str, Spec]) -> SafetensorFile:
        return SafetensorFile(self._partial / name, specs)

    def write_json(self, name: str, content: object) -> None:
        write_json(self._partial / name, content)

    def copy_assets(self, assets: Path) -> None:
        copy_assets(assets, self._partial)

    def publish(self, manifest: VersionManifest, written: Mapping[str, str]) -> None:
        """Reads the version once, and gives it its name.

        Raises:
            ValueError: a tensor is read otherwise than it was written; it is named.
        """
        manifest.write(self._partial)
        verify(self._partial, written, manifest.checksum)
        if self._final.exists():  # of an earlier run, or the changes in whose place all weights come
            shutil.rmtree(self._final)
        self._partial.rename(self._final)

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


def verify(version: Path, digests: Mapping[str, str], algorithm: str) -> None:
    """Reads what a version's files hold, and holds it against checksums by name.

    Raises:
        ValueError: a file cannot be read, or a tensor is another than was written; it is named.
    """
    if not digests:
        return
    with SafetensorReader(version) as reader:
        for name, wanted in digests.items():
            tensor = reader.read(name).contiguous()
            found = checksum(algorithm, bytes_in(tensor))
            if found != wanted:
                raise ValueError(
                    f"{version}: {name}: {algorithm} {found} is read (wanted: {wanted}, as was written)"
                )


def remove_others(root: Path, kept: Container[int]) -> None:
    """Removes all versions but these, and what killed writers have left of others.

    Later ones are of a run that went further than the checkpoint from which this one goes on.
    """
    for path in root.iterdir():
        version = version_of(path)
        if version is not None and version not in kept:
            shutil.rmtree(path)
