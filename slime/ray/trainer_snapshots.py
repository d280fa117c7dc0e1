"""Snapshots of the trainer's state in its hosts' memory, from which lost ranks are built again.

    <--trainer-snapshot-dir>/slime_snapshots_9f3a17c2_4711_x3k/actor/iter_0000007/   as one of --save

They are checkpoints in every respect but their place, which outlives the ranks and not the run. The position
in the data that belongs to each is kept by the driver.
"""

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.cluster import snapshots_are_on_hosts
from slime.processes.memory_directory import memory_directory
from slime.ray.ending import CannotStart
from slime.ray.snapshot_place import PREFIX, is_on_hosts, place_on_hosts
from slime.utils.misc import should_run_periodic_action as is_due

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from slime.config.run import RunConfig
    from slime.ray.policy_groups import PolicyGroups
    from slime.ray.rollout_group import RolloutGroup
    from slime.ray.snapshot_store import SnapshotStore
    from slime.ray.train_group import RayTrainGroup

logger = logging.getLogger(__name__)


@contextmanager
def snapshot_directory(config: "RunConfig") -> Iterator[str | None]:
    """The run's own directory of snapshots, which goes with the run; None if it takes none.

    Where each host has its own it is made there later.

    Raises:
        CannotStart: there is no room for them.
        DirectoryUnusable: nothing can be written there.
    """
    flags = config.fault_tolerance
    if flags.trainer_snapshot_interval is None:
        yield None
        return
    parent = Path(flags.trainer_snapshot_dir)
    if snapshots_are_on_hosts(flags, config.cluster.actor_num_nodes):
        yield place_on_hosts(parent, secrets.token_hex(4))
        return
    with memory_directory(parent, PREFIX, f"--trainer-snapshot-dir {parent}") as directory:
        if reason := lacks_room(config):
            raise CannotStart(reason)
        yield str(directory)


def lacks_room(config: "RunConfig") -> str | None:
    """Why the snapshots of all that a run trains cannot be kept where flags ask for it."""
    from slime.check import snapshots_lack_room
    from slime.check.needs import trained_roles
    from slime.ray.policies import policy_configs

    roles = [role for own in policy_configs(config).values() for role in trained_roles(own)]
    return snapshots_lack_room(config, roles)


class TrainerSnapshots:
    """Takes snapshots of all roles of a run, and knows the newest that is whole of all.

    Without `--trainer-snapshot-interval` it does nothing.

    Attributes:
        places: where those of each group of ranks are.
    """

    def __init__(
        self,
        config: "RunConfig",
        actor: "RayTrainGroup | PolicyGroups",
        critic: "RayTrainGroup",
        rollout: "RolloutGroup",
    ) -> None:
        flags = config.fault_tolerance
        self._interval, self._rollout = flags.trainer_snapshot_interval, rollout
        self._positions: dict[int, Any] = {}
        self._taking = False
        self._told = False
        self.places: dict[RayTrainGroup, Path] = {}
        if flags.trainer_snapshots is None:
            return
        root = Path(flags.trainer_snapshots)
        if config.critic.use_critic:
            self.places[critic] = root / "critic"
        for name, group in _by_name(actor).items():
            self.places[group] = root / name
        self._store = _store(config, root, self.places)

    def begin(self, rollout_id: int) -> None:
        """Comes before the roles train on a rollout: whether `take` is to follow, of all or of none."""
        self._taking = bool(self.places) and is_due(rollout_id, self._interval)
        if not self._taking:
            return
        number, position = self._rollout.position
        if position is None or number != rollout_id:
            self._taking = False
            self._tell("the data source does not tell its state, so that ranks could not go on from them")
            return
        if reason := self._store.make_room():
            self._taking = False
            self._tell(reason)
            return
        self._positions[rollout_id] = position

    def take(self, rollout_id: int, role: "RayTrainGroup | PolicyGroups") -> None:
        """Writes the snapshot of a role that has trained. One that fails is told of, and ends nothing."""
        if not self._taking:
            return
        for group in _by_name(role).values():
            reasons = self._store.write(group, rollout_id)
            for reason in reasons:
                self._tell(reason)
            self._told = bool(reasons)
        kept = self._store.kept()
        self._positions = {number: state for number, state in self._positions.items() if number in kept}

    def newest(self) -> int | None:
        """The iteration of the newest snapshot that is whole of all roles, if there is one."""
        return self._store.newest(self._positions) if self.places else None

    def bring(self, iteration: int) -> None:
        """Puts a snapshot where ranks are to load it.

        Raises:
            ValueError: that is not possible.
        """
        self._store.bring(iteration)

    def position(self, iteration: int) -> Any:
        """Where the data was after that rollout."""
        return self._positions[iteration]

    def go_back(self, iteration: int) -> None:
        """Forgets the snapshots after an iteration: they are of steps that are taken again."""
        if self.places:
            self._store.go_back(iteration)
        self._positions = {number: state for number, state in self._positions.items() if number <= iteration}

    def discard(self) -> None:
        """Forgets all, which cannot be loaded."""
        if self.places:
            self._store.discard()
        self._positions = {}

    def _tell(self, reason: str) -> None:
        """Says that lost ranks would start again from something older, once until the next snapshot."""
        if not self._told:
            told = "no snapshot in memory, lost ranks would go on from an older one or from a checkpoint: %s"
            logger.warning(told, reason)
        self._told = True


def _store(config: "RunConfig", root: Path, places: "Mapping[RayTrainGroup, Path]") -> "SnapshotStore":
    from slime.ray.host_snapshots import OnHosts
    from slime.ray.snapshot_store import OneDirectory

    if is_on_hosts(root):
        return OnHosts(config, {group: place.name for group, place in places.items()})
    return OneDirectory(root, places, config.checkpoints.verify_checkpoint)


def _by_name(role: "RayTrainGroup | PolicyGroups") -> "Mapping[str, RayTrainGroup]":
    from slime.ray.policy_groups import PolicyGroups

    if not isinstance(role, PolicyGroups):
        return {"actor": role}
    return {f"actor_{number}": group for number, group in enumerate(role.groups)}
