"""With ``--use-fault-tolerance`` train_async.py goes on after its rollout manager or its ranks were lost."""

import itertools
import os
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.chaos.twins import differences
from slime.utils.types import Sample
from tests.e2e.plugins import waiting_reward

pytestmark = pytest.mark.e2e

DIRECTORY = "SLIME_TEST_VICTIMS"
"""Managers write their process ids into this directory, and who kills one notes that."""
_A_ROLLOUT = 16  # samples


def _note(name: str) -> Path:
    return Path(os.environ[DIRECTORY]) / name


def _once(name: str) -> bool:
    """Whether nobody has done this before."""
    try:
        _note(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


async def ending_in_the_first(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Kills the rollout manager, where it runs, in the middle of the first rollout."""
    _note("manager").write_text(str(os.getpid()))
    if (sample.index or 0) >= _A_ROLLOUT // 2 and _once("killed in the first rollout"):
        os.kill(os.getpid(), signal.SIGKILL)
    return await waiting_reward(args, sample)


async def ending_in_the_second(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Kills the rollout manager as soon as the second rollout has begun, while the first is trained on."""
    if (sample.index or 0) >= _A_ROLLOUT and not _note("manager").exists():
        _note("manager").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return await waiting_reward(args, sample)


def late_trainer(args: Namespace) -> None:
    """Fetches the first batch only when the manager that made it has ended."""
    from slime.ray.train_worker import TrainRayActor

    train = TrainRayActor.train

    def late(self: TrainRayActor, *arguments: Any) -> Any:
        while not _note("manager").exists() or psutil.pid_exists(int(_note("manager").read_text() or 1)):
            time.sleep(0.05)
        if _once("the first batch is fetched"):
            time.sleep(3)  # for what the manager had in the store of Ray, which goes after it
        return train(self, *arguments)

    TrainRayActor.train = late  # type: ignore[method-assign]


def ending_in_an_update(args: Namespace) -> None:
    """Kills the rollout manager in the third weight update; two were of the first weights."""
    from slime.backends.megatron_utils.hf_weights import HfWeights

    buckets, updates = HfWeights.buckets, itertools.count()

    def killing(self: HfWeights, size: int) -> Iterator[Any]:
        update = next(updates)
        for index, bucket in enumerate(buckets(self, size)):
            if args.rank == 0 and update == 2 and index == 1 and _once("killed in an update"):
                os.kill(int(_note("manager").read_text()), signal.SIGKILL)
            yield bucket

    HfWeights.buckets = killing  # type: ignore[method-assign]


@pytest.fixture
def flags(rl_flags: list[object], gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    victims = tmp_path / "victims"
    victims.mkdir()
    monkeypatch.setenv(DIRECTORY, str(victims))
    return [*rl_flags, "--rollout-shuffle", "--update-weight-buffer-size", 100_000]


def killing(reward: str, hook: str) -> list[object]:
    ours = [f"{__name__}.{name}" for name in (reward, hook)]
    return ["--use-fault-tolerance", "--custom-rm-path", ours[0], "--custom-megatron-init-path", ours[1]]


def expect_rows_of_twin(run: Any, twin: Any, steps: int) -> None:
    for axis in ("rollout", "train"):
        ours, theirs = run.rows(axis), twin.rows(axis)
        assert list(ours) == list(theirs) == list(range(steps))
        found = differences({axis: ours}, {axis: theirs})
        # Weights that are sent again have a number of their own, and repeated rollouts may have newer ones.
        assert not [line for line in found if "/staleness/" not in line]


def test_a_manager_that_is_lost_before_training_or_in_an_update_costs_no_number(
    start: Any, gate: Any, flags: list[object]
) -> None:
    gate(0).touch()
    more = [*flags, "--num-rollout", 4]
    run = start([*more, *killing("ending_in_the_first", "ending_in_an_update")], script="train_async.py")
    run.expect_success()
    assert run.output.count("the rollout side is started again: ") == 2
    twin = start(more, script="train_async.py").expect_success()
    expect_rows_of_twin(run, twin, 4)
    run.expect_no_processes()


def test_manager_and_ranks_may_be_lost_at_any_time_and_no_prompt_is_skipped_or_repeated(
    start: Any, gate: Any, flags: list[object], tmp_path: Path
) -> None:
    """Weights stand still, so that it does not show which ones a rollout was made with, but all else does."""
    last = gate(4 * _A_ROLLOUT)
    more = [*flags, "--lr", 0, "--num-rollout", 5, "--save-interval", 2]
    own = [*killing("ending_in_the_second", "late_trainer"), "--save", tmp_path / "run"]
    run = start([*more, *own], script="train_async.py")
    run.wait_for(lambda: len(run.rows("train")) >= 3, "training after the death of the manager")
    os.kill(run.pid_of("ray::TrainRayActor"), signal.SIGKILL)
    last.touch()
    run.expect_success()
    assert run.output.count("the rollout side is started again: ") == 1
    assert run.output.count("the trainer is started again from iteration 1 of ") == 1
    twin = start([*more, "--save", tmp_path / "twin"], script="train_async.py").expect_success()
    expect_rows_of_twin(run, twin, 5)
    run.expect_no_processes()
