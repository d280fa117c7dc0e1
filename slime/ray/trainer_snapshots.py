"""Snapshots of the trainer's state in its host's memory, from which lost ranks are built again.

    <--trainer-snapshot-dir>/slime_snapshots_4711_x3k/actor/iter_0000007/     as a checkpoint of --save

They are checkpoints in every respect but their place, which outlives the ranks and not the run. The position
in the data that belongs to each is kept by the driver.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.arguments.validate.checkpoint_files import CHECKPOINT_MARKER, marked_iteration, newest_of_all
from slime.config.limits import FREE
from slime.processes.memory_directory import memory_directory
from slime.ray.ending import CannotStart
from slime.utils.checkpoint_record import iterations, remove_older
from slime.utils.misc import should_run_periodic_action as is_due

if TYPE_CHECKING:  # bad flags are answered without waiting for these
    from slime.config.run import RunConfig
    from slime.ray.policy_groups import PolicyGroups
    from slime.ray.rollout_group import RolloutGroup
    from slime.ray.train_group import RayTrainGroup

logger = logging.getLogger(__name__)

_PREFIX = "slime_snapshots_"
_GIB = 2**30


@contextmanager
def snapshot_directory(config: "RunConfig") -> Iterator[str | None]:
    """The run's own directory of snapshots, which goes with the run; None if it takes none.

    Raises:
        CannotStart: there is no room for them.
        DirectoryUnusable: nothing can be written there.
    """
    flags = config.fault_tolerance
    if flags.trainer_snapshot_interval is None:
        yield None
        return
    parent = Path(flags.trainer_snapshot_dir)
    with memory_directory(parent, _PREFIX, f"--trainer-snapshot-dir {parent}") as directory:
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


def require_snapshots_seen(directory: str | None, rank: int) -> None:
    """Refuses a rank that would write its part where neither the driver nor other ranks see it.

    Raises:
        RuntimeError: the driver's directory is not there.
    """
    if directory is not None and not Path(directory).is_dir():
        raise RuntimeError(
            f"--trainer-snapshot-interval: rank {rank}, on {os.uname().nodename}, does not see {directory}, "
            "which the driver has made (wanted: a --trainer-snapshot-dir that driver and trainer share)"
        )


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
        self._verify, self._interval = config.checkpoints.verify_checkpoint, flags.trainer_snapshot_interval
        self._rollout = rollout
        self._positions: dict[int, Any] = {}
        self._taking = False
        self._told = False
        self.places: dict[RayTrainGroup, Path] = {}
        if flags.trainer_snapshots is None:
            return
        self._root = Path(flags.trainer_snapshots)
        if config.critic.use_critic:
            self.places[critic] = self._root / "critic"
        for name, group in _by_name(actor).items():
            self.places[group] = self._root / name

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
        self._make_room()
        if reason := self._too_full():
            self._taking = False
            self._tell(reason)
            return
        self._positions[rollout_id] = position

    def take(self, rollout_id: int, role: "RayTrainGroup | PolicyGroups") -> None:
        """Writes the snapshot of a role that has trained. One that fails is told of, and ends nothing."""
        if not self._taking:
            return
        for group in _by_name(role).values():
            reasons = [*filter(None, group.try_to_save(rollout_id, True, str(self.places[group])))]
            for reason in reasons:
                self._tell(reason)
            self._told = bool(reasons)
        self._positions = {
            number: position
            for number, position in self._positions.items()
            if any(number in iterations(place) for place in self.places.values())
        }

    def newest(self) -> int | None:
        """The iteration of the newest snapshot that is whole of all roles, if there is one."""
        found = newest_of_all([*self.places.values()], self._verify) if self.places else None
        return found if found in self._positions else None

    def position(self, iteration: int) -> Any:
        """Where the data was after that rollout."""
        return self._positions[iteration]

    def go_back(self, iteration: int) -> None:
        """Forgets the snapshots after an iteration: they are of steps that are taken again."""
        for place in self.places.values():
            forget_after(place, iteration)
        self._positions = {number: state for number, state in self._positions.items() if number <= iteration}

    def discard(self) -> None:
        """Forgets all, which cannot be loaded."""
        for place in self.places.values():
            shutil.rmtree(place, ignore_errors=True)
        self._positions = {}

    def _make_room(self) -> None:
        """Keeps the newest one that all roles have, which may be the last but one of some."""
        of_all = set.intersection(*({*iterations(place)} for place in self.places.values()))
        newest = max(of_all, default=-1)
        for place in self.places.values():
            forget_after(place, newest)
            remove_older(place, newest, keep=1)

    def _too_full(self) -> str | None:
        """Whether the next one might fill the file system: as long as it is written there are two."""
        sizes = [max(map(_bytes, iterations(place).values()), default=0) for place in self.places.values()]
        try:
            found = shutil.disk_usage(self._root)
        except OSError as error:  # somebody has removed it
            return f"{self._root}: {error.strerror}"
        wanted = sum(sizes) + FREE * found.total
        if found.free >= wanted:
            return None
        return f"{self._root} has {found.free / _GIB:.2f} GiB left (wanted: {wanted / _GIB:.2f})"

    def _tell(self, reason: str) -> None:
        """Says that lost ranks would start again from something older, once until the next snapshot."""
        if not self._told:
            told = "no snapshot in memory, lost ranks would go on from an older one or from a checkpoint: %s"
            logger.warning(told, reason)
        self._told = True


def forget_after(place: Path, iteration: int) -> None:
    """Removes what a directory of snapshots has after an iteration, so that no marker names it."""
    there = iterations(place)
    for path in [*place.glob("iter_*.tmp"), *(there[number] for number in there if number > iteration)]:
        shutil.rmtree(path, ignore_errors=True)
    marker, newest = place / CHECKPOINT_MARKER, max((n for n in there if n <= iteration), default=None)
    if newest is None:
        marker.unlink(missing_ok=True)
    elif marked_iteration(place) not in (None, newest):
        _mark(marker, newest)


def _mark(marker: Path, iteration: int) -> None:
    partial = marker.with_suffix(".partial")
    try:
        partial.write_text(str(iteration))
        partial.replace(marker)
    except OSError:  # the file system is full: without a marker there is no snapshot
        marker.unlink(missing_ok=True)


def _by_name(role: "RayTrainGroup | PolicyGroups") -> "Mapping[str, RayTrainGroup]":
    from slime.ray.policy_groups import PolicyGroups

    if not isinstance(role, PolicyGroups):
        return {"actor": role}
    return {f"actor_{number}": group for number, group in enumerate(role.groups)}


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
