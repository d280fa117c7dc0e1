"""A store's groups, as a generator wants them judged and changed."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from slime_plugins.rollout_buffer.store import Group, Item, Store

LARGEST_FACTOR = 64
"""Times the group size: no group gets larger that is not valid yet."""


class GroupTooLarge(ValueError):
    """A group has many times its size, and its generator does not want it given out."""


class BufferQueue:
    """Groups by ``instance_id``; one thread at a time.

    Args:
        is_valid_group: whether a group can be given out; by default if it has ``group_size`` items. Asked
            with each item that comes.
        transform_group: what a group becomes when it is given out.
        meta_of: what is said about the groups that are given out.
        store: where they are; by default in a file that ends with the queue.
    """

    def __init__(
        self,
        group_size: int,
        is_valid_group: Callable[[Group, int], bool] | None = None,
        transform_group: Callable[[Group], Group] | None = None,
        meta_of: Callable[[dict[str, Group]], dict[str, Any]] | None = None,
        store: Store | None = None,
    ) -> None:
        self._group_size = group_size
        self._is_valid = is_valid_group
        self._transform = transform_group or (lambda group: group)
        self._meta_of = meta_of or describe_groups
        self._store = store or self._own_store()

    def _own_store(self) -> Store:
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-buffer-")
        store = Store(Path(self._folder.name) / "buffer.sqlite")
        store.begin_run("", self._group_size)
        return store

    def append(self, item: Item) -> bool:
        """Whether the item is new: one that is sent twice, as after a lost answer, counts once.

        Raises:
            UidTaken, BufferFull: as `Store.add`.
            GroupTooLarge: the group would grow for ever.
        """
        with self._store.transaction():
            if self._is_valid is None:
                return self._store.add(item, self._group_size).new
            added = self._store.add(item)
            if added.new and self._is_valid(self._store.group(added.group_id), self._group_size):
                self._store.complete(added.group_id)
            elif added.size > LARGEST_FACTOR * self._group_size:
                raise GroupTooLarge(
                    f"group {item['instance_id']}: {added.size} trajectories, and is_valid_group says no "
                    f"(wanted: that it does by {LARGEST_FACTOR} times the group size of {self._group_size})"
                )
            return added.new

    def take(
        self, most: int | None = None, lease: str | None = None, seconds: float = 0.0
    ) -> tuple[dict[str, Group], dict[str, Any]]:
        """Complete groups, as `Store.take` gives them out, and what is to be said of them."""
        with self._store.transaction():
            groups = self._store.take(most, lease, seconds)
            changed = {name: self._transform(group) for name, group in groups.items()}
            return changed, self._meta_of(changed)

    def clear(self) -> None:
        """Give out nothing of what was written before."""
        run = self._store.current()
        self._store.begin_run(run.task_type, run.group_size)


def describe_groups(groups: dict[str, Group]) -> dict[str, Any]:
    """Counts, the mean reward, and the names of the groups."""
    rewards = [item["reward"] for group in groups.values() for item in group]
    return {
        "total_samples": len(rewards),
        "num_groups": len(groups),
        "avg_group_size": len(rewards) / len(groups) if groups else 0.0,
        "avg_reward": fmean(rewards) if rewards else 0.0,
        "finished_groups": list(groups),
    }
