"""``slime chaos`` as a person starts it, on a program that stands for ``slime train --supervise``."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from slime.arguments.core.errors import UsageError
from slime.chaos import disturbance, supervised
from slime.cli import chaos
from slime.processes.reaper import SHARED_MEMORY
from tests.page_runs import printed

pytestmark = pytest.mark.slow

# Writes a row each 50 ms, in a driver that is started again when it dies, and goes on where it was. With
# --kills it takes no more than its share of the steps before it has been started again for each of them.
_PROGRAM = """
import json, os, signal, subprocess, sys, time
words = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:])
if "driver" not in words:
    driver = [sys.executable, "-S", __file__, *sys.argv[1:], f"--driver={os.getpid()}"]
    while subprocess.call(driver) != 0:
        if "dies" in words or "supervise" not in words:
            sys.exit(1)
        print("supervisor: the run was killed: it starts again in 0 s (1 of 5)", file=sys.stderr, flush=True)
    if "leaves" in words and "supervise" in words:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    sys.exit(0)
path = words["metrics-file"]
os.makedirs(words["run-dir"], exist_ok=True)
done = open(path).read().count("train") if os.path.exists(path) else 0
with open(path + ".starts", "a") as file:
    file.write(".")
if "sleeps" in words:
    time.sleep(600)
if "hangs" in words and done and "supervise" in words:
    time.sleep(600)
for step in range(done, int(words["steps"])):
    due = int(words.get("kills", 0)) * (step + 1) // int(words["steps"]) * ("supervise" in words)
    while True:
        time.sleep(0.05)
        if os.path.getsize(path + ".starts") > due or os.getppid() != int(words["driver"]):
            break
    if os.getppid() != int(words["driver"]):
        sys.exit(1)
    value = 7 if "differs" in words and "supervise" in words and step == 3 else step
    if not ("skips" in words and step == 2):
        with open(path, "a") as file:
            file.write(json.dumps({"axis": "train", "step": step, "a": value}, separators=(",", ":")) + "\\n")
"""
_COMMAND = """
import sys
from slime.chaos import disturbance, supervised
from slime.cli import chaos
place = sys.argv[1]
supervised.PROGRAM = (sys.executable, "-S", f"{place}/program.py")
disturbance.LOOK_S, disturbance.LONGEST_DELAY_S, disturbance.FIRST_STEP_S = 0.01, 0.1, 0.1
flags = ["--steps=100000", "--save-interval=1"]
sys.exit(chaos.run([f"{place}/chaos", "--faults=1", "--kinds=kill", "--", *flags]))
"""
ROOT = Path(__file__).parents[2]
_SYSTEM = os.statvfs(SHARED_MEMORY)
SHARED_MEMORY_MB = _SYSTEM.f_blocks * _SYSTEM.f_frsize >> 20
FLAGS = ["--steps=25", "--save-interval=1"]


@pytest.fixture(autouse=True)
def program(tmp_path, monkeypatch):
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    monkeypatch.setattr(supervised, "PROGRAM", (sys.executable, "-S", str(path)))
    monkeypatch.setattr(disturbance, "LOOK_S", 0.01)
    monkeypatch.setattr(disturbance, "LONGEST_DELAY_S", 0.1)
    monkeypatch.setattr(disturbance, "FIRST_STEP_S", 0.1)
    monkeypatch.setattr(chaos, "LEAVE_S", 0.5)


@pytest.fixture
def disturb(tmp_path):
    def run(*words, flags=FLAGS):
        status = chaos.run([str(tmp_path / "chaos"), *words, "--", *flags])
        return status, json.loads((tmp_path / "chaos" / "chaos.json").read_text())

    return run


def test_a_run_that_heals_has_no_problem(disturb, tmp_path, capsys):
    status, found = disturb("--faults", "2", "--kinds", "kill", "--twin", flags=[*FLAGS, "--kills=2"])
    assert (status, found["problems"], found["differences"]) == (0, [], [])
    assert [(fault["role"], fault["kind"]) for fault in found["outcomes"]] == [("driver", "kill")] * 2
    assert all(fault["recovered_s"] > 0 and fault["restarts"] >= 1 for fault in found["outcomes"])
    assert "2 of 2 faults (seed 0): no problems." in capsys.readouterr().out
    assert "| driver | kill | 2 | 0 | 2 |" in (tmp_path / "chaos" / "chaos.md").read_text()


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--dies", r"the run ended with exit status 1 \(wanted: 0\)"),
        ("--hangs", "no step within 3 s after kill of driver"),
        ("--leaves", r"process \d+ is left: sleep 600"),
        ("--differs", "1 values of the metrics differ from the twin's"),
        ("--skips", "optimizer steps without metrics: 2"),
    ],
)
def test_what_is_not_as_it_should_be_is_named(flag, problem, disturb):
    twin = ["--twin"] if flag == "--differs" else []
    stuck_after = "3" if flag == "--hangs" else "60"
    words = ["--faults", "1", "--kinds", "kill", "--stuck-after", stuck_after, *twin]
    status, found = disturb(*words, flags=[*FLAGS, flag, "--kills=1"])
    assert status == 1
    assert any(re.match(problem, told) for told in found["problems"]), found["problems"]


def test_a_run_that_is_stuck_before_any_fault_is_ended(disturb):
    words = ["--faults", "1", "--victims", "gcs", "--stuck-after", "1"]
    status, found = disturb(*words, flags=["--save-interval=1", "--steps=1", "--sleeps"])
    assert status == 1 and found["outcomes"] == []
    assert found["problems"][0].startswith("no step within 1 s after the start")


def test_nothing_runs_on_after_a_run_that_is_stuck(disturb, tmp_path):
    flags = [*FLAGS, "--hangs", "--kills=1"]
    disturb("--faults", "1", "--kinds", "kill", "--stuck-after", "0.5", flags=flags)
    _await_end_of(str(tmp_path / "program.py"))


def _await_end_of(program):
    """Returns when nothing runs it; what has been killed may take a moment to end."""
    deadline = time.monotonic() + 60
    while [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if program in (process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE  # it has ended, and waits for its parent
    ]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_the_run_ends_with_the_command(signum, tmp_path):
    program, python = str(tmp_path / "program.py"), [sys.executable, "-c", _COMMAND, str(tmp_path)]
    with subprocess.Popen(python, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline()  # a fault struck
        process.send_signal(signum)
        assert process.wait(60) == (143 if signum == signal.SIGTERM else -9)
    _await_end_of(program)


def test_a_twin_that_fails_is_no_twin(tmp_path, capsys):
    assert chaos.run([str(tmp_path / "chaos"), "--twin", "--", "--save-interval=1"]) == 2
    assert "error: the undisturbed run ended with exit status 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "flags", "error"),
    [
        (["--kinds", "kill,burn"], FLAGS, "--kinds: found 'burn' (wanted: of kill, stop, pause, term, slow"),
        (
            ["--kinds", "kill,shm", "--shm-limit", "0"],
            FLAGS,
            f"--kinds shm: {SHARED_MEMORY} has {SHARED_MEMORY_MB} MB (wanted: at most the 0 of --shm-limit)",
        ),
        (["--kinds", "term", "--victims", "driver"], FLAGS, "--kinds term --victims driver: ends the run"),
        (["--kinds", ","], FLAGS, "--kinds: found none"),
        (["--victims", "cook"], FLAGS, "--victims: found 'cook' (wanted: of driver, engine, router"),
        (["--faults", "0"], FLAGS, "--faults: found 0 (wanted: 1 or more)"),
        (["--stuck-after", "nan"], FLAGS, "--stuck-after: found nan (wanted: more than 0)"),
        ([], [], "found no flags of a run"),
        ([], ["--steps=3"], "--save-interval: not among the flags"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(own, flags, error, tmp_path, capsys):
    began = time.monotonic()
    assert chaos.run([str(tmp_path / "chaos"), *own, "--", *flags]) == 2
    assert f"error: {error}" in capsys.readouterr().err
    assert time.monotonic() - began < 60 and not any((tmp_path / "chaos").glob("*"))


def test_what_the_machine_cannot_do_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chaos, "refusal", lambda: "pidfd_getfd: Function not implemented")
    assert chaos.run([str(tmp_path / "chaos"), "--kinds", "cut", "--", *FLAGS]) == 2
    assert "error: --kinds cut: pidfd_getfd: Function not implemented" in capsys.readouterr().err
    system = SimpleNamespace(f_blocks=1 << 17, f_bavail=1 << 17, f_frsize=1 << 10)
    monkeypatch.setattr(os, "statvfs", lambda place: system)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=255 << 20))
    assert chaos.run([str(tmp_path / "chaos"), "--kinds", "shm", "--", *FLAGS]) == 2
    assert "error: --kinds shm: the machine has 255 MB left (wanted: 256" in capsys.readouterr().err
    assert not any((tmp_path / "chaos").glob("*"))


def test_a_directory_that_holds_something_is_left_alone(tmp_path, capsys):
    assert chaos.run([str(tmp_path), "--", *FLAGS]) == 2
    assert f"error: {tmp_path}: is not empty (wanted: a new directory)" in capsys.readouterr().err


def test_the_commands_of_pages_are_read(monkeypatch):
    seen = []

    def enough(flags):
        seen.append(flags)
        raise UsageError("enough")

    monkeypatch.setattr(chaos, "_new_directory", Path)
    monkeypatch.setattr(chaos, "_require_checkpoints", enough)
    for command in printed("slime chaos"):
        assert chaos.run(list(command.words[2:])) == 2
    assert ["--config", "run.yaml", "--use-fault-tolerance", "--save-interval", "1"] in seen
