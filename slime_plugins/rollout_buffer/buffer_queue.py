"""Trajectories, sorted into groups until a group is complete."""

import threading
from collections.abc import Callable
from statistics import fmean
from typing import Any

Item = dict[str, Any]
"""uid, instance_id, messages, reward, extra_info."""

Group = list[Item]


class BufferQueue:
    """Groups by ``instance_id``; every method may be called from any thread.

    Args:
        is_valid_group: whether a group can be given out; by default if it has ``group_size`` items.
        transform_group: what a group becomes when it is given out.
        meta_of: what is said about the groups that are given out.
    """

    def __init__(
        self,
        group_size: int,
        is_valid_group: Callable[[Group, int], bool] | None = None,
        transform_group: Callable[[Group], Group] | None = None,
        meta_of: Callable[[dict[str, Group]], dict[str, Any]] | None = None,
    ) -> None:
        self._group_size = group_size
        self._is_valid = is_valid_group or (lambda group, size: len(group) >= size)
        self._transform = transform_group or (lambda group: group)
        self._meta_of = meta_of or describe_groups
        self._groups: dict[str, Group] = {}
        self._uids: set[str] = set()
        self._lock = threading.Lock()

    def append(self, item: Item) -> bool:
        """Whether the item is new: one that is sent twice, as after a lost answer, counts once."""
        with self._lock:
            if item["uid"] in self._uids:
                return False
            self._uids.add(item["uid"])
            self._groups.setdefault(item["instance_id"], []).append(item)
            return True

    def take(self) -> tuple[dict[str, Group], dict[str, Any]]:
        """The groups that are complete, which leave the queue, and what is to be said of them."""
        with self._lock:
            ready = [key for key, group in self._groups.items() if self._is_valid(group, self._group_size)]
            groups = {key: self._transform(self._groups.pop(key)) for key in ready}
        return groups, self._meta_of(groups)

    def clear(self) -> None:
        """Forget what belongs to an earlier start."""
        with self._lock:
            self._groups.clear()
            self._uids.clear()


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
