"""Pieces of the tensors of engine ranks as a source of weights: each trainer rank has those that it sends."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import torch.distributed as dist

from slime.models.blocks import as_matrix
from slime.training.weights import HeldTensor, NamedTensors, ShardedWeights, TensorInfo
from slime.utils.types import EngineEndpoint
from slime.weight_sync.shards.layouts import EngineRank, Layouts
from slime.weight_sync.shards.moves import Move, Sources
from slime.weight_sync.shards.pieces import Message, Piece, label

Copy = tuple[int, ...]
"""The trainer ranks that together hold all weights."""


class Kind(NamedTuple):
    """What ranks of engines have in common that are sent the same by the same trainer ranks."""

    copy: int
    place: EngineRank


class OutgoingPieces:
    """Weights that go straight from the trainer ranks that hold them to the engine ranks that keep them.

    Copies of the model take engines in turns. Who sends what is decided once, when engines are connected.

    Attributes:
        kinds: of the ranks of the engines, in their order.
    """

    def __init__(self, weights: ShardedWeights, timeout: timedelta) -> None:
        self._weights, self._timeout = weights, timeout
        self.ranks = weights.ranks
        self._held: tuple[list[Copy], list[list[HeldTensor]]] | None = None
        self._forget()

    def _forget(self) -> None:
        self._places: list[tuple[int, EngineRank]] = []
        self.kinds: list[int] = []
        self._layouts: Layouts | None = None
        self._moves: list[dict[str, list[Move]]] = []
        self._names: dict[int, list[list[str]]] = {}

    @property
    def rounding(self) -> float:
        return self._weights.rounding

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Decides who sends what to these engines. Collective on all trainer ranks.

        Raises:
            ValueError: numbers of the trainer's go to no engine rank, or one of these wants some that nobody
                has; or how such engines hold the model is not known.
        """
        places = [
            (number, EngineRank(rank, endpoint.num_gpus))
            for number, endpoint in enumerate(endpoints)
            for rank in range(endpoint.num_gpus)
        ]
        if places != self._places:
            self._forget()
            if places:
                self._plan(places)
            self._places = places

    def disconnect(self) -> None:
        """Forgets the engines. It can be connected again."""
        self._forget()

    def manifest(self) -> list[TensorInfo]:
        """The pieces that this rank sends, by their `label`."""
        return [
            TensorInfo(label(kind, piece), (len(piece.area.rows), len(piece.area.columns)), piece.dtype)
            for kind in range(len(self._moves))
            for piece, _ in self._sent(kind, self._moves[kind], dist.get_rank())
        ]

    def buckets(self, max_bytes: int) -> Iterator[NamedTensors]:
        """What this rank sends of each bucket, by kind: views of what it holds, or nothing."""
        part, own = cache(self._weights.parts()), dist.get_rank()
        for names in self._bucketed(max_bytes):
            yield [
                (label(kind, piece), move.taken.of(as_matrix(part(move.held))).detach())
                for kind in range(len(self._moves))
                for piece, move in self._sent(kind, names, own)
            ]

    def messages(self, kind: int, max_bytes: int) -> list[list[Message]]:
        """What an engine's rank of a kind gets of each bucket; without those who send it nothing."""
        found = []
        for names in self._bucketed(max_bytes):
            sources = sorted({move.source for name in names for move in self._moves[kind][name]})
            found.append(
                [
                    Message(source, tuple(piece for piece, _ in self._sent(kind, names, source)))
                    for source in sources
                ]
            )
        return found

    def _sent(self, kind: int, names: Iterable[str], source: int) -> list[tuple[Piece, Move]]:
        """Wide formats first, so that each piece of a message is aligned to its own."""
        moves, dtypes = self._moves[kind], self._known.dtypes
        sent = [
            (Piece(name, dtypes[move.name], move.placed), move)
            for name in names
            for move in moves[name]
            if move.source == source
        ]
        return sorted(sent, key=lambda one: -one[0].dtype.itemsize)

    @property
    def _known(self) -> Layouts:
        assert self._layouts is not None, "engines are connected first"
        return self._layouts

    def _bucketed(self, max_bytes: int) -> list[list[str]]:
        """Names of buckets in which nobody receives more than that, and nobody sends more different bytes."""
        if not self._moves:
            return []
        if max_bytes not in self._names:
            sizes: dict[int, dict[str, int]] = {}
            for moves in self._moves:
                for name, each in moves.items():
                    for move in each:
                        sent = sizes.setdefault(move.source, {})
                        size = move.taken.size * self._known.dtypes[move.name].itemsize
                        sent[name] = sent.get(name, 0) + size
            self._names[max_bytes] = list(self._known.bucketed(max_bytes, [*sizes.values()]))
        return self._names[max_bytes]

    def _plan(self, places: Sequence[tuple[int, EngineRank]]) -> None:
        layouts = self._layouts = Layouts(self._weights, (place.size for _, place in places))
        copies, held = self._gathered()
        sources = [Sources({rank: held[rank] for rank in copy}) for copy in copies]
        kinds: dict[Kind, int] = {}
        for number, place in places:
            kind = Kind(_copy_for(number, place, copies), place)
            if kind not in kinds:
                copy = copies[kind.copy]
                giver = copy[place.rank % len(copy)]
                moves = {one.name: sources[kind.copy].moves(giver, one) for one in layouts.of(place)}
                kinds[kind] = len(self._moves)
                self._moves.append(moves)
            self.kinds.append(kinds[kind])

    def _gathered(self) -> tuple[list[Copy], list[list[HeldTensor]]]:
        """The copies of the model, and what each rank holds, which stays so."""
        if self._held is None:
            own: tuple[Copy, list[HeldTensor]] = (tuple(sorted(self.ranks)), list(self._weights.held()))
            of_ranks = [own] * dist.get_world_size()
            if len(of_ranks) > 1:
                meeting = dist.new_group(backend="gloo", timeout=self._timeout)
                dist.all_gather_object(of_ranks, own, group=meeting)
                dist.destroy_process_group(meeting)
            self._held = sorted({copy for copy, _ in of_ranks}), [held for _, held in of_ranks]
        return self._held


def _copy_for(number: int, place: EngineRank, copies: Sequence[Copy]) -> int:
    """The copy that sends to a rank of an engine: one to each engine in turn, several to a larger one."""
    ranks = len(copies[0])
    return (number * max(place.size // ranks, 1) + place.rank // ranks) % len(copies)
