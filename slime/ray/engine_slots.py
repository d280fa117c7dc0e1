"""Which GPUs each engine takes, from the models and the order of slots alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime.config.served_models import PLACEHOLDER, ServedModelConfig, ServerGroupConfig
from slime.ray.placement_group import Slots


class EngineSplit(RuntimeError):
    """The GPUs of an engine are not where one server can have them."""


@dataclass(frozen=True)
class GroupPlace:
    """A group of engines among all slots and engines of the run.

    Attributes:
        spare: whether none of them is started with the run.
    """

    model: ServedModelConfig
    group: ServerGroupConfig
    first_slot: int
    first_rank: int
    spare: bool = False


def group_places(models: Sequence[ServedModelConfig], spare_gpus: int | None = None) -> Iterator[GroupPlace]:
    """Groups take slots and ranks one after the other; placeholders take slots alone.

    Args:
        spare_gpus: after all others, for more engines like the first ones of the first model.
    """
    slot = rank = 0
    for model in models:
        for group in model.server_groups:
            if group.worker_type != PLACEHOLDER:
                yield GroupPlace(model, group, slot, rank)
            slot, rank = slot + group.num_gpus, rank + group.num_engines
    if spare_gpus:
        group = replace(spare_group(models[0]), num_gpus=spare_gpus)
        yield GroupPlace(models[0], group, slot, rank, spare=True)


def spare_group(model: ServedModelConfig) -> ServerGroupConfig:
    """The group like which the engines are that take spare GPUs."""
    return next(group for group in model.server_groups if group.worker_type != PLACEHOLDER)


def require_neighbours(
    models: Sequence[ServedModelConfig], slots: Slots, gpus_per_node: int, spare_gpus: int | None = None
) -> None:
    """A server takes consecutive GPUs of a node, by their first; one over several nodes does so on each.

    Raises:
        EngineSplit: names the engine, and where its GPUs are.
    """
    for place in group_places(models, spare_gpus):
        size = place.group.size
        for number in range(place.group.num_engines):
            first = place.first_slot + number * size
            for start in range(first, first + size, gpus_per_node):
                part = range(start, min(start + gpus_per_node, first + size))
                if not _are_neighbours(slots, part):
                    raise EngineSplit(_message(place, number, slots, range(first, first + size)))


def _are_neighbours(slots: Slots, part: range) -> bool:
    ids = [slots.gpu_ids[slot] for slot in part]
    one_node = len({slots.nodes[slot] for slot in part}) == 1
    return one_node and ids == list(range(ids[0], ids[0] + len(ids)))


def _message(place: GroupPlace, number: int, slots: Slots, taken: range) -> str:
    nodes = list(dict.fromkeys(slots.nodes))
    found = ", ".join(f"{slots.gpu_ids[slot]} of node {nodes.index(slots.nodes[slot])}" for slot in taken)
    return (
        f"engine {place.first_rank + number} of model {place.model.name} would get the GPUs {found} "
        "(wanted: consecutive ones of a node; see --num-gpus-per-node, and which GPUs others have)"
    )
