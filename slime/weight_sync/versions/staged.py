"""Writes versions of weights: directories that get their names when they are complete."""

import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.models.checkpoint.safetensors_file import SafetensorFile
from slime.models.checkpoint.safetensors_index import INDEX
from slime.training.hf_export import copy_assets
from slime.training.weights import NamedTensors
from slime.weight_sync.versions.codec import bytes_in, checksum
from slime.weight_sync.versions.manifest import (
    Entry,
    VersionManifest,
    directory_of,
    state_of,
    version_of,
    write_json,
)

_COMPRESSION = "zstd"
_UNFINISHED = ".weight_v*.partial"


class StagedVersion:
    """A version that is being written: a Hugging Face checkpoint with a manifest.

    What killed writers have left is removed, and what there is of this one when it fails: on a full disk the
    next version needs the room.

    Args:
        algorithm: of checksums.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, root: Path, version: int, algorithm: str = "xxh3-128") -> None:
        self._version, self._algorithm = version, algorithm
        self._final = directory_of(root, version)
        self._partial = root / f".{self._final.name}.partial"
        for left in root.glob(_UNFINISHED):
            shutil.rmtree(left, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self.entries: dict[str, Entry] = {}
        self._written: dict[str, str] = {}
        self._files = self._bytes = 0

    def write(self, bucket: NamedTensors) -> int:
        """Writes a file with these tensors; returns their bytes."""
        whole = [(name, tensor.detach().cpu().contiguous()) for name, tensor in bucket]
        file = self._write_file(whole)
        for name, tensor in whole:
            dtype, digest = str(tensor.dtype).removeprefix("torch."), self._written[name]
            self.entries[name] = Entry(tuple(tensor.shape), dtype, file, digest)
        return sum(tensor.nbytes for _, tensor in whole)

    def publish(self, assets: Path) -> VersionManifest:
        """Completes the checkpoint, reads it once and gives it its name.

        Args:
            assets: the checkpoint directory whose config and tokenizer belong to the weights.

        Raises:
            ValueError: a tensor is read otherwise than it was written; it is named.
        """
        manifest = VersionManifest(self._version, state_of(self.entries), self._algorithm, self.entries)
        with self.or_nothing():
            copy_assets(assets, self._partial)
            self._complete(manifest, {})
        return manifest

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Removes all of it if the body fails."""
        try:
            yield
        except BaseException:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise

    def _write_file(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
        """Returns the name of the file."""
        self._files += 1
        file = self._partial / f"model-{self._files:05d}.safetensors"
        specs = {name: (t.dtype, tuple(t.shape)) for name, t in tensors}
        digest = lambda pair: checksum(self._algorithm, bytes_in(pair[1]))
        with (
            self.or_nothing(),
            SafetensorFile(file, specs) as out,
            ThreadPoolExecutor(1, thread_name_prefix="checksums") as beside,
        ):
            digests = beside.map(digest, tensors)
            for name, tensor in tensors:
                out.write(name, tensor)
                self._bytes += tensor.nbytes
            self._written |= dict(zip(specs, digests, strict=True))
        return file.name

    def _complete(self, manifest: VersionManifest, metadata: Mapping[str, str]) -> None:
        weight_map = {name: entry.file for name, entry in self.entries.items()}
        told = {"total_size": self._bytes, **metadata}
        write_json(self._partial / INDEX, {"metadata": told, "weight_map": weight_map})
        manifest.write(self._partial)
        verify(self._partial, self._written, self._algorithm)
        if self._final.exists():  # of an earlier run, or the changes in whose place all weights come
            shutil.rmtree(self._final)
        self._partial.rename(self._final)


class StagedChanges(StagedVersion):
    """The changes of a version against another one, in files of the same form.

    Args:
        base: a whole manifest of it.
    """

    def __init__(self, root: Path, version: int, base: VersionManifest, encoding: str) -> None:
        super().__init__(root, version, base.checksum)
        self._base, self._encoding = base, encoding

    def write_changes(self, bucket: Mapping[str, tuple[Entry, bytes]]) -> int:
        """Writes a file with these payloads; returns their bytes.

        Args:
            bucket: by name the tensor as it is now, and its change.
        """
        if not bucket:
            return 0
        payloads = [(name, _as_tensor(payload)) for name, (_, payload) in bucket.items()]
        file = self._write_file(payloads)
        self.entries |= {name: entry._replace(file=file) for name, (entry, _) in bucket.items()}
        return sum(len(payload) for _, payload in bucket.values())

    def publish(self, assets: Path) -> VersionManifest:
        """Completes the version, reads it once and gives it its name.

        Raises:
            ValueError: a change is read otherwise than it was written; the tensor is named.
        """
        base = self._base
        state = state_of({**base.tensors, **self.entries})
        manifest = VersionManifest(
            self._version, state, base.checksum, self.entries, base.link, self._encoding
        )
        metadata = {
            "version": f"{self._version:06d}",
            "base_version": f"{base.version:06d}",
            "delta_encoding": self._encoding,
            "compression_format": _COMPRESSION,
            "checksum_format": base.checksum,
        }
        with self.or_nothing():
            self._complete(manifest, metadata)
        return manifest


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


def _as_tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
