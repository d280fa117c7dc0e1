"""Weights that trainer ranks send each rank of this engine, piece by piece, as they said beforehand."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.backends.embedded_engine.served_shards import ServedShards, require_float
from slime.backends.embedded_engine.tensor_ranks import tensors_of
from slime.backends.embedded_engine.weight_groups import Incoming, WeightGroups
from slime.models.blocks import Area, Block, as_matrix
from slime.models.served_layout import ServedTensor
from slime.utils.tensor_bucket import FlattenedTensorMetadata, tensor_digest
from slime.weight_sync.shards.pieces import Message, Piece

_ALIGNMENT = 64
Planned = Sequence[Sequence[Sequence[Message]]]
"""By rank of this engine and by bucket."""


class Taken(NamedTuple):
    """Numbers of a piece that become part of a weight."""

    piece: int
    weight: str
    target: Area
    source: Area


class Expected(NamedTuple):
    """A message to a rank of this engine.

    Attributes:
        start: of its bytes among those of the bucket.
        taken: what is made of it.
    """

    rank: int
    source: int
    start: int
    spans: list[FlattenedTensorMetadata]
    taken: list[Taken]

    @property
    def end(self) -> int:
        return self.start + self.spans[-1].end_idx


class Plan(NamedTuple):
    """The messages of each update over a group.

    Attributes:
        told: all of them.
        buckets: what becomes of them.
    """

    told: Planned
    buckets: list[list[Expected]]


class RankMessages:
    """What this engine was told that it will be sent, and by whom.

    Every weight is there once, whatever the number of ranks; see `ServedShards`.
    """

    def __init__(self, parameters: NamedWeights, groups: WeightGroups, tp_size: int = 1) -> None:
        self._parameters, self._groups, self._tp_size = parameters, groups, tp_size
        self._shards = ServedShards(parameters, tp_size)
        self._plans: dict[str, Plan] = {}
        self._memory = [torch.empty(0, dtype=torch.uint8)] * 2

    def plan(self, group: str, ranks: Planned) -> None:
        """Takes note of the messages of each update over a group that is joined next.

        Raises:
            BadRequest: they do not bring each rank all of its tensors once.
        """
        if len(ranks) != self._tp_size:
            raise BadRequest(f"ranks: messages for {len(ranks)} (wanted: {self._tp_size}, one per TP rank)")
        if len({len(buckets) for buckets in ranks}) > 1:
            raise BadRequest(
                f"ranks: {[len(buckets) for buckets in ranks]} buckets (wanted: as many of each)"
            )
        for rank, buckets in enumerate(ranks):
            self._require_all(rank, [piece for each in buckets for one in each for piece in one.pieces])
        expected = [self._expected(bucket) for bucket in zip(*ranks, strict=True)]
        self._plans = {name: plan for name, plan in self._plans.items() if self._groups.has(name)}
        self._plans[group] = Plan(ranks, expected)

    def receive(self, group: str) -> Iterator[set[str]]:
        """Takes in all buckets of an update, each while the next one is on its way; yields names of weights.

        Raises:
            BadRequest: no messages over this group are known.
            RuntimeError: one did not come. What came before has changed weights.
        """
        buckets, works = self._plan(group).buckets, list[dist.Work]()
        try:
            works = self._begin(group, buckets[:1], 0)
            for number, bucket in enumerate(buckets):
                while works:
                    works.pop(0).wait()
                works = self._begin(group, buckets[number + 1 : number + 2], number + 1)
                yield {name for one in bucket for name in self._copied(one, number)}
        except RuntimeError:
            works.clear()  # the traceback would keep them, and they the group's connections
            with suppress(BadRequest):
                self._groups.leave(group)  # by which all who still send learn of it
            raise

    def checksums(self, group: str) -> dict[str, Any]:
        """The checksum of each piece as the engine holds it now, by rank and name; and its format.

        Raises:
            BadRequest: no messages over this group are known.
        """
        self._parameters.require_memory()
        ranks = []
        for rank, buckets in enumerate(self._plan(group).told):
            pieces = [piece for each in buckets for one in each for piece in one.pieces]
            held, found = ("", torch.empty(0)), {}
            for piece in sorted(pieces, key=lambda one: one.tensor):
                if held[0] != piece.tensor:
                    held = piece.tensor, self._shards.held(self._shards.tensor(rank, piece.tensor))
                found[piece.name] = tensor_digest(piece.area.of(as_matrix(held[1])))
            dtype = str(self._parameters.config.dtype).removeprefix("torch.")
            place = {"tp_rank": rank, "tp_size": self._tp_size, "pp_rank": 0, "pp_size": 1}
            ranks.append(
                {"checksums": found, "dtypes": dict.fromkeys(found, dtype), "parallelism_info": [place]}
            )
        return {"ranks": ranks}

    def _plan(self, group: str) -> Plan:
        if group not in self._plans:
            raise BadRequest(f"group {group!r}: what it brings is not known (known: {sorted(self._plans)})")
        return self._plans[group]

    def _begin(self, group: str, next_one: Sequence[Sequence[Expected]], number: int) -> list[dist.Work]:
        """Begins to receive a bucket of this number, if there is one."""
        messages, turn = [one for bucket in next_one for one in bucket], number % 2
        size = max((one.end for one in messages), default=0)
        device = self._groups.device(group)
        if self._memory[turn].numel() < size or self._memory[turn].device != device:
            self._memory[turn] = torch.empty(size, dtype=torch.uint8, device=device)
        memory = self._memory[turn]
        return self._groups.begin_receiving(
            group, [Incoming(one.rank, one.source, memory[one.start : one.end]) for one in messages]
        )

    @torch.no_grad()
    def _copied(self, one: Expected, number: int) -> Iterator[str]:
        """Copies in what has come; yields the names of weights."""
        pieces = tensors_of(self._memory[number % 2][one.start : one.end], one.spans)
        for taken in one.taken:
            target = taken.target.of(as_matrix(self._parameters.named[taken.weight]))
            target.copy_(taken.source.of(pieces[taken.piece][1]))
            yield taken.weight

    def _require_all(self, rank: int, pieces: Sequence[Piece]) -> None:
        sizes = Counter[str]()
        for piece in pieces:
            require_float(piece.tensor, piece.dtype)
            _block_of(self._shards.tensor(rank, piece.tensor), piece.area)
            sizes[piece.tensor] += piece.area.size
        for name in self._shards.names(rank):
            wanted = sum(block.area.size for block in self._shards.tensor(rank, name).blocks)
            if sizes[name] != wanted:
                raise BadRequest(f"TP rank {rank}: tensor {name!r}: {sizes[name]} numbers (wanted: {wanted})")

    def _expected(self, bucket: Sequence[Sequence[Message]]) -> list[Expected]:
        found: list[Expected] = []
        for rank, messages in enumerate(bucket):
            for message in messages:
                start = -(-found[-1].end // _ALIGNMENT) * _ALIGNMENT if found else 0
                taken = [*self._taken(rank, message)]
                found.append(Expected(rank, message.source, start, message.spans(), taken))
        return found

    def _taken(self, rank: int, message: Message) -> Iterator[Taken]:
        """What becomes of a message: nothing of what another rank gives."""
        for number, piece in enumerate(message.pieces):
            block = _block_of(self._shards.tensor(rank, piece.tensor), piece.area)
            came = block.origin(piece.area)
            target = came.common(self._shards.given(rank, block))
            if target is not None:
                yield Taken(number, block.name, target, Block(block.name, came, 0).place(target))


def _block_of(tensor: ServedTensor, area: Area) -> Block:
    """The block that an area of a tensor is of.

    Raises:
        BadRequest: it is of none, or of several.
    """
    for block in tensor.blocks:
        if area.size and block.place(block.area).common(area) == area:
            return block
    raise BadRequest(f"tensor {tensor.name!r}: {area} is no part of a weight (its shape: {tensor.shape})")
