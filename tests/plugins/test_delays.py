"""Random delays find what passes only most of the time, and where they are."""

from pathlib import Path

import pytest

from tests.flaky import failures
from tests.forking import ForkedScript

pytestmark = pytest.mark.slow

RACE = """
import asyncio


async def add(counter, news):
    seen = counter["n"]
    await news.put(seen)  # which lets nobody in, as long as there is room
    counter["n"] = seen + 1


async def test_no_update_is_lost():
    counter, news = {"n": 0}, asyncio.Queue()
    await asyncio.gather(*(add(counter, news) for _ in range(4)))
    assert counter["n"] == 4


def test_one_and_one():
    assert 1 + 1 == 2
"""
PLACES = """
import asyncio, multiprocessing, os, queue, subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor
from tests.plugins.random_delays import install

delays = install("1")
thread = threading.Thread(target=print)
thread.start()
thread.join()
threading.Event().wait(0.01)
news = queue.Queue()
news.put(1), news.get()
with ThreadPoolExecutor(1) as pool, threading.Lock():
    pool.submit(print).result()


async def tasks():
    await asyncio.sleep(0)
    await asyncio.Queue().put(1)
    await asyncio.to_thread(print)
    async with asyncio.Lock(), asyncio.Semaphore():
        pass


asyncio.run(tasks())
code = "import os, threading; threading.Event().set(); print('child', os.environ['SLIME_RANDOM_DELAYS'], "
code += "*threading.random_delays.seen)"
for _ in range(2):
    subprocess.run([sys.executable, "-c", code])
if os.fork() == 0:
    print("forked", delays.child(), flush=True)
    os._exit(0)
os.wait()
print("seen", sorted(delays.seen))
"""

DELAYED = ("-p", "tests.plugins.delays", "--delays")


def output_of(script: Path | str, *words: str, folder: Path) -> tuple[int, str]:
    log = folder / "out"
    log.unlink(missing_ok=True)
    status = ForkedScript(script, list(words), log, cwd=folder).wait(600)
    return status, log.read_text()


def test_a_race_is_found_by_some_seed_and_by_the_same_one_again(tmp_path: Path) -> None:
    (tmp_path / "test_race.py").write_text(RACE)
    words = ["-q", "-o", "asyncio_mode=auto", "--rootdir", str(tmp_path), str(tmp_path / "test_race.py")]
    status, output = output_of("pytest", *words, folder=tmp_path)
    assert status == 0, output

    fails = lambda seed: output_of("pytest", *DELAYED, str(seed), *words, folder=tmp_path)[0] == 1
    found = next(seed for seed in range(1, 20) if fails(seed))
    assert fails(found)


def test_the_search_names_the_test_its_seeds_and_the_failure(tmp_path: Path) -> None:
    (tmp_path / "test_race.py").write_text(RACE)
    words = ["-o", "asyncio_mode=auto", "--rootdir", str(tmp_path), str(tmp_path / "test_race.py")]
    words = ["--outputs", str(tmp_path / "runs"), *words]
    words = ["--runs", "3", "--first-seed", "1", "--load", "2", "--at-once", "2", *words]
    status, output = output_of("tests.flaky", *words, folder=tmp_path)
    assert status == 1, output
    said = [file.read_text() for file in (tmp_path / "runs").glob("*.out")]
    assert len(said) == 3 and any("E       assert" in run for run in said)
    *_, summary, test, reason = output.splitlines()
    assert summary == "1 flaky in 3 runs at load 2"
    assert test == "test_race.py::test_no_update_is_lost"
    assert reason.lstrip().startswith("seeds [") and reason.endswith("== 4")


def test_a_run_that_says_nothing_of_its_tests_has_failed(tmp_path: Path) -> None:
    assert failures(tmp_path / "none.xml", 1) == {"(the run itself)": "pytest ended with status 1"}
    assert failures(tmp_path / "none.xml", 5) == {"(the run itself)": "pytest ended with status 5"}


def test_threads_tasks_and_processes_are_delayed_where_they_meet(tmp_path: Path) -> None:
    script = tmp_path / "places.py"
    script.write_text(PLACES)
    status, output = output_of(script, folder=tmp_path)
    assert status == 0, output
    seen = output.splitlines()[-1]
    for place in (
        *(
            "Thread.start",
            "Thread.run",
            "Event.wait",
            "Queue.put",
            "Queue.get",
            "Lock.acquire",
            "Lock.release",
        ),
        *("ThreadPoolExecutor.submit", "Future.set_result", "Popen.__init__", "Popen.wait"),
        *("BaseEventLoop._run_once", "BaseEventLoop.call_soon_threadsafe", "asyncio.Queue.put"),
        *("asyncio.asyncio.sleep", "asyncio.Lock.acquire", "asyncio.Semaphore.acquire"),
    ):
        assert f"'{place}'" in seen
    seeds = [line.split()[1] for line in output.splitlines() if line.startswith(("child", "forked"))]
    assert len(set(seeds)) == 3, output  # each process has delays of its own
    assert output.count(" Event.set") == 2  # of the two children


def test_the_lines_of_a_test_are_delayed(tmp_path: Path) -> None:
    test = tmp_path / "test_lines.py"
    test.write_text(
        "import threading\n\ndef test_lines():\n    a = 1\n    b = 2\n"
        "    assert threading.random_delays.seen['line'] == 3\n"
    )
    words = ["-q", *DELAYED, "1", "--rootdir", str(tmp_path), str(test)]
    status, output = output_of("pytest", *words, folder=tmp_path)
    assert status == 0, output
