"""Snapshots of the trainer in memory: which are kept, and which one lost ranks go on from."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray.exceptions import RayTaskError

from slime.ray import healing, snapshot_store
from slime.ray.healing import Healing
from slime.ray.losses import RanksLost
from slime.ray.policy_groups import PolicyGroups
from slime.ray.snapshot_place import require_snapshots_seen
from slime.ray.trainer_snapshots import TrainerSnapshots
from slime.ray.whole_checkpoint import whole_checkpoint
from slime.training.checkpoint_dir import MARKER, iteration_dir
from slime.utils.checkpoint_record import iterations, write_record
from tests.run_args import config_with


class Role:
    """Ranks that write whole iterations, or fail."""

    def __init__(self) -> None:
        self.fails: str | None = None
        self.most = 0  # iterations that were there at once, those that are written among them
        self.checkpoints: str | None = None
        self.rebuilt: list[tuple[str, int]] = []
        self.unreadable = False

    def try_to_save(self, rollout_id: int, force_sync: bool, memory: str) -> list[str | None]:
        if self.fails:
            return [self.fails]
        write(Path(memory), rollout_id)
        self.most = max(self.most, len(iterations(Path(memory))))
        return [None]

    def rebuild(self, load: str | Path, up_to: int) -> int:
        self.rebuilt.append((Path(load).name, up_to))
        if self.unreadable and "saved" not in str(load):
            raise RayTaskError("load", "a file that is cut", ValueError("cut"))
        return up_to + 1

    def offload(self) -> None: ...

    def onload(self) -> None: ...


def write(root: Path, iteration: int) -> None:
    directory = iteration_dir(root, iteration)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metadata.json").write_text("{}")
    write_record(directory, 0, 1)
    (root / MARKER).write_text(str(iteration))


class Run:
    """A run of these roles whose rollouts are numbers, and the positions that it goes back to."""

    def __init__(self, root: Path, critic: bool = False, **flags: Any) -> None:
        root.mkdir(exist_ok=True)
        self.actor, self.critic = Role(), Role()
        self.went_back: list[Any] = []
        self.rollout: Any = SimpleNamespace(
            position=(-1, None),
            end=lambda: None,
            go_back=lambda load, rollout_id, state=None: self.went_back.append((rollout_id, state)),
            may_restart=lambda: False,
        )
        given = dict(use_fault_tolerance=True, trainer_snapshot_interval=1, trainer_snapshots=str(root))
        self.config = config_with(use_critic=critic, **(given | flags))
        self.snapshots = TrainerSnapshots(self.config, self.actor, self.critic, self.rollout)  # type: ignore

    def step(self, rollout_id: int) -> None:
        self.rollout.position = rollout_id, {"offset": rollout_id}
        self.snapshots.begin(rollout_id)
        if self.config.critic.use_critic:
            self.snapshots.take(rollout_id, self.critic)  # type: ignore[arg-type]
        self.snapshots.take(rollout_id, self.actor)  # type: ignore[arg-type]

    def lose(self, at: int, steps: int) -> list[int]:
        """The rollouts of a run that loses its ranks once, in training on ``at``."""
        taken: list[int] = []

        def take(rollout_id: int) -> None:
            taken.append(rollout_id)
            if taken.count(at) == 1 and rollout_id == at:
                raise RanksLost("killed")
            self.step(rollout_id)

        parts: Any = self.config, self.actor, self.critic, self.rollout, self.snapshots, lambda: None
        Healing(*parts).take_all(take, range(steps))
        return taken


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "node_is_alive", lambda: True)


def test_two_are_kept_and_the_newest_whole_one_is_not_touched(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rollout_id in range(4):
        run.step(rollout_id)
    assert list(iterations(tmp_path / "actor")) == [3, 2] and run.actor.most == 2
    assert run.snapshots.newest() == 3
    (iteration_dir(tmp_path / "actor", 3) / "metadata.json").write_text("{")
    assert run.snapshots.newest() == 2 and run.snapshots.position(2) == {"offset": 2}


def test_they_are_taken_at_their_interval(tmp_path: Path) -> None:
    run = Run(tmp_path, trainer_snapshot_interval=3)
    for rollout_id in range(7):
        run.step(rollout_id)
    assert list(iterations(tmp_path / "actor")) == [5, 2]


def test_the_newest_is_the_one_that_all_roles_have(tmp_path: Path) -> None:
    run = Run(tmp_path, critic=True)
    for rollout_id in range(3):
        run.step(rollout_id)
    run.actor.fails = "no space"
    run.step(3)
    assert list(iterations(tmp_path / "critic")) == [3, 2] and run.snapshots.newest() == 2


def test_one_that_a_role_lacks_is_not_kept_in_place_of_one_that_all_have(tmp_path: Path) -> None:
    run = Run(tmp_path, critic=True)
    run.step(2)
    run.actor.fails = "no space"
    for rollout_id in range(3, 6):
        run.step(rollout_id)
        assert run.snapshots.newest() == 2 and run.snapshots.position(2) == {"offset": 2}
    assert run.critic.most == 2
    run.actor.fails = None
    run.step(6)
    assert run.snapshots.newest() == 6


@pytest.mark.parametrize("verify", ["none", "sizes"])
def test_roles_go_on_from_one_iteration_where_one_has_written_a_later_one(
    tmp_path: Path, verify: str
) -> None:
    run = Run(tmp_path, critic=True, verify_checkpoint=verify)
    run.step(2)
    write(tmp_path / "critic", 3)
    newest = run.snapshots.newest()
    assert newest == 2
    found = [whole_checkpoint("role", place, verify, newest)[0] for place in run.snapshots.places.values()]
    assert found == [2, 2]


def test_going_back_needs_no_room(tmp_path: Path, monkeypatch: Any) -> None:
    run = Run(tmp_path, critic=True)
    run.step(2)
    write(tmp_path / "critic", 3)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", MagicMock(side_effect=full))
    run.snapshots.go_back(2)
    assert list(iterations(tmp_path / "critic")) == [2] and (tmp_path / "actor" / MARKER).read_text() == "2"
    assert not (tmp_path / "critic" / MARKER).exists() and run.snapshots.newest() is None


def test_each_policy_has_a_place_of_its_own(tmp_path: Path) -> None:
    groups = PolicyGroups({"a": Role(), "b": Role()})  # type: ignore[dict-item]
    config = config_with(trainer_snapshot_interval=1, trainer_snapshots=str(tmp_path))
    rollout: Any = SimpleNamespace(position=(0, {}))
    snapshots = TrainerSnapshots(config, groups, MagicMock(), rollout)
    snapshots.begin(0)
    snapshots.take(0, groups)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor_0", "actor_1"]
    assert snapshots.newest() == 0


def test_one_that_fails_is_told_of_once_and_an_older_one_stands(tmp_path: Path, caplog: Any) -> None:
    run = Run(tmp_path)
    run.step(0)
    run.actor.fails = "no space left"
    run.step(1)
    run.step(2)
    assert run.snapshots.newest() == 0
    assert (
        caplog.text.count("lost ranks would go on from an older one or from a checkpoint: no space left") == 1
    )


def test_a_file_system_that_has_filled_up_is_left_alone(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    run = Run(tmp_path)
    run.step(0)
    size = sum(file.stat().st_size for file in iteration_dir(tmp_path / "actor", 0).iterdir())
    found = SimpleNamespace(total=2000, free=size + 99)
    monkeypatch.setattr(snapshot_store.shutil, "disk_usage", lambda path: found)
    run.step(1)
    assert run.snapshots.newest() == 0 and " GiB left (wanted: " in caplog.text
    found.free += 1
    run.step(2)
    assert run.snapshots.newest() == 2
    monkeypatch.undo()
    shutil.rmtree(tmp_path)
    run.step(3)
    assert "No such file or directory" in caplog.text and run.snapshots.newest() is None


def test_without_the_position_in_the_data_there_is_none(tmp_path: Path, caplog: Any) -> None:
    run = Run(tmp_path)
    run.rollout.position = 0, None
    run.snapshots.begin(0)
    run.snapshots.take(0, run.actor)  # type: ignore[arg-type]
    assert run.snapshots.newest() is None and "the data source does not tell its state" in caplog.text


def test_lost_ranks_cost_the_step_under_way(tmp_path: Path, caplog: Any) -> None:
    run = Run(tmp_path)
    half_written = tmp_path / "actor" / "iter_0000003.tmp"
    half_written.mkdir(parents=True)
    assert run.lose(at=3, steps=5) == [0, 1, 2, 3, 3, 4]
    assert not half_written.exists()
    assert run.actor.rebuilt == [("actor", 2)] and run.went_back == [(2, {"offset": 2})]
    told = (
        f"from iteration 2 of {tmp_path}/actor, a snapshot in memory, which costs the step under way: killed"
    )
    assert told in caplog.text


def test_steps_that_are_taken_again_have_no_later_snapshot(tmp_path: Path) -> None:
    run = Run(tmp_path, trainer_snapshot_interval=2)
    write(tmp_path / "actor", 5)
    (tmp_path / "actor" / "iter_0000004.tmp").mkdir()
    run.step(3)
    run.snapshots.go_back(3)
    assert sorted(path.name for path in (tmp_path / "actor").iterdir()) == ["iter_0000003", MARKER]
    assert run.snapshots.newest() == 3


@pytest.mark.parametrize(
    ("saved", "flags", "goes_back_to", "cost"),
    [
        (3, {}, ("saved", 3), "the step under way"),
        (1, {}, ("actor", 2), "a finished step and the one under way"),
        # It would have to go on without the optimizer's state.
        (3, {"no_save_optim": True}, ("actor", 2), "a finished step and the one under way"),
    ],
)
def test_the_newest_of_memory_and_disk_is_gone_on_from(
    tmp_path: Path, caplog: Any, saved: int, flags: Any, goes_back_to: Any, cost: str
) -> None:
    run = Run(tmp_path / "memory", trainer_snapshot_interval=3, save=str(tmp_path / "saved"), **flags)
    run.actor.checkpoints = str(tmp_path / "saved")
    write(tmp_path / "saved", saved)
    assert run.lose(at=4, steps=5) == [*range(5), *range(goes_back_to[1] + 1, 5)]
    assert run.actor.rebuilt == [goes_back_to] and f", which costs {cost}: killed" in caplog.text
    state = {"offset": 2} if goes_back_to[0] == "actor" else None
    assert run.went_back == [(goes_back_to[1], state)]


def test_one_that_cannot_be_loaded_is_given_up_for_a_checkpoint(tmp_path: Path, caplog: Any) -> None:
    run = Run(tmp_path / "memory", save=str(tmp_path / "saved"))
    run.actor.checkpoints, run.actor.unreadable = str(tmp_path / "saved"), True
    write(tmp_path / "saved", 0)
    assert run.lose(at=2, steps=3) == [0, 1, 2, 1, 2]
    assert run.actor.rebuilt == [("actor", 1), ("saved", 0)] and run.went_back == [(0, None)]
    assert "iteration 0 of " in caplog.text and "a finished step and the one under way" in caplog.text


def test_one_that_cannot_be_loaded_ends_a_run_without_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.actor.unreadable = True
    with pytest.raises(RayTaskError):
        run.lose(at=2, steps=3)


def test_a_rank_that_does_not_see_the_directory_is_refused(tmp_path: Path) -> None:
    require_snapshots_seen(None, 0)
    require_snapshots_seen(str(tmp_path), 0)
    with pytest.raises(
        RuntimeError, match=f"rank 3, on .*, does not see {tmp_path}/none, which the driver has"
    ):
        require_snapshots_seen(str(tmp_path / "none"), 3)
