"""Writes versions of weights, which are there for readers when they are complete."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from slime.models.checkpoint.safetensors_index import INDEX
from slime.training.weights import NamedTensors
from slime.weight_sync.versions.codec import bytes_in, checksum
from slime.weight_sync.versions.folder import Folder
from slime.weight_sync.versions.manifest import Entry, VersionManifest, state_of
from slime.weight_sync.versions.storage import Storage

_COMPRESSION = "zstd"


class StagedVersion:
    """A version that is being written: a Hugging Face checkpoint with a manifest.

    What killed writers have left is removed, and what there is of this one when it fails: on a full disk the
    next version needs the room.

    Args:
        place: a directory of versions, or a storage.
        algorithm: of checksums.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, place: Path | Storage, version: int, algorithm: str = "xxh3-128") -> None:
        self._version, self._algorithm = version, algorithm
        storage = Folder(place) if isinstance(place, Path) else place
        self._draft = storage.draft(version)
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
        """Completes the checkpoint and makes it a version.

        Args:
            assets: the checkpoint directory whose config and tokenizer belong to the weights.

        Raises:
            ValueError: a tensor is read otherwise than it was written; it is named.
        """
        manifest = VersionManifest(self._version, state_of(self.entries), self._algorithm, self.entries)
        with self.or_nothing():
            self._draft.copy_assets(assets)
            self._complete(manifest, {})
        return manifest

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Removes all of it if the body fails."""
        try:
            yield
        except BaseException:
            self._draft.discard()
            raise

    def _write_file(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
        """Returns the name of the file."""
        self._files += 1
        file = f"model-{self._files:05d}.safetensors"
        specs = {name: (t.dtype, tuple(t.shape)) for name, t in tensors}
        digest = lambda pair: checksum(self._algorithm, bytes_in(pair[1]))
        with (
            self.or_nothing(),
            self._draft.file(file, specs) as out,
            ThreadPoolExecutor(1, thread_name_prefix="checksums") as beside,
        ):
            digests = beside.map(digest, tensors)
            for name, tensor in tensors:
                out.write(name, tensor)
                self._bytes += tensor.nbytes
            self._written |= dict(zip(specs, digests, strict=True))
        return file

    def _complete(self, manifest: VersionManifest, metadata: Mapping[str, str]) -> None:
        weight_map = {name: entry.file for name, entry in self.entries.items()}
        told = {"total_size": self._bytes, **metadata}
        self._draft.write_json(INDEX, {"metadata": told, "weight_map": weight_map})
        self._draft.publish(manifest, self._written)


class StagedChanges(StagedVersion):
    """The changes of a version against another one, in files of the same form.

    Args:
        base: a whole manifest of it.
    """

    def __init__(self, place: Path | Storage, version: int, base: VersionManifest, encoding: str) -> None:
        super().__init__(place, version, base.checksum)
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
        """Completes the version.

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


def _as_tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
