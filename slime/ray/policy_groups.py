"""The trainers of several policies as the loop sees them: one."""

from collections.abc import Mapping, Sequence
from itertools import islice, zip_longest

import ray

from slime.ray.train_group import RayTrainGroup, RoleOutputs


class PolicyGroups:
    """Does what `RayTrainGroup` does, with the trainers of all policies.

    They train side by side, and send their weights one after the other. Where ranks are lost the trainers of
    all are built again, from an iteration that all have saved.

    Args:
        groups: by the names of the policies.
    """

    def __init__(self, groups: Mapping[str, RayTrainGroup]) -> None:
        self._groups = groups

    @property
    def groups(self) -> list[RayTrainGroup]:
        return [*self._groups.values()]

    def wait_ready(self) -> None:
        """Waits until every trainer has loaded its model.

        Raises:
            RuntimeError: they go on from different iterations.
        """
        for group in self._groups.values():
            group.wait_ready()
        starts = {name: group.start_rollout_id for name, group in self._groups.items()}
        if len({*starts.values()}) > 1:
            told = ", ".join(f"{name} with rollout {start}" for name, start in starts.items())
            raise RuntimeError(f"--policies: they go on with different rollouts: {told}")

    @property
    def start_rollout_id(self) -> int:
        return next(iter(self._groups.values())).start_rollout_id

    def train(
        self, rollout_id: int, data_refs: Sequence[ray.ObjectRef], inputs: RoleOutputs | None = None
    ) -> RoleOutputs:
        """Trains each policy on its samples of one rollout.

        Args:
            data_refs: the train shards of one policy after the other.
            inputs: of other roles, of which there are none.
        """
        shards, begun = iter(data_refs), list[list[ray.ObjectRef]]()
        for group in self._groups.values():
            begun.append(group.begin_training(rollout_id, [*islice(shards, group.shards)], None))
        for group, refs in zip(self._groups.values(), begun, strict=True):
            group.end_training(rollout_id, refs)
        return []

    def try_to_save(self, rollout_id: int, force_sync: bool = False) -> list[str | None]:
        """Saves all; of each save whose end is known the first reason why a policy's failed."""
        outcomes = [
            [reason and f"{name}: {reason}" for reason in group.try_to_save(rollout_id, force_sync)]
            for name, group in self._groups.items()
        ]
        return [next(filter(None, of_one), None) for of_one in zip_longest(*outcomes)]

    def update_weights(self) -> None:
        for group in self._groups.values():
            group.update_weights()

    def onload(self) -> None:
        for group in self._groups.values():
            group.onload()

    def offload_training_state(self) -> None:
        for group in self._groups.values():
            group.offload_training_state()

    def offload(self) -> None:
        for group in self._groups.values():
            group.offload()

    def shutdown(self) -> None:
        for group in self._groups.values():
            group.shutdown()
