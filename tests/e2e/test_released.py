"""``--release-train``: no trainer process while engines generate, and the numbers of a run that keeps it."""

import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.chaos.twins import differences
from slime.processes.reaper import SHARED_MEMORY

pytestmark = pytest.mark.e2e

VICTIM = "SLIME_TEST_VICTIM"
SAVED = "SLIME_TEST_SAVED"
TRAINER = "ray::TrainRayActor"
_MARKER = "latest_checkpointed_iteration.txt"


def ending_once(args: Namespace) -> None:
    """Kills the first trainer that starts from a save, before it has built its model."""
    if (Path(os.environ[SAVED]) / _MARKER).exists():
        try:
            Path(os.environ[VICTIM]).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def flags(rl_flags: list[object], gate: Any) -> list[object]:
    return [*rl_flags, "--rollout-shuffle", "--custom-rm-path", "tests.e2e.plugins.waiting_reward"]


def releasing(root: Path) -> list[object]:
    disk = ["--update-weight-transport", "disk", "--update-weight-disk-dir", root / "weights"]
    return ["--release-train", "--save", root / "saved", "--load", root / "saved", *disk]


def shared_memory_of(pids: set[int]) -> list[str]:
    return [
        name for name in os.listdir(SHARED_MEMORY) if name.startswith(tuple(f"torch_{pid}_" for pid in pids))
    ]


def rows(run: Any) -> dict[str, Any]:
    return {axis: run.rows(axis) for axis in ("rollout", "train")}


@pytest.fixture(scope="module")
def twins() -> dict[str, Any]:
    """Rows of runs without the flag, by their layout, for all tests."""
    return {}


@pytest.fixture
def expect_numbers_of_twin(start: Any, flags: list[object], twins: dict[str, Any]) -> Any:
    def expect(run: Any, layout: str, without: str = "none") -> None:
        if layout not in twins:
            own, script = LAYOUTS[layout]
            twins[layout] = rows(start([*flags, *own], script=script).expect_success())
        ours = rows(run)
        assert all(sorted(of_axis) == sorted(twins[layout]["train"]) for of_axis in ours.values())
        assert len(twins[layout]["train"]) == 2 + (layout != "colocated")
        assert not [line for line in differences(ours, twins[layout]) if without not in line]

    return expect


LAYOUTS = {
    "colocated": (["--colocate"], "train.py"),
    "ahead, two ranks": (["--actor-num-gpus-per-node", 2, "--num-rollout", 3], "train_async.py"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_trainer_is_there_while_engines_generate_and_no_number_is_another(
    layout: str, start: Any, gate: Any, flags: list[object], expect_numbers_of_twin: Any, tmp_path: Path
) -> None:
    """In the second rollout, and train_async.py in the first: it trains while it generates others."""
    own, script = LAYOUTS[layout]
    steps = int(script == "train.py")
    waits = gate(steps * 16)
    run = start([*flags, *own, *releasing(tmp_path)], script=script)
    seen: set[int] = set()

    def is_there() -> bool:
        seen.update(found := run.pids_of(TRAINER))
        return bool(found)

    run.wait_for(is_there, "the start of the trainer")
    run.wait_for(lambda: not is_there() and len(run.rows("train")) == steps, "the trainer's end")
    run.wait_for(lambda: not shared_memory_of(seen), "the end of its shared memory")
    assert run.engines()
    waits.touch()
    run.expect_success()
    expect_numbers_of_twin(run, layout)
    versions = sorted(path.name for path in (tmp_path / "weights").glob("weight_v*"))
    assert versions == [f"weight_v{len(run.rows('train')) + 1:06}"]  # what earlier trainers wrote is gone
    run.expect_no_processes()


def test_a_kill_while_the_trainer_is_away_or_comes_back_costs_no_number(
    start: Any,
    gate: Any,
    flags: list[object],
    expect_numbers_of_twin: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the second rollout: the manager while it is away, the trainer while it starts, then the driver."""
    monkeypatch.setenv(VICTIM, str(tmp_path / "victim"))
    monkeypatch.setenv(SAVED, str(tmp_path / "saved"))
    second = gate(16)
    more = [*flags, "--colocate", *releasing(tmp_path), "--use-fault-tolerance"]
    more += ["--custom-megatron-init-path", f"{__name__}.ending_once"]
    metrics = tmp_path / "killed.jsonl"
    run = start(more, metrics=metrics)
    run.wait_for(lambda: len(run.rows("train")) == 1 and not run.pids_of(TRAINER), "the trainer's end")
    os.kill(run.pid_of("ray::RolloutManager"), signal.SIGKILL)
    told = "the trainer is started again from iteration 0 of "
    run.wait_for(lambda: told in run.output, "the death of the trainer that came back")
    run.wait_for(lambda: bool(run.pids_of(TRAINER)), "its next start")
    run.wait_for(lambda: not run.pids_of(TRAINER), "its end")
    run.kill()
    assert run.output.count("the rollout side is started again: ") == 1 == run.output.count(told)
    run.expect_no_processes()
    second.touch()
    resumed = start(more, metrics=metrics).expect_success()
    # Weights that are sent again have a number of their own.
    expect_numbers_of_twin(resumed, "colocated", without="/staleness/")
