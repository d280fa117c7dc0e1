"""Versions in memory: what the engines were sent last, on both sides of a process group.

The trainer keeps the bytes of each tensor as it sent them, and so does each engine, beside the weights that
it computes with, which may have another format. What comes later are changes of these bytes.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from slime.weight_sync.versions.codec import Bytes, apply, bytes_in, checksum, difference
from slime.weight_sync.versions.manifest import Entry, state_of

SAME, WHOLE = "same", "whole"
FORMS = (SAME, WHOLE, "xor", "overwrite")


class SentTensor(NamedTuple):
    """A tensor of a bucket as it is to be, and what of the bucket's bytes is about it.

    Attributes:
        form: "same", "whole", or the encoding of a change.
        size: bytes that were sent of it.
        digest: checksum of all its bytes, those that have not changed included.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    form: str
    size: int
    digest: str

    @property
    def entry(self) -> Entry:
        return Entry(self.shape, self.dtype, "", self.digest)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor.

        Raises:
            ValueError: there is no such format.
        """
        return torch.Size(self.shape).numel() * self.entry.torch_dtype.itemsize


class ChangedBucket(NamedTuple):
    """Tensors of an update, in the order in which their bytes come.

    Attributes:
        checksum: the algorithm of digests.
        number: of the bucket within its update.
        base: the state whose changes the update consists of; None if it is whole.
        state: of all tensors after it; None before the last bucket.
    """

    tensors: Sequence[SentTensor]
    checksum: str
    number: int
    base: str | None = None
    state: str | None = None

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors)


class SentState:
    """The trainer's side.

    Attributes:
        state: of all tensors after the last update that was confirmed; None before, and while one is open.
        changed: bytes of the update that differ from what was sent before.
    """

    def __init__(self, encoding: str, algorithm: str) -> None:
        self._encoding, self._algorithm = encoding, algorithm
        self._held: dict[str, Bytes] = {}
        self._entries: dict[str, Entry] = {}
        self._whole = True
        self.state: str | None = None
        self.changed = 0

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self._held.values())

    def begin(self, whole: bool) -> None:
        """An update starts. Until its end there is no state that engines could have."""
        self._whole, self.state, self.changed = whole, None, 0
        if whole:
            self._entries = {}

    def bucket(self, named: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[SentTensor], Bytes]:
        """What is to be sent of these tensors, which are remembered as sent."""
        pieces: list[Bytes] = []
        sent = []
        for name, tensor in named:
            one, piece = self._sent(name, tensor.detach().cpu().contiguous())
            sent.append(one)
            pieces.append(piece)
        return sent, np.concatenate(pieces)

    def leads_to(self) -> str:
        """The state of all tensors, once all were sent."""
        return state_of(self._entries)

    def confirm(self) -> None:
        """Every engine has the update."""
        self.state = self.leads_to()

    def _sent(self, name: str, tensor: torch.Tensor) -> tuple[SentTensor, Bytes]:
        data, form = bytes_in(tensor), WHOLE
        piece = data
        if not self._whole:
            form, piece = self._change(name, data)
        if form == SAME:
            entry = self._entries[name]
        else:
            dtype = str(tensor.dtype).removeprefix("torch.")
            entry = Entry(tuple(tensor.shape), dtype, "", checksum(self._algorithm, data))
            self._keep(name, data)
        self._entries[name] = entry
        return SentTensor(name, entry.dtype, entry.shape, form, piece.nbytes, entry.digest), piece

    def _change(self, name: str, data: Bytes) -> tuple[str, Bytes]:
        found = difference(data, self._held[name], self._encoding)
        if found is None:
            return SAME, data[:0]
        self.changed += found.changed
        if len(found.payload) >= data.nbytes:
            return WHOLE, data
        return self._encoding, np.frombuffer(found.payload, np.uint8)

    def _keep(self, name: str, data: Bytes) -> None:
        held = self._held.get(name)
        if held is not None and held.size == data.size:
            np.copyto(held, data)  # touching fresh pages costs more than the copy
        else:
            self._held[name] = data.copy()


class HeldState:
    """The engine's side.

    Attributes:
        state: of all tensors, once an update was complete; None while one is open, and after one that failed.
    """

    def __init__(self) -> None:
        self.state: str | None = None
        self._held: dict[str, Bytes] = {}
        self._entries: dict[str, Entry] = {}
        self._next = 0

    def begin(self, bucket: ChangedBucket) -> None:
        """Looks at a bucket before its bytes have come.

        Raises:
            ValueError: it has changes of another state, a bucket before it has not come, or sizes cannot be.
        """
        if bucket.number == 0:
            if bucket.base not in (None, self.state):
                raise ValueError(f"changes of weights {bucket.base} (wanted: of {self.state}, or whole ones)")
            self._entries, self._next = {}, 0
        if bucket.number != self._next:
            raise ValueError(f"bucket {bucket.number} of changes (wanted: {self._next})")
        self.state = None
        for tensor in bucket.tensors:
            _require_plausible(tensor, self._held.get(tensor.name))

    def take(self, bucket: ChangedBucket, payload: Bytes) -> list[tuple[str, torch.Tensor]]:
        """The tensors as they are now, in memory of this object.

        Raises:
            ValueError: a change is damaged, or leads to another tensor; it is named.
        """
        self._next, start, named = self._next + 1, 0, []
        for tensor in bucket.tensors:
            data = self._changed(tensor, payload[start : start + tensor.size])
            start += tensor.size
            found = checksum(bucket.checksum, data)
            if found != tensor.digest:
                where = f"weight {tensor.name!r}: {bucket.checksum} {found}"
                raise ValueError(f"{where} (wanted: {tensor.digest}, as was sent)")
            self._held[tensor.name], self._entries[tensor.name] = data, tensor.entry
            named.append((tensor.name, tensor.entry.tensor(data)))
        return named

    def finish(self, state: str) -> None:
        """The update is complete.

        Raises:
            ValueError: it leads to another state than was sent.
        """
        if (found := state_of(self._entries)) != state:
            raise ValueError(f"the changes lead to weights of state {found} (wanted: {state})")
        self._held = {name: self._held[name] for name in self._entries}
        self.state = state

    def _changed(self, tensor: SentTensor, payload: Bytes) -> Bytes:
        held = self._held.get(tensor.name)
        if tensor.form == WHOLE:
            if held is None or held.size != payload.size:
                return payload.copy()
            np.copyto(held, payload)
            return held
        assert held is not None
        if tensor.form == SAME:
            return held
        try:
            return apply(held, payload.data, tensor.form)
        except ValueError as error:
            raise ValueError(f"weight {tensor.name!r}: {error}") from error


def equal_bytes(ranks: Sequence[torch.Tensor]) -> Bytes:
    """What all ranks of an engine have received.

    Raises:
        ValueError: one has other bytes than the first one.
    """
    first, *others = ranks
    for rank, other in enumerate(others, 1):
        if not torch.equal(first, other):
            raise ValueError(f"TP rank {rank}: other bytes than rank 0 has")
    return bytes_in(first.cpu())


def _require_plausible(tensor: SentTensor, held: Bytes | None) -> None:
    where = f"weight {tensor.name!r}"
    if tensor.form not in FORMS:
        raise ValueError(f"{where}: form {tensor.form!r} (wanted: one of {FORMS})")
    nbytes = tensor.nbytes
    if tensor.form != WHOLE and (held is None or held.size != nbytes):
        found = "none" if held is None else f"one of {held.size} bytes"
        raise ValueError(f"{where}: a change of {nbytes} bytes (found: {found}; send it whole)")
    sizes = {SAME: range(1), WHOLE: range(nbytes, nbytes + 1)}.get(tensor.form, range(1, nbytes))
    if tensor.size not in sizes:
        raise ValueError(f"{where}: {tensor.size} bytes (wanted: {tensor.form}, of {nbytes} bytes)")
