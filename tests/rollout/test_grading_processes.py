"""Graders that hang or die cost their sample and nothing else."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from slime.rollout.base_types import GradingFailed, RolloutError
from slime.rollout.rm_hub import async_rm, batched_async_rm, grade_in_process, grading_pool
from slime.rollout.rm_hub.grading_pool import GraderError, GradingPool, GradingProcess
from slime.utils.types import Sample
from tests.rollout import bad_graders

pytestmark = pytest.mark.slow

EQUAL = "slime.utils.grading.math_verify_equal.are_equal"


class Strict(GradingProcess):
    """Lets what loops have 2 s, and all else as long as a busy machine may take."""

    def _call_once(self, function, args):
        self._limit_s = 2 if str(args[0]).startswith("loop") or args[0] == "close" else 120
        return super()._call_once(function, args)


@pytest.fixture(scope="module")
def process():
    process = GradingProcess(limit_s=30)
    yield process
    process.stop()


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("1316", "1316.0", True),
        ("x^2-1", "(x-1)(x+1)", True),
        ("1316", "1317", False),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("7", "not a number", False),
    ],
)
def test_answers_are_compared_as_mathematics(process, gold, answer, equal):
    assert process.call(EQUAL, gold, answer) is equal


def test_a_label_that_is_no_mathematics_is_an_error(process):
    with pytest.raises(GraderError, match="not a mathematical expression"):
        process.call(EQUAL, "", "1")


def test_a_grader_that_does_not_exist_is_an_error(process):
    with pytest.raises(GraderError, match=r"tests\.nothing\.grade cannot be imported: ModuleNotFoundError"):
        process.call("tests.nothing.grade", "1")


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(grading_pool._MARK) == mark and process.status() != "zombie":
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.parametrize(
    ("response", "why", "limit_s"),
    [
        ("loop", "no verdict within 2 s", 2),
        ("loop without alarm", "no verdict within 2 s", 2),
        ("allocate", "MemoryError", 30),
        ("exit", "ended with exit status 0", 30),
        ("sys.exit", "SystemExit: 0", 30),
        ("kill", "ended with exit status -9", 30),
        ("fork and stay", "left processes behind", 30),
        ("daemonise", "left processes behind", 30),
        ("raise", "ZeroDivisionError: by zero", 30),
        ("close", "no verdict|ended with exit status", 2),
    ],
)
def test_a_grader_that_goes_wrong_fails_on_that_answer_and_leaves_nothing(
    monkeypatch, response, why, limit_s
):
    monkeypatch.setattr(grading_pool, "_GRACE_S", 0.3 if limit_s == 2 else 30)
    process = Strict(limit_s)
    try:
        assert process.call(bad_graders.HERE, "a", "a") == 1.0
        mark = process._mark
        with pytest.raises(GradingFailed, match=why):
            process.call(bad_graders.HERE, response, "a")
        assert process.pid is not None or not marked(mark)
        assert process.call(bad_graders.HERE, "a", "a") == 1.0
        assert len(marked(process._mark)) == 1
    finally:
        process.stop()
    assert not marked(mark) and not marked(process._mark)


@pytest.mark.parametrize("response", ["fork and return", "print"])
def test_what_a_grader_prints_or_forks_gives_no_second_reply(response, monkeypatch):
    monkeypatch.setattr(grading_pool, "_ENDING_S", 60)
    process = Strict(120)
    try:
        assert process.call(bad_graders.HERE, response, response) == 1.0
        assert process.call(bad_graders.HERE, "b", "a") == 0.0
        assert process.call(bad_graders.HERE, "a", "a") == 1.0
    finally:
        process.stop()


def test_mathematics_that_never_ends_is_no_verdict():
    process = GradingProcess(limit_s=2)
    with pytest.raises(GradingFailed, match="no verdict within 2 s"):
        process.call(EQUAL, "1", "9^{9^{9^{9}}}")
    process._limit_s = 30
    assert process.call(EQUAL, "1/2", "0.5") is True
    process.stop()


def test_a_process_that_was_killed_is_replaced_without_a_loss(process, monkeypatch):
    assert process.call(EQUAL, "1", "1.0") is True
    os.kill(process.pid, signal.SIGKILL)
    process._process.wait()
    assert process.call(EQUAL, "1", "1.0") is True
    monkeypatch.setattr(grading_pool, "_WORKER", Path("/nonexistent.py"))
    process.stop()
    with pytest.raises(GraderError, match="does not start: its process ended with exit status 2"):
        process.call(EQUAL, "1", "1.0")


def test_the_process_dies_with_its_parent_and_loads_nothing_heavy():
    code = (
        "import time; from slime.rollout.rm_hub.grading_pool import GradingPool\n"
        f"pool = GradingPool(1); pool.call({EQUAL!r}, '1', '1.0'); pid = pool.pids[0]\n"
        "maps = open(f'/proc/{pid}/maps').read()\n"
        "print(pid, 'libtorch' in maps or '_raylet' in maps, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid, heavy = parent.stdout.readline().split()
    assert heavy == "False"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while _lives(int(pid)):
        assert time.monotonic() < deadline, "the grading process outlives its parent"
        threading.Event().wait(0.02)


def _lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_pool_serves_several_threads_and_closes():
    pool = GradingPool(2)
    results = []
    call = lambda: results.append(pool.call(EQUAL, "1", "1.0"))
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    pids = pool.pids
    pool.close()
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)


def test_the_same_question_is_asked_once_if_told_so(monkeypatch):
    monkeypatch.setattr(grading_pool, "_REMEMBERED", 2)
    pool = GradingPool(1)
    asked = []
    process = pool._processes[0]
    monkeypatch.setattr(process, "call", lambda function, *args: asked.append(args) or 0.5)
    for answer in ("a", "a", "b", "c", "a"):
        assert pool.call(bad_graders.HERE, answer, "x", remember=True) == 0.5
    assert asked == [("a", "x"), ("b", "x"), ("c", "x"), ("a", "x")]
    pool.call(bad_graders.HERE, "a", "x")
    assert len(asked) == 5
    pool.close()


async def reward(args, sample, **kwargs):
    return await grade_in_process(bad_graders.HERE, sample.response, sample.label)


@pytest.fixture
def impatient_pool(monkeypatch):
    monkeypatch.setattr(grading_pool, "GradingProcess", Strict)
    pool = GradingPool(2)
    monkeypatch.setattr(grading_pool, "_pool", lambda: pool)
    yield pool
    pool.close()


async def test_each_misdeed_costs_one_sample_of_a_batch(make_args, impatient_pool):
    args = make_args(custom_rm_path=f"{__name__}.reward")
    bad = ["loop", "allocate", "fork and stay", "exit"]
    samples = [Sample(index=i, response=text, label="a") for i, text in enumerate(["a", *bad, "b", "a"])]
    rewards = await asyncio.gather(*(async_rm(args, sample) for sample in samples))
    assert rewards == [1.0, None, None, None, None, 0.0, 1.0]
    assert [sample.status.value for sample in samples] == ["pending", *["failed"] * 4, "pending", "pending"]
    assert [sample.remove_sample for sample in samples] == [False, *[True] * 4, False, False]
    assert all("grading_failure" in sample.metadata for sample in samples[1:5])


async def test_the_event_loop_goes_on_while_graders_hang(make_args, impatient_pool):
    args = make_args(custom_rm_path=f"{__name__}.reward")
    hanging = asyncio.gather(*(async_rm(args, Sample(response="loop", label="a")) for _ in range(4)))
    turns = 0
    while not hanging.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert await hanging == [None] * 4
    assert turns > 20  # a loop that waited for one of them would count a few


async def silent_judge(args, samples, **kwargs):
    raise GradingFailed("the judge is silent")


async def test_a_group_whose_grader_fails_as_a_whole_has_no_rewards(make_args):
    args = make_args(custom_rm_path=f"{__name__}.silent_judge")
    samples = [Sample(), Sample()]
    assert await batched_async_rm(args, samples) == [None, None]
    assert [sample.metadata["grading_failure"] for sample in samples] == ["the judge is silent"] * 2


async def test_a_bad_label_still_ends_the_run(make_args):
    args = make_args(custom_rm_path=None, rm_type="math")
    with pytest.raises(RolloutError, match=r"LabelAtFault: .*not a mathematical expression"):
        await async_rm(args, Sample(response="\\boxed{1}", label="\\text{}"))


def test_a_grader_that_hangs_ends_by_itself_even_if_nobody_waits_for_it():
    command = [sys.executable, "-P", str(grading_pool._WORKER)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    request = {"function": bad_graders.HERE, "args": ["loop", "a"], "limit_s": 0.5, "ending_s": 0}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            assert process.wait(300) == -signal.SIGALRM
        finally:
            process.kill()


@pytest.mark.parametrize("pause", [0.0, 0.01])
def test_what_says_no_end_is_heard_to_no_end_of_time_or_size(monkeypatch, pause):
    """With pauses too: each piece comes in time."""
    monkeypatch.setattr(grading_pool, "_LARGEST_REPLY", 1 << 20 if pause else 1 << 16)
    heard, said = os.pipe()
    stopped = threading.Event()

    def say():
        while not stopped.wait(pause):
            os.write(said, b"x" * (1 if pause else 4096))

    speaker = threading.Thread(target=say)
    speaker.start()
    try:
        if pause:
            assert grading_pool._read_line(heard, 0.3) == (b"", False)
        else:
            with pytest.raises(grading_pool._ReplyTooLarge):
                grading_pool._read_line(heard, 300)
    finally:
        stopped.set()
        os.set_blocking(heard, False)
        while speaker.is_alive():
            with contextlib.suppress(BlockingIOError):
                os.read(heard, 1 << 16)
        os.close(heard)
        os.close(said)
