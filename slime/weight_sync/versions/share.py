"""A rank's share of the version that all engines have confirmed, and what becomes of it in an update."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from slime.training.weights import NamedTensors
from slime.weight_sync.versions.codec import Bytes, apply, bytes_in, checksum, difference
from slime.weight_sync.versions.manifest import Entry, Link


class Kept(NamedTuple):
    """A tensor's format and its bytes."""

    form: Entry
    data: Bytes


class HeldShare:
    """The tensors that a trainer rank is given, as engines have them, in host memory.

    An update goes: `begin`, `keep` or `changes_of` each bucket, `move_on` when all engines have confirmed it.

    Args:
        encoding: of changes.
        algorithm: of checksums.

    Attributes:
        link: the version; None if nothing is held.
        changed: bytes that have changed in this update.
        change_bytes: bytes of the changes.
    """

    def __init__(self, encoding: str, algorithm: str) -> None:
        self._encoding, self._algorithm = encoding, algorithm
        self.drop()

    def drop(self) -> None:
        """Holds nothing any more."""
        self.link: Link | None = None
        self._kept: dict[str, Kept] = {}
        self.begin()

    def begin(self) -> None:
        """An update begins; what one before it has left unconfirmed is forgotten."""
        self._next: dict[str, Kept] = {}
        self._changes: dict[str, bytes] = {}
        self.changed = 0

    @property
    def nbytes(self) -> int:
        return sum(kept.data.nbytes for kept in self._kept.values())

    @property
    def change_bytes(self) -> int:
        return sum(map(len, self._changes.values()))

    def keep(self, bucket: NamedTensors) -> NamedTensors:
        """Takes and returns copies of whole tensors: the trainer goes on to change what it has given."""
        copies: NamedTensors = []
        for name, tensor in bucket:
            kept = Kept(_form(tensor), bytes_in(tensor.detach().cpu().contiguous()).copy())
            self._next[name] = kept
            copies.append((name, kept.form.tensor(kept.data)))
        return copies

    def changes_of(self, bucket: NamedTensors) -> dict[str, tuple[Entry, bytes]]:
        """By name the tensors of which a byte has changed, as they are now, and their changes."""
        found: dict[str, tuple[Entry, bytes]] = {}
        for name, tensor in bucket:
            whole = tensor.detach().cpu().contiguous()
            data = bytes_in(whole)
            change = difference(data, self._kept[name].data, self._encoding)
            if change is not None:
                entry = _form(whole)._replace(digest=checksum(self._algorithm, data))
                found[name] = entry, change.payload
                self._changes[name] = change.payload
                self.changed += change.changed
        return found

    def tensors(self, max_bytes: int) -> Iterator[NamedTensors]:
        """All tensors with the changes that are not confirmed yet, in buckets; a larger one comes alone."""
        bucket: NamedTensors = []
        size = 0
        for name, (form, data) in self._kept.items():
            if bucket and size + data.nbytes > max_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, form.tensor(self._with_changes(name, data))))
            size += data.nbytes
        if bucket:
            yield bucket

    def move_on(self, link: Link) -> None:
        """All engines have the version; where this fails nothing is held."""
        is_whole, self.link = self.link is None, None
        if is_whole:
            self._kept = self._next
        for name in self._changes:
            form, data = self._kept[name]
            self._kept[name] = Kept(form, self._with_changes(name, data))
        self.begin()
        self.link = link

    def _with_changes(self, name: str, data: Bytes) -> Bytes:
        return apply(data, self._changes[name], self._encoding) if name in self._changes else data


def _form(tensor: torch.Tensor) -> Entry:
    return Entry(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "", "")
