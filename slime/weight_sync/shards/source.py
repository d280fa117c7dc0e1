"""The tensors of engine ranks as a source of weights: each trainer rank has those of the one before it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from slime.models.blocks import as_matrix, matrix_size
from slime.models.served_layout import ServedTensor
from slime.training.weights import HeldTensor, NamedTensors, ShardedWeights, TensorInfo
from slime.utils.accelerator import local_device, process_group_backend
from slime.utils.types import EngineEndpoint
from slime.weight_sync.shards.exchange import Exchange, Part, Told
from slime.weight_sync.shards.layouts import EngineRank, Layouts
from slime.weight_sync.shards.moves import Move, Sources

_ALIGNMENT = 64


class Bucket(NamedTuple):
    """What this rank hands over at once, and the messages before."""

    tensors: Sequence[ServedTensor]
    exchange: Exchange


class EngineShards:
    """Weights under the names that SGLang's ranks have for them, whole for the one that is before this rank.

    A number that this rank does not hold comes from one of the same copy of the model that does. Who sends
    what is decided once, when engines are connected.
    """

    def __init__(self, weights: ShardedWeights, timeout: timedelta) -> None:
        self._weights, self._timeout = weights, timeout
        self.ranks = weights.ranks
        self._group: dist.ProcessGroup | None = None
        self._has_joined = False
        self._forget()

    def _forget(self) -> None:
        self._places: dict[int, EngineRank] = {}
        self._tensors: list[ServedTensor] = []
        self._moves: dict[int, dict[str, list[Move]]] = {}
        self._as_held: dict[str, str] = {}
        self._layouts: Layouts | None = None
        self._buckets: dict[int, list[Bucket]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @property
    def rounding(self) -> float:
        return self._weights.rounding

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Decides who sends what to these engines. Collective on all trainer ranks.

        Raises:
            ValueError: numbers of the trainer's go to no engine rank, or one of these wants some that nobody
                has; or how such engines hold the model is not known.
        """
        places = {
            (endpoint.gpu_offset or 0) + rank: EngineRank(rank, endpoint.num_gpus)
            for endpoint in endpoints
            for rank in range(endpoint.num_gpus)
        }
        if places != self._places:
            self._forget()
            self._plan(places)
            self._places = places

    def disconnect(self) -> None:
        """Leaves the group of the copy. It can be connected again."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group, self._has_joined = None, False
        self._forget()

    @property
    def _known(self) -> Layouts:
        assert self._layouts is not None, "engines are connected first"
        return self._layouts

    def manifest(self) -> list[TensorInfo]:
        return [TensorInfo(one.name, one.shape, self._known.dtype(one)) for one in self._tensors]

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """Buckets of the same names on every rank, and empty ones where no engine's is before it.

        The largest engine rank's part of a bucket has at most ``max_bytes``. It is valid until the next one.
        """
        if max_bytes not in self._buckets:
            self._buckets[max_bytes] = [self._bucket(names) for names in self._known.bucketed(max_bytes)]
        part = self._weights.parts()
        for bucket in self._buckets[max_bytes]:
            yield self._filled(bucket, cache(part))

    @torch.no_grad()
    def _filled(self, bucket: Bucket, part: Part) -> NamedTensors:
        came = bucket.exchange.run(part, self._group, _device())
        made = [one for one in bucket.tensors if one.name not in self._as_held]
        rooms = dict(zip((one.name for one in made), self._rooms(made), strict=True))
        pairs = []
        for one in bucket.tensors:
            if one.name in rooms:
                self._fill(rooms[one.name], one, came, part)
                pairs.append((one.name, rooms[one.name]))
            else:
                pairs.append((one.name, part(self._as_held[one.name]).view(one.shape)))
        # Wide formats first, so that each tensor of a flat bucket is aligned to its own.
        return sorted(pairs, key=lambda pair: -pair[1].dtype.itemsize)

    def _fill(
        self, target: torch.Tensor, one: ServedTensor, came: Mapping[Move, torch.Tensor], part: Part
    ) -> None:
        matrix = as_matrix(target)
        matrix[len(matrix) - one.padding :].zero_()
        for move in self._moves[dist.get_rank()][one.name]:
            piece = came[move] if move in came else move.taken.of(as_matrix(part(move.held)))
            move.placed.of(matrix).copy_(piece)

    def _rooms(self, tensors: Sequence[ServedTensor]) -> Iterator[torch.Tensor]:
        """Memory for these tensors. On the host it is kept: touching fresh pages costs more than a copy."""
        ends = [0]
        for one in tensors:
            ends.append(ends[-1] + -(-self._known.nbytes(one) // _ALIGNMENT) * _ALIGNMENT)
        memory = self._scratch
        if memory.numel() < ends[-1]:
            memory = self._scratch = torch.empty(0, dtype=torch.uint8)  # or there would be both for a while
            memory = torch.empty(ends[-1], dtype=torch.uint8, device=_device())
            self._scratch = memory if memory.is_cpu else self._scratch
        for start, one in zip(ends, tensors, strict=False):
            yield memory[start : start + self._known.nbytes(one)].view(self._known.dtype(one)).view(one.shape)

    def _plan(self, places: Mapping[int, EngineRank]) -> None:
        layouts = self._layouts = Layouts(self._weights, (place.size for place in places.values()))
        held = self._of_copy(list(self._weights.held()))
        sources, own = Sources(held), dist.get_rank()
        self._moves = {
            rank: {one.name: sources.moves(rank, one) for one in layouts.of(places[rank])}
            for rank in sorted(held)
            if rank in places
        }
        if own in places:
            self._tensors = list(layouts.of(places[own]))
            of_name = {tensor.name: tensor for tensor in held[own]}
            for one in self._tensors:
                if (same := _same(one, self._moves[own][one.name], own, of_name)) is not None:
                    self._as_held[one.name] = same

    def _of_copy(self, own: list[HeldTensor]) -> dict[int, list[HeldTensor]]:
        """What each rank of this copy of the model holds."""
        if not self._has_joined:
            self._group, self._has_joined = self._join(), True
        ranks = sorted(self.ranks)
        if self._group is None:
            return {dist.get_rank(): own}
        of_ranks: list[list[HeldTensor]] = [own] * len(ranks)
        dist.all_gather_object(of_ranks, own, group=self._group)
        return dict(zip(ranks, of_ranks, strict=True))

    def _join(self) -> dist.ProcessGroup | None:
        """The group of this copy; None for a copy of one rank."""
        if dist.get_world_size() == 1:
            return None
        meeting = dist.new_group(backend="gloo", timeout=self._timeout)
        copies: list[tuple[int, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(copies, tuple(sorted(self.ranks)), group=meeting)
        dist.destroy_process_group(meeting)
        own = None
        for ranks in sorted({ranks for ranks in copies if len(ranks) > 1}):
            # Collective on all ranks, members or not.
            group = dist.new_group(list(ranks), backend=process_group_backend(), timeout=self._timeout)
            own = group if dist.get_rank() in ranks else own
        return own

    def _bucket(self, names: Sequence[str]) -> Bucket:
        own = dist.get_rank()
        receives = _by_rank(
            (move.source, move) for name in names for move in self._moves.get(own, {}).get(name, ())
        )
        sends = _by_rank(
            (giver, move)
            for giver, moves in self._moves.items()
            for name in names
            for move in moves[name]
            if move.source == own
        )
        wanted = {*names}
        tensors = [one for one in self._tensors if one.name in wanted]
        sends, receives = ([told for told in each if told.peer != own] for each in (sends, receives))
        return Bucket(tensors, Exchange(sends, receives, self._known.dtypes))


def _same(one: ServedTensor, moves: Sequence[Move], rank: int, held: Mapping[str, HeldTensor]) -> str | None:
    """The parameter of a rank that is an engine's tensor as it lies."""
    names = {move.held for move in moves}
    own = all(move.source == rank and move.taken == move.placed for move in moves)
    if not own or one.padding or len(names) != 1:
        return None
    (name,) = names
    return name if matrix_size(held[name].shape) == matrix_size(one.shape) else None


def _by_rank(moves: Iterator[tuple[int, Move]]) -> list[Told]:
    """Moves to or from each rank, their order kept."""
    found: dict[int, list[Move]] = {}
    for rank, move in moves:
        found.setdefault(rank, []).append(move)
    return [Told(rank, found[rank]) for rank in sorted(found)]


def _device() -> torch.device:
    return local_device(int(os.environ.get("LOCAL_RANK", "0")))
