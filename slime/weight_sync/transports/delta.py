"""Weights as changes in a directory that trainer and engines share."""

import logging
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineError
from slime.config.weight_update import WeightUpdateConfig
from slime.training.weights import NamedTensors
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports.disk import DiskTransport
from slime.weight_sync.transports.session import CONFLICT, SessionTransport, WriterClient
from slime.weight_sync.versions.manifest import Entry, Link, VersionManifest
from slime.weight_sync.versions.share import HeldShare
from slime.weight_sync.versions.staged import StagedChanges, StagedPart, StagedVersion

logger = logging.getLogger(__name__)

MAX_LINKS = 32
"""Changes in a row after which a whole version comes: whoever is late has to make all of them."""


def is_followed(config: WeightUpdateConfig) -> bool:
    """Whether versions are for engines that others bring them to."""
    return config.engines.rollout_external or config.weight_sync.publish_weights


class DeltaTransport(DiskTransport):
    """Trainer ranks write what has changed since the version that all engines have confirmed.

    Each keeps its share of that version in memory, and writes files of its own; rank 0 makes a version of
    these, and speaks to engines. Where not all ranks reach the directory rank 0 alone keeps and writes.

    The first version after a start is written whole. So is one whose changes a reader cannot make use of,
    because an earlier one is missing or damaged, before any engine stops; one after so many, or so large,
    changes that whoever is late had better read a whole one; and one for which ranks hold different versions.
    """

    splits = True

    def __init__(self, config: WeightUpdateConfig) -> None:
        super().__init__(config)
        self._encoding = config.weight_sync.update_weight_delta_encoding
        self._held = HeldShare(self._encoding, self._algorithm)
        self._given: WeightPlan | None = None  # since engines were connected
        self._stages: list[int] | None = None  # of the ranks that write; None: rank 0 alone does
        self._part: StagedPart | None = None
        self._link = Link(0, "")
        self._forget_pending()
        # Of rank 0.
        self._base: VersionManifest | None = None
        self._places: dict[WriterClient, str] = {}
        self._changed = self._change_bytes = 0
        self._links = self._link_bytes = self._oldest = 0

    @classmethod
    def is_wanted(cls, config: WeightUpdateConfig) -> bool:
        return config.weight_sync.update_weight_mode == "delta" and not is_followed(config)

    @property
    def _is_first(self) -> bool:
        return dist.get_rank() == 0

    @property
    def _has_readers(self) -> bool:
        return self.publishes or bool(self._endpoints)

    @property
    def _writes(self) -> bool:
        return self._is_first and self._has_readers

    @property
    def _writers(self) -> int:
        return 1 if self._stages is None else len(self._stages)

    def source_ranks(self) -> set[int]:
        return set(range(self._writers))

    def own(self, plan: WeightPlan) -> WeightPlan:
        if self._given is None:
            self._given = self._shared(plan)
        return self._given

    def _shared(self, plan: WeightPlan) -> WeightPlan:
        """What of a plan this rank is given; all of it where rank 0 alone reaches the directory."""
        if dist.get_world_size() == 1:
            return plan
        told = self.agreement.of_all("ranks that reach the directory", (plan.stage, self._reaches()))
        stages: list[int] | None = [stage for stage, _ in told]
        if not all(reaches for _, reaches in told):
            lost = [rank for rank, (_, reaches) in enumerate(told) if not reaches]
            self._warn(f"{self._storage}: not reached by trainer ranks {lost}: rank 0 writes all")
            stages = None
        if stages != self._stages:
            self._stages = stages
            self._held.drop()
        return plan if stages is None else plan.share(stages, dist.get_rank())

    def _reaches(self) -> bool:
        if self._is_first:
            return True
        try:
            return self.writer is not None and self._access(partial(self._storage.has_taken, self.writer))
        except RuntimeError as error:
            logger.warning("trainer rank %s: %s", dist.get_rank(), error)
            return False

    def _warn(self, what: str) -> None:
        """Says once what all ranks know."""
        if self._is_first:
            logger.warning("%s", what)

    def open(self, version: str, plan: WeightPlan) -> None:
        self._version, self._plan = version, plan
        if not self._has_readers:
            return
        links = self.agreement.of_all("the version that each rank holds", self._held.link)
        if len({*links}) > 1:
            self._warn(f"version {version} comes whole: trainer ranks hold {links}")
            self._held.drop()
        if self._held.link is None:
            self._base = None
        self._held.begin()
        self._forget_pending()
        self._stage_part(is_whole=self._held.link is None)

    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        if self._part is None:
            return 0
        if self._held.link is None:
            whole = self._held.keep(bucket)
            sent = self._make_room(sum(tensor.nbytes for _, tensor in whole))
            self._whole += whole
        else:
            changes = self._held.changes_of(bucket)
            sent = self._make_room(sum(len(payload) for _, payload in changes.values()))
            self._changes |= changes
        if is_last:
            self._write_waiting()
        return sent

    def _make_room(self, nbytes: int) -> int:
        """Writes what waits for a file of its own if so many bytes would make it larger than a bucket."""
        if self._waiting + nbytes > self._bucket_bytes:
            self._write_waiting()
        self._waiting += nbytes
        return nbytes

    def _write_waiting(self) -> None:
        assert self._part is not None
        if self._whole:
            self._on_disk(partial(self._part.write, self._whole))
        if self._changes:
            self._on_disk(partial(self._part.write_changes, self._changes))
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._whole: NamedTensors = []
        self._changes: dict[str, tuple[Entry, bytes]] = {}
        self._waiting = 0

    def commit(self) -> None:
        if not self._has_readers:
            return
        self._publish()
        while self.agreement.on_first("bring the version to engines", self._comes_whole):
            self._write_whole()
        digests = self._digests_of_all()
        self.agreement.on_first("have engines take the version", partial(self._take_in, digests))

    def resume(self) -> None:
        if not self._has_readers:
            return
        with self.agreement.step("have engines go on"):
            self._go_on()
        with self.agreement.step("hold the version that engines have"):
            self._hold()
        self._part = self._staged = None
        if self.agreement.on_first("count changes", self._is_chain_long):
            self._write_whole()
            self.agreement.on_first("begin a chain", self._begin_chain)

    def _stage_part(self, is_whole: bool) -> None:
        """Begins what this rank writes of the version; the first one has to, before others write."""
        self._part = self._staged = None
        version, rank = int(self._version), dist.get_rank()
        if self._is_first:
            self._part = self._staged = self._on_disk(partial(self._stage_version, is_whole))
        elif rank < self._writers:
            part = self._on_disk(partial(self._storage.draft_part, version))
            self._part = StagedPart(part, self._algorithm, rank, self._writers)

    def _stage_version(self, is_whole: bool) -> StagedVersion:
        version = int(self._version)
        if is_whole or self._base is None:
            return StagedVersion(self._storage, version, self._algorithm, self._writers)
        return StagedChanges(self._storage, version, self._base, self._encoding, self._writers)

    def _publish(self) -> None:
        """Makes what all ranks have written a version."""
        with self.agreement.step("check what was written"):
            if self._part is not None:
                self._on_disk(self._part.check)
        part = None if self._part is None or self._is_first else self._part.part
        sizes = self._held.changed, self._held.change_bytes
        told = self.agreement.of_all("parts of the version", (part, *sizes))
        parts = [part for part, *_ in told if part is not None]

        def complete() -> Link:
            assert self._staged is not None
            self._changed = sum(changed for _, changed, _ in told)
            self._change_bytes = sum(nbytes for *_, nbytes in told)
            self._published = self._on_disk(partial(self._staged.complete, self._assets, parts))
            self._tell_written()
            return self._published.link

        self._link = self.agreement.on_first("publish the version", complete)

    def _write_whole(self) -> None:
        """Writes the version that is kept, with the changes that are not confirmed yet, in place of these."""
        with self.agreement.step("begin a whole version"):
            self._stage_part(is_whole=True)
        with self.agreement.step("write a whole version"):
            if self._part is not None:
                for bucket in self._held.tensors(self._bucket_bytes):
                    self._on_disk(partial(self._part.write, bucket))
        self._publish()

    def _comes_whole(self) -> bool:
        """Whether a reader cannot make use of changes; else the version is there for engines to load."""
        try:
            with self.spans.measure("fetch"):
                self._places = self._fetch()
        except EngineError as error:
            unread = error.status not in (None, CONFLICT)
            if not unread or self._published is None or self._published.base is None:
                raise
            logger.warning("version %s comes whole: %s", self._version, error)
            return True
        return False

    def _take_in(self, digests: list[dict[str, tuple[str, str]]]) -> None:
        """Engines stand still, and load the version."""
        for each in digests[: self._writers]:  # others may yet have those of an earlier update
            if self._plan is not None and self._plan.sent is not None:
                self._plan.sent.add(each)
        self._load(self._places)

    def _go_on(self) -> None:
        SessionTransport.resume(self)

    def _hold(self) -> None:
        """Moves the base on: all engines have confirmed the version."""
        self._held.move_on(self._link)
        if self._published is not None:
            base = self._base
            entries = {**({} if base is None else base.tensors), **self._published.tensors}
            self._base = replace(self._published, tensors=entries, base=None)
            self.density = 0.0 if base is None else self._changed / max(self._whole_bytes, 1)

    def _is_chain_long(self) -> bool:
        """Counts the changes; whether who comes late had better have a whole version."""
        assert self._published is not None
        if self._published.base is None:
            self._begin_chain()
        else:
            self._links += 1
            self._link_bytes += self._change_bytes
            self._remove_others()
        return self._links >= MAX_LINKS or self._link_bytes > self._whole_bytes

    @property
    def _whole_bytes(self) -> int:
        assert self._plan is not None
        return self._plan.manifest.nbytes

    def _begin_chain(self) -> None:
        """A whole version is there: nobody needs those before it."""
        self._oldest, self._links, self._link_bytes = int(self._version), 0, 0
        self._remove_others()

    def _leave(self) -> None:
        self._part = self._staged = self._given = None

    def _remove_others(self) -> None:
        if not self._keeps_files:
            kept = range(self._oldest, int(self._version) + 1)
            self._on_disk(partial(self._storage.remove_others, kept))
