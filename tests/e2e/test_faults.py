"""No process outlives its run, and a lost one ends it by name."""

import os
import random
import re
import signal
import subprocess
import time

import httpx
import psutil
import pytest

from slime.processes.supervisor import KERNEL_LOG
from slime.training.checkpoint_dir import find_checkpoint
from tests.scarcity import memory_group, small_disk
from tests.warm_cluster import GPUS

pytestmark = pytest.mark.e2e

LONG = ["--colocate", "--num-rollout", 1000]
NO_TRAINER = ["--debug-rollout-only"]


@pytest.fixture
def training(start, rl_flags):
    """A run in the middle of its work."""
    return _in_its_middle(start([*rl_flags, *LONG]))


@pytest.fixture
def training_alone(start_alone, rl_flags):
    """Trains with a Ray cluster of its own."""
    return _in_its_middle(start_alone([*rl_flags, *LONG]))


def listens_on(pid: int) -> list[tuple[str, str, int]]:
    """Name of the process, address and port."""
    try:
        process = psutil.Process(pid)
        connections = process.net_connections("inet")
        return [(process.name(), *found.laddr) for found in connections if found.status == "LISTEN"]
    except psutil.Error:  # it has ended
        return []


def _in_its_middle(run):
    run.wait_for(lambda: len(run.rows("train")) >= 1, "the first step")
    return run


@pytest.mark.parametrize(
    ("victim", "fragments"),
    [
        ("router", ["sglang::router"]),
        ("engine", ["slime.backends.embedded_engine"]),
        ("rank 0", ["ray::TrainRayActor"]),
    ],
)
def test_killing_a_process_ends_the_run_with_its_name(victim: str, fragments: list[str], training) -> None:
    pid = training.pid_of(*fragments)
    os.kill(pid, signal.SIGKILL)
    assert training.wait(300) == 1
    last = training.output.strip().splitlines()[-1]
    assert last.startswith("error: ") and victim in last
    if victim == "rank 0":
        assert last.startswith("error: actor: ") and f"rank 0 (process {pid} on " in last
        assert "killed by SIGKILL (somebody sent it, or the kernel for want of memory)" in last
    training.expect_no_processes()


@pytest.mark.parametrize(
    ("victim", "fragments"),
    [
        # As an engine, and as the manager: tests/processes/test_child.py, tests/ray/test_process_watch.py.
        pytest.param("router", ["sglang::router"], marks=pytest.mark.nightly),
        ("engine", ["slime.backends.embedded_engine"]),
        pytest.param("rank 0", ["ray::TrainRayActor"], marks=pytest.mark.nightly),
        ("rollout manager", ["ray::RolloutManager"]),
    ],
)
def test_a_process_that_is_stopped_ends_the_run_with_its_name(
    victim: str, fragments: list[str], training
) -> None:
    os.kill(training.pid_of(*fragments), signal.SIGSTOP)
    assert training.wait(300) == 1
    last = training.output.strip().splitlines()[-1]
    assert last.startswith("error: ") and victim in last and "is stopped (SIGSTOP)" in last
    training.expect_no_processes()


@pytest.mark.parametrize(
    "programs",
    [
        # None of them answers then: whoever waits for either waits.
        pytest.param(["gcs/gcs_server", "raylet/raylet"], id="both"),
        pytest.param(["gcs/gcs_server"], id="gcs", marks=pytest.mark.nightly),
        pytest.param(["raylet/raylet"], id="raylet", marks=pytest.mark.nightly),
    ],
)
def test_the_end_does_not_wait_for_a_process_of_ray_that_is_stopped(
    programs: list[str], training_alone
) -> None:
    for pid in [training_alone.pid_of(program) for program in programs]:
        os.kill(pid, signal.SIGSTOP)
    training_alone.process.send_signal(signal.SIGTERM)
    _expect_terminated(training_alone)


@pytest.mark.parametrize(
    ("program", "name", "signum"),
    [
        # A step needs it for nothing: it is missed once something has to be started again.
        pytest.param("gcs/gcs_server", "gcs_server", signal.SIGSTOP, id="gcs stopped"),
        pytest.param("raylet/raylet", "raylet", signal.SIGSTOP, id="raylet", marks=pytest.mark.nightly),
        pytest.param("raylet/raylet", "raylet", signal.SIGKILL, id="killed", marks=pytest.mark.nightly),
    ],
)
def test_a_run_ends_by_the_name_of_a_process_of_ray_that_is_stopped_or_gone(
    program: str, name: str, signum: int, training_alone
) -> None:
    pid = training_alone.pid_of(program)
    os.kill(pid, signum)
    assert training_alone.wait(300) == 1
    last = training_alone.output.strip().splitlines()[-1]
    assert last.startswith(f"error: Ray's {name} (process {pid}) ") and "Ray cannot go on without it" in last
    training_alone.expect_no_processes()


def _expect_terminated(run):
    assert run.wait(300) == 143
    lines = run.output.strip().splitlines()
    assert lines[-1] == "terminated by SIGTERM"
    assert "***" not in run.output and "Traceback" not in run.output
    assert [line for line in lines[:-1] if line.startswith("rollout ") and " step " not in line] == []
    run.expect_no_processes()


def _answer_without_a_key(port: int) -> int:
    """Status of the answer to a request to generate."""
    url = f"http://127.0.0.1:{port}/generate"
    return httpx.post(url, json={"text": "a"}, timeout=120, trust_env=False).status_code


def test_a_run_listens_on_loopback_alone_with_a_key_and_ctrl_c_stops_everything(training_alone) -> None:
    addresses = [address for pid in training_alone.processes() for address in listens_on(pid)]
    # Of Ray, router, engines and trainer: an empty list would hold nothing.
    assert len(addresses) > 8
    assert not [found for found in addresses if not found[1].removeprefix("::ffff:").startswith("127.")]
    # Other users of the machine reach loopback, too. The router's second port has nothing but its metrics.
    engine = training_alone.processes()[training_alone.pid_of("slime.backends.embedded_engine")]
    assert _answer_without_a_key(int(re.search(r"--port=(\d+)", engine)[1])) == 401
    ports = [port for _, _, port in listens_on(training_alone.pid_of("sglang::router"))]
    assert sorted(_answer_without_a_key(port) for port in ports) == [200, 401]
    training_alone.process.send_signal(signal.SIGINT)
    assert training_alone.wait(300) == 130
    assert training_alone.output.strip().splitlines()[-1] == "interrupted"
    training_alone.expect_no_processes()


@pytest.mark.nightly  # tests/ray/test_cluster.py holds that Ray is not asked to end then
def test_sigterm_to_all_of_a_run_stops_everything_and_says_no_more_than_that(training_alone) -> None:
    os.killpg(training_alone.process.pid, signal.SIGTERM)
    _expect_terminated(training_alone)


def test_sigterm_stops_what_a_run_has_in_the_cluster_of_others(training) -> None:
    training.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    training.process.send_signal(signal.SIGTERM)  # impatience does not interrupt the end
    _expect_terminated(training)


@pytest.mark.nightly
@pytest.mark.parametrize("to_group", [False, True])
def test_sigterm_at_any_moment_ends_a_run_in_time(start_alone, rl_flags, to_group: bool, tmp_path) -> None:
    """From before Ray's start to the first saves, of which each rollout has one."""
    moments = random.Random(7)
    for number in range(12):
        save = ["--save", tmp_path / f"save{number}", "--save-interval", 1]
        run = start_alone([*rl_flags, *LONG, *save])
        time.sleep(moments.uniform(1, 30))
        sent = time.monotonic()
        (os.killpg if to_group else os.kill)(run.process.pid, signal.SIGTERM)
        _expect_terminated(run)
        assert time.monotonic() - sent < 10 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_a_reward_that_exits_ends_the_run_with_its_name(start, rl_flags) -> None:
    run = start([*rl_flags, *NO_TRAINER, "--custom-rm-path", "tests.e2e.plugins.exiting_reward"])
    assert run.wait() == 1
    last = run.output.splitlines()[-1]
    assert last.startswith("error: ") and "exiting_reward failed on sample" in last
    run.expect_no_processes()


def test_sigkill_of_the_driver_stops_everything(training_alone) -> None:
    training_alone.kill()
    training_alone.expect_no_processes()


def test_a_failing_reward_function_ends_the_run_with_its_cause(start, rl_flags) -> None:
    run = start([*rl_flags, *NO_TRAINER, "--custom-rm-path", "tests.e2e.plugins.broken_reward"])
    assert run.wait() == 1
    last = run.output.splitlines()[-1]  # the traceback ends with the cause as well
    assert last.startswith("error: ") and "RuntimeError: this reward is broken" in last
    run.expect_no_processes()


@pytest.mark.nightly
def test_a_disk_that_stays_full_ends_the_run_with_its_name(start, rl_flags, tmp_path) -> None:
    """A real one: the record of the flags has room on it, a checkpoint has not."""
    with small_disk(tmp_path / "disk", "512k") as disk:
        saves = ["--save", disk, "--save-interval", 1, "--max-failed-saves", 1, "--num-rollout", 9]
        run = start([*rl_flags, "--colocate", *saves])
        assert run.wait(300) == 1
        last = run.output.splitlines()[-1]
        assert last.startswith(f"error: checkpoint {disk} could not be written: rank 0: ")
        assert "full disk" in last or "No space left on device" in last
        assert "2 saves in a row failed (--max-failed-saves 1)" in last
        run.expect_no_processes()


@pytest.mark.nightly
def test_a_disk_that_is_full_for_a_while_costs_the_checkpoint_of_that_while(
    start, rl_flags, tmp_path
) -> None:
    with small_disk(tmp_path / "disk", "512k") as disk:
        saves = ["--save", disk, "--save-interval", 1, "--keep-checkpoints", 2, "--max-failed-saves", 50]
        run = start([*rl_flags, "--colocate", "--num-rollout", 60, *saves])
        told = "the run goes on without this checkpoint"
        run.wait_for(lambda: told in run.output, told, timeout=200)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        run.expect_success(timeout=300)
        assert find_checkpoint(disk)[0] == 59


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("victim", "fragment"),
    [("rank 0", "ray::TrainRayActor"), ("engine", "slime.backends.embedded_engine")],
)
def test_a_process_that_the_kernel_kills_for_memory_ends_the_run_so(victim, fragment, training) -> None:
    """In a control group whose limit is as good as nothing."""
    pid = training.pid_of(fragment)
    with memory_group(f"slime-test-{os.getpid()}", 1 << 20) as group:
        group.take(pid)
        assert training.wait(300) == 1
        last = training.output.strip().splitlines()[-1]
        training.expect_no_processes()
    assert last.startswith("error: ") and victim in last and "SIGKILL" in last
    if os.access(KERNEL_LOG, os.R_OK):
        assert f"the kernel says: Memory cgroup out of memory: Killed process {pid} (" in last


def test_too_small_a_cluster_is_refused_with_both_numbers(start, rl_flags) -> None:
    run = start([*rl_flags, "--actor-num-gpus-per-node", GPUS, "--num-gpus-per-node", GPUS])
    assert run.wait() != 0
    last = run.output.splitlines()[-1]
    assert last.startswith("error: ") and f"needs {GPUS + 1} GPUs, found {GPUS}" in last
    run.expect_no_processes()
