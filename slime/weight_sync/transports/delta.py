"""Weights as changes in a directory that trainer and engines share."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from slime.backends.sglang_utils.client import EngineError
from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports.disk import DiskTransport
from slime.weight_sync.transports.session import CONFLICT, WriterClient
from slime.weight_sync.versions.codec import Bytes, apply, bytes_in, checksum, difference
from slime.weight_sync.versions.manifest import Entry, VersionManifest
from slime.weight_sync.versions.staged import StagedChanges, StagedVersion

logger = logging.getLogger(__name__)

MAX_LINKS = 32
"""Changes in a row after which a whole version comes: whoever is late has to make all of them."""


def is_followed(config: WeightUpdateConfig) -> bool:
    """Whether versions are for engines that others bring them to."""
    return config.engines.rollout_external or config.weight_sync.publish_weights


class DeltaTransport(DiskTransport):
    """Trainer rank 0 writes what has changed since the version that all engines have confirmed.

    It keeps that version in memory. The first one after a start is written whole. So is one whose changes a
    reader cannot make use of, because an earlier one is missing or damaged, before any engine stops; and one
    after so many, or so large, changes that whoever is late had better read a whole one.
    """

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._encoding = config.weight_sync.update_weight_delta_encoding
        self._base: VersionManifest | None = None
        self._entries: dict[str, Entry] = {}
        self._held: dict[str, Bytes] = {}
        self._next: dict[str, Bytes] = {}
        self._changes: dict[str, bytes] = {}
        self._changed = self._links = self._link_bytes = self._oldest = 0

    @classmethod
    def is_wanted(cls, config: WeightUpdateConfig) -> bool:
        return config.weight_sync.update_weight_mode == "delta" and not is_followed(config)

    def open(self, version: str, plan: WeightPlan) -> None:
        self._next, self._changes, self._changed = {}, {}, 0
        super().open(version, plan)

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if isinstance(self._staged, StagedChanges):
            return self._send_changes(self._staged, bucket)
        if self._staged is not None:
            # Of its own: the trainer goes on to change what it has given.
            self._next |= {name: _copied(tensor) for name, tensor in bucket}
        return super().send(bucket, is_last)

    def _stage(self) -> StagedVersion:
        if self._base is None:
            return super()._stage()
        return StagedChanges(self._storage, int(self._version), self._base, self._encoding)

    def _send_changes(self, staged: StagedChanges, bucket: NamedTensors) -> int:
        changes: dict[str, tuple[Entry, bytes]] = {}
        for name, tensor in bucket:
            data = tensor.detach().cpu().contiguous()
            found = difference(bytes_in(data), self._held[name], self._encoding)
            if found is not None:
                digest, dtype = checksum(self._algorithm, bytes_in(data)), str(data.dtype)
                entry = Entry(tuple(data.shape), dtype.removeprefix("torch."), "", digest)
                changes[name] = entry, found.payload
                self._changes[name] = found.payload
                self._changed += found.changed
        return self._on_disk(partial(staged.write_changes, changes))

    def _fetch(self) -> dict[WriterClient, str]:
        try:
            return super()._fetch()
        except EngineError as error:
            unread = error.status not in (None, CONFLICT)
            if not unread or self._published is None or self._published.base is None:
                raise
            logger.warning("version %s comes whole: %s", self._version, error)
            self._published = self._on_disk(partial(self._write_whole, int(self._version)))
            self._tell_written()
            return super()._fetch()

    def _write_whole(self, version: int) -> VersionManifest:
        """Writes the version that is kept, with the changes that are not confirmed yet."""
        staged = StagedVersion(self._storage, version, self._algorithm)
        for bucket in self._buckets():
            staged.write(bucket)
        return staged.publish(self._assets)

    def _buckets(self) -> Iterator[NamedTensors]:
        bucket: NamedTensors = []
        size = 0
        for name, entry in self._entries.items():
            data = self._held[name]
            if bucket and size + data.nbytes > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            data = apply(data, self._changes[name], self._encoding) if name in self._changes else data
            bucket.append((name, entry.tensor(data)))
            size += data.nbytes
        if bucket:
            yield bucket

    def _confirmed(self) -> None:
        published, base = self._published, self._base
        assert published is not None
        for name, payload in self._changes.items():
            self._held[name] = apply(self._held[name], payload, self._encoding)
        if base is None:
            self._held = self._next
        self._entries |= published.tensors
        self._base = replace(published, tensors=dict(self._entries), base=None)
        self.density = self._changed / max(self._whole_bytes, 1) if base is not None else 0.0
        if published.base is None:
            self._begin_chain(published.version)
        else:
            self._links += 1
            self._link_bytes += sum(map(len, self._changes.values()))
            self._remove_others()
        self._next, self._changes, self._changed = {}, {}, 0
        if self._links >= MAX_LINKS or self._link_bytes > self._whole_bytes:
            self._on_disk(partial(self._write_whole, published.version))
            self._tell_written()
            self._begin_chain(published.version)

    def _begin_chain(self, version: int) -> None:
        """A whole version is there: nobody needs those before it."""
        self._oldest, self._links, self._link_bytes = version, 0, 0
        self._remove_others()

    @property
    def _whole_bytes(self) -> int:
        return sum(data.nbytes for data in self._held.values())

    def _remove_others(self) -> None:
        if not self._keeps_files:
            kept = range(self._oldest, int(self._version) + 1)
            self._on_disk(partial(self._storage.remove_others, kept))


def _copied(tensor: torch.Tensor) -> Bytes:
    whole = tensor.detach().cpu().contiguous()
    return bytes_in(whole).copy()
