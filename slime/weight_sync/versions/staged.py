"""Writes versions of weights, which are there for readers when they are complete."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from slime.models.checkpoint.safetensors_index import INDEX
from slime.training.weights import NamedTensors
from slime.weight_sync.versions.codec import bytes_in, checksum
from slime.weight_sync.versions.folder import Folder
from slime.weight_sync.versions.manifest import Entry, VersionManifest, state_of
from slime.weight_sync.versions.storage import DraftPart, Storage

_COMPRESSION = "zstd"


class Part(NamedTuple):
    """What a writer has written of a version: tensors by name, and the bytes of its files."""

    entries: dict[str, Entry]
    nbytes: int


class StagedPart:
    """The files of a version that one of several writers writes, each on a trainer rank.

    They are removed when it fails: on a full disk the next version needs the room.

    Args:
        algorithm: of checksums.
        number: of this writer. Names of files count on by as many as there are ``writers``.
    """

    def __init__(self, draft: DraftPart, algorithm: str, number: int = 0, writers: int = 1) -> None:
        self._part, self._algorithm = draft, algorithm
        self._numbers = count(number + 1, writers)
        self.entries: dict[str, Entry] = {}
        self._written: dict[str, str] = {}
        self._bytes = 0

    @property
    def part(self) -> Part:
        return Part(self.entries, self._bytes)

    def write(self, bucket: NamedTensors) -> int:
        """Writes a file with these tensors; returns their bytes."""
        whole = [(name, tensor.detach().cpu().contiguous()) for name, tensor in bucket]
        file = self._write_file(whole)
        for name, tensor in whole:
            dtype, digest = str(tensor.dtype).removeprefix("torch."), self._written[name]
            self.entries[name] = Entry(tuple(tensor.shape), dtype, file, digest)
        return sum(tensor.nbytes for _, tensor in whole)

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

    def check(self) -> None:
        """Reads all files once.

        Raises:
            ValueError: a tensor is read otherwise than it was written; it is named.
        """
        files = {name: entry.file for name, entry in self.entries.items()}
        with self.or_nothing():
            self._part.check(files, self._written, self._algorithm)

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """Removes the files if the body fails."""
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        self._part.discard()

    def _write_file(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
        """Returns the name of the file."""
        file = f"model-{next(self._numbers):05d}.safetensors"
        specs = {name: (t.dtype, tuple(t.shape)) for name, t in tensors}
        digest = lambda pair: checksum(self._algorithm, bytes_in(pair[1]))
        with (
            self.or_nothing(),
            self._part.file(file, specs) as out,
            ThreadPoolExecutor(1, thread_name_prefix="checksums") as beside,
        ):
            digests = beside.map(digest, tensors)
            for name, tensor in tensors:
                out.write(name, tensor)
                self._bytes += tensor.nbytes
            self._written |= dict(zip(specs, digests, strict=True))
        return file


class StagedVersion(StagedPart):
    """A version that is being written: a Hugging Face checkpoint with a manifest.

    What killed writers have left is removed.

    Args:
        place: a directory of versions, or a storage.
        writers: how many ranks write it, this one included.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(
        self, place: Path | Storage, version: int, algorithm: str = "xxh3-128", writers: int = 1
    ) -> None:
        storage = Folder(place) if isinstance(place, Path) else place
        self._version, self._draft, self._is_alone = version, storage.draft(version), writers == 1
        super().__init__(self._draft, algorithm, 0, writers)

    def publish(self, assets: Path) -> VersionManifest:
        """Reads the files, completes the checkpoint and makes it a version.

        Args:
            assets: the checkpoint directory whose config and tokenizer belong to the weights.

        Raises:
            ValueError: a tensor is read otherwise than it was written; it is named.
        """
        self.check()
        return self.complete(assets)

    def complete(self, assets: Path, others: Sequence[Part] = ()) -> VersionManifest:
        """Makes it a version, without another look at its files.

        Args:
            others: what the other writers have written.
        """
        for entries, nbytes in others:
            self.entries |= entries
            self._bytes += nbytes
        try:
            return self._completed(assets)
        except BaseException:
            self._draft.remove()
            raise

    def _undo(self) -> None:
        """Where others still write into it the whole goes with the next draft."""
        if self._is_alone:
            self._draft.remove()
        else:
            self._draft.discard()

    def _completed(self, assets: Path) -> VersionManifest:
        manifest = VersionManifest(self._version, state_of(self.entries), self._algorithm, self.entries)
        self._draft.copy_assets(assets)
        self._finish(manifest, {})
        return manifest

    def _finish(self, manifest: VersionManifest, metadata: Mapping[str, str]) -> None:
        weight_map = {name: entry.file for name, entry in self.entries.items()}
        told = {"total_size": self._bytes, **metadata}
        self._draft.write_json(INDEX, {"metadata": told, "weight_map": weight_map})
        self._draft.publish(manifest)


class StagedChanges(StagedVersion):
    """The changes of a version against another one, in files of the same form.

    Args:
        base: a whole manifest of it.
    """

    def __init__(
        self, place: Path | Storage, version: int, base: VersionManifest, encoding: str, writers: int = 1
    ) -> None:
        super().__init__(place, version, base.checksum, writers)
        self._base, self._encoding = base, encoding

    def _completed(self, assets: Path) -> VersionManifest:
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
        self._finish(manifest, metadata)
        return manifest


def _as_tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
