"""Which numbers of which trainer rank make up the tensors of which engine rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slime.models.blocks import Area, Block, whole
from slime.models.served_layout import ServedTensor
from slime.training.weights import HeldTensor

Shape = tuple[int, ...]


class Move(NamedTuple):
    """Numbers of a trainer rank's parameter that become part of a tensor of an engine's rank.

    Attributes:
        source: the trainer rank.
        held: its parameter.
        taken: of that.
        placed: where in the engine's tensor.
        name: of the checkpoint's tensor that they are of.
    """

    source: int
    held: str
    taken: Area
    placed: Area
    name: str


class Sources:
    """Who holds what of the tensors of a checkpoint.

    Args:
        held: by trainer rank, of those that together hold all of them.
    """

    def __init__(self, held: Mapping[int, Sequence[HeldTensor]]) -> None:
        self._places = {rank: place for place, rank in enumerate(sorted(held))}
        self._by_name: dict[str, dict[int, list[tuple[str, Block]]]] = {}
        for rank, tensors in held.items():
            for tensor in tensors:
                for block in tensor.blocks:
                    of_rank = self._by_name.setdefault(block.name, {}).setdefault(rank, [])
                    of_rank.append((tensor.name, block))

    def moves(self, giver: int, tensor: ServedTensor) -> list[Move]:
        """What makes up a tensor that trainer rank ``giver`` hands over: its own numbers where it has them.

        Raises:
            ValueError: nobody has some of them, or the tensor is not full.
        """
        tensor.require_full()
        return [move for block in tensor.blocks for move in self._of_block(giver, tensor.name, block)]

    def _of_block(self, giver: int, tensor: str, block: Block) -> Iterator[Move]:
        left = [block.area]
        for rank, held, has in self._nearest(giver, block.name):
            still: list[Area] = []
            for area in left:
                common = area.common(has.area)
                if common is None:
                    still.append(area)
                    continue
                yield Move(rank, held, has.place(common), block.place(common), block.name)
                still += area.without(common)
            left = still
            if not left:
                return
        rows, columns = left[0]
        raise ValueError(
            f"engine tensor {tensor!r}: no trainer rank holds rows {rows.start} to {rows.stop}, columns "
            f"{columns.start} to {columns.stop}, of {block.name!r}"
        )

    def _nearest(self, giver: int, name: str) -> Iterator[tuple[int, str, Block]]:
        """The parts of a tensor that ranks hold, the giver first, then those that come after it."""
        holders, first = self._by_name.get(name, {}), self._places[giver]
        for rank in sorted(holders, key=lambda rank: (self._places[rank] - first) % len(self._places)):
            for held, block in holders[rank]:
                yield rank, held, block


def require_all_served(shapes: Mapping[str, Shape], ranks: Sequence[Sequence[ServedTensor]]) -> None:
    """Holds what the trainer has against what the ranks of an engine are to get.

    Raises:
        ValueError: a part of a tensor goes nowhere, or the engine wants one that there is not.
    """
    areas: dict[str, set[Area]] = {}
    for tensors in ranks:
        for tensor in tensors:
            for block in tensor.blocks:
                areas.setdefault(block.name, set()).add(block.area)
    if unknown := sorted(areas.keys() - shapes.keys()):
        raise ValueError(f"weight {unknown[0]!r}: engines hold it, and the trainer has none of that name")
    for name, shape in shapes.items():
        found, wanted = sum(area.size for area in areas.get(name, ())), whole(shape).size
        if found != wanted:
            raise ValueError(f"weight {name!r}: {found} numbers of it go to engines (wanted: all {wanted})")
