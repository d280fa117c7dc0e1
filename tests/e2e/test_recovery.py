"""With ``--use-fault-tolerance`` a run goes on after an engine was killed, with as many engines as before."""

import asyncio
import itertools
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.chaos.connections import cut
from slime.processes.forked import VARIABLE as FORK_SERVER
from slime.rollout.token_log import read_answers
from slime.utils.types import Sample
from tests.e2e.plugins import token_parity_reward, waiting_reward

pytestmark = pytest.mark.e2e

_KILL_AT = 24  # a sample of the second rollout
VICTIM = "SLIME_TEST_VICTIM"


async def deadly_reward(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """Kills an engine in the middle of the second rollout and notes its process id."""
    note = Path(os.environ[VICTIM])
    if (sample.index or 0) >= _KILL_AT and not note.exists():
        pid = max(_engines())
        note.write_text(str(pid))
        os.kill(pid, signal.SIGKILL)
    return await waiting_reward(args, sample, **kwargs)


def deadly_updates(args: Namespace) -> None:
    """Makes the trainer kill an engine in the middle of the second weight update (it stays version 2)."""
    _strike_in_update(args, lambda pid: os.kill(pid, signal.SIGKILL))


def cutting_updates(args: Namespace) -> None:
    """Has an engine lose all connections there."""
    _strike_in_update(args, cut)


def _strike_in_update(args: Namespace, strike: Callable[[int], Any]) -> None:
    # Late: the driver and the rollout manager import this module too.
    from slime.backends.megatron_utils.hf_weights import HfWeights

    buckets, updates = HfWeights.buckets, itertools.count()

    def killing(self: HfWeights, size: int) -> Iterator[Any]:
        note, update = Path(os.environ[VICTIM]), next(updates)
        for index, bucket in enumerate(buckets(self, size)):
            if args.rank == 0 and update == 1 and index == 1:
                pid = max(_engines())
                note.write_text(str(pid))
                strike(pid)
            yield bucket

    HfWeights.buckets = killing


async def router_ending_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Kills the router in the middle of the second rollout and notes its process id."""
    note = Path(os.environ[VICTIM])
    if (sample.index or 0) >= _KILL_AT and not note.exists():
        pid = _router()
        note.write_text(str(pid))
        os.kill(pid, signal.SIGKILL)
    return await token_parity_reward(args, sample)


async def ending_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Kills the rollout manager, where it runs, then the only engine, then the router, in a rollout each."""
    victims = (os.getpid, lambda: max(_engines()), _router)
    for first, victim in zip(range(_KILL_AT, 100, 16), victims, strict=False):
        note = Path(f"{os.environ[VICTIM]}.{first}")
        if (sample.index or 0) >= first and not note.exists():
            pid, is_engine = victim(), first == _KILL_AT + 16
            note.write_text(str(pid))
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(600 * is_engine)  # else the rollout could end before it is found dead
    victim = Path(os.environ[VICTIM])
    victim.with_name(f"graded-{victim.name}-{sample.index}").touch()
    return await waiting_reward(args, sample)


def _router() -> int:
    """The router of the manager in whose process this runs."""
    # It names itself, and may have lost the environment by which engines are found.
    return next(one.pid for one in psutil.Process().children(recursive=True) if _is_router(one))


def _is_router(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[:1] == ["sglang::router"]
    except psutil.Error:  # it has ended
        return False


def _engines() -> list[int]:
    """Engine servers of the run that this process belongs to: they were forked from the same server."""
    mark = f"{FORK_SERVER}={os.environ[FORK_SERVER]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            mine = mark in (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if mine and b"embedded_engine" in command and b"supervisor" not in command:
            found.append(int(entry.name))
    return found


COLOCATED = ["--colocate", "--actor-num-gpus-per-node", 2]
GENERATING = ["--custom-rm-path", "tests.e2e.test_recovery.deadly_reward"]
UPDATING = [
    *("--custom-megatron-init-path", "tests.e2e.test_recovery.deadly_updates"),
    *("--update-weight-buffer-size", 100_000),
]

CUTTING = [UPDATING[0], "tests.e2e.test_recovery.cutting_updates", *UPDATING[2:]]


# While a disaggregated run generates, test_slime_router.py kills one, and asks for more.
@pytest.mark.parametrize(
    ("layout", "killer"),
    [
        *[(COLOCATED, GENERATING), ([], UPDATING), (COLOCATED, UPDATING)],
        # At each message: tests/weight_sync/test_cut_engines.py.
        pytest.param([], CUTTING, marks=pytest.mark.nightly),
    ],
    ids=["colocated, while generating", "disaggregated, in an update", "colocated, in an update", "cut off"],
)
def test_a_killed_engine_is_replaced_and_updated_and_one_that_was_cut_off_is_updated(
    layout: list[object], killer, start, gate, rl_flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, last_rollout = tmp_path / "victim", gate(64)
    monkeypatch.setenv(VICTIM, str(note))
    flags = ["--use-fault-tolerance", "--rollout-num-gpus", 2, "--num-rollout", 5]
    flags += ["--custom-rm-path", "tests.e2e.plugins.waiting_reward"]
    run = start([*rl_flags, *flags, *layout, *killer])
    run.wait_for(note.exists, "the death of an engine")
    run.wait_for(lambda: len(run.rows("train")) >= 3, "training after it")
    assert len(run.engines()) == 2
    assert (int(note.read_text()) in run.engines()) == (killer is CUTTING)
    last_rollout.touch()
    run.expect_success()
    assert len(run.rows("train")) == 5
    run.expect_no_processes()


SAME = ("train/loss", "train/grad_norm")
GAP = "train/train_rollout_logprob_abs_diff"


@pytest.fixture
def lose_each(start, gate, rl_flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three runs: one that loses each of its processes once, one whose driver is killed, a calm twin."""
    flags = [*rl_flags, "--colocate", "--num-rollout", 6, "--rollout-shuffle", "--save-interval", 2]
    deadly = ["--custom-rm-path", "tests.e2e.test_recovery.ending_reward", "--use-fault-tolerance"]

    def calm() -> Any:
        return start([*flags, "--save", tmp_path / "twin"]).expect_success()

    def play(name: str, *more: Any) -> Any:
        monkeypatch.setenv(VICTIM, str(tmp_path / name))
        last_rollout = gate(80)
        last_rollout.unlink(missing_ok=True)
        run = start([*flags, *deadly, *more, "--save", tmp_path / f"run-{name}"])
        waiting = [tmp_path / f"graded-{name}-{index}" for index in range(80, 96)]
        run.wait_for(lambda: all(map(Path.exists, waiting)), "the answers of the last rollout")
        os.kill(run.pid_of("ray::TrainRayActor"), signal.SIGKILL)
        last_rollout.touch()
        run.expect_success()
        assert len(list(tmp_path.glob(f"{name}.*"))) == 3
        assert run.output.count("the rollout side is started again: ") == 2
        assert run.output.count("the trainer is started again from iteration 3 of ") == 1
        run.expect_no_processes()
        return run

    def resume(log: Path) -> Any:
        """Kills a run in its fifth rollout, when it has all answers and no grade, and starts it again."""
        last_rollout, saved = gate(64), tmp_path / "resumed"
        last_rollout.unlink(missing_ok=True)
        more = [*flags, "--custom-rm-path", "tests.e2e.plugins.waiting_reward", "--use-fault-tolerance"]
        more += ["--token-log-dir", log, "--token-log-interval", 4, "--save", saved, "--load", saved]

        def answered() -> int:
            answers = read_answers(log)[0].values()
            return sum(answer.index >= 64 and answer.response is not None for answer in answers)

        killed = start(more, metrics=tmp_path / "resumed.jsonl")
        killed.wait_for(lambda: answered() == 16, "the answers of the fifth rollout")
        killed.kill()
        killed.expect_no_processes()
        last_rollout.touch()
        return start(more, metrics=tmp_path / "resumed.jsonl").expect_success()

    return play, resume, calm


def test_a_run_that_loses_each_of_its_processes_ends_with_the_numbers_of_its_twin(
    lose_each, tmp_path
) -> None:
    """The step is taken again in which the rollout side was lost; with ranks, all since a checkpoint are.

    With a token log answers that were under way are not made again, but read again, which rounds log-probs
    otherwise.
    """
    play, resume, calm = lose_each
    run = play("plain")
    logged = play("logged", "--token-log-dir", tmp_path / "log", "--token-log-interval", 4)
    resumed = resume(tmp_path / "log of the driver")
    twin = calm()
    wanted = twin.rows("train")
    for one, tolerance in ((run, 0), (logged, 1e-6), (resumed, 1e-6)):
        assert list(one.rows("train")) == list(wanted) == list(range(6))
        for step, row in one.rows("train").items():
            assert {key: row[key] for key in SAME} == {key: wanted[step][key] for key in SAME}
            assert abs(row[GAP] - wanted[step][GAP]) <= tolerance
    runs = run, logged, resumed, twin
    rewards = [[row["rollout/raw_reward"] for row in one.rows("rollout").values()] for one in runs]
    assert rewards == [rewards[0]] * 4
    assert [one.books() for one in runs] == [twin.books()] * 4
    restored = [
        sum(row.get("rollout/restored_tokens", 0) > 0 for row in one.rows("rollout").values())
        for one in (run, logged, resumed)
    ]
    assert restored == [0, 2, 1]
    # Ranks are lost in rollout 5, whose answers newer weights have made than those of iteration 3.
    dropped = {step: row.get("rollout/dropped_answers") for step, row in logged.rows("rollout").items()}
    assert dropped == {**dict.fromkeys(range(6)), 4: 16}
