"""What scripts of pages start, as printed, with programs that note their words in the environment's place."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.each import hold_each
from tests.page_commands import Command
from tests.page_runs import printed
from tools.quickstart.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
PROGRAMS = ("python", "mypy", "ruff", "shellcheck", "mkdocs", "nvidia-smi", "curl")
# In one write: some run beside each other.
NOTE = '#!/bin/sh\nprintf "%s\\n" "${0##*/} $*" >>"$NOTE"\n'
EXTRAS = ("", "dev,test", "dev,docs,test")
Start = Callable[[Command], list[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs a command in the repository's root and returns what it starts, in an environment that is ready."""
    programs, note = tmp_path / "venv/bin", tmp_path / "note"
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        (programs / name).write_text(NOTE)
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    library = ROOT / "scripts/lib/environment.sh"
    stamps = "".join(
        f'environment_fingerprint {extras} >"{tmp_path}/venv/.installed-{extras or "core"}"\n'
        for extras in EXTRAS
    )
    subprocess.run(["bash", "-ec", f'source "{library}"\n{stamps}'], check=True)
    of_sglang = f'cat pyproject.toml constraints/sglang_cpu.txt | cksum >"{tmp_path}/venv/.installed-sglang"'
    subprocess.run(["bash", "-ec", of_sglang], cwd=ROOT, check=True)
    ours = {
        "SLIME_SGLANG_VENV": str(tmp_path / "venv"),
        "SLIME_VENV": str(tmp_path / "venv"),
        "PYTHON": str(programs / "python"),
        "NOTE": str(note),
    }
    ours |= {"OUT": str(tmp_path / "out"), "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(command: Command) -> list[str]:
        note.unlink(missing_ok=True)
        done = subprocess.run(
            command.words, cwd=ROOT, env=os.environ | ours, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.rstrip() for line in note.read_text().splitlines()]

    return run


def there(line: str) -> bool:
    """Whether every file that a line names is in the repository, and there is one."""
    files = re.findall(r"(?:tests|benchmarks)/[\w/]+(?:\.py)?", line)
    return bool(files) and all((ROOT / file).exists() for file in files)


def test_the_tiers_of_tests_start_what_they_say(start: Start) -> None:
    wanted = {
        "": r"python -m pytest -n \d+ --dist loadfile --no-loadscope-reorder",
        "--fast": r"python -m pytest -n \d+ --dist .* -m not cluster and not slow",
        "--nightly": r"python benchmarks/nightly\.py",
        "--flaky tests/router": r"python -m tests\.flaky tests/router",
        "tests/training -x": r"python -m pytest tests/training -x",
    }

    def check(command: Command) -> None:
        *before, last = start(command)
        words = " ".join(command.words[2:])
        assert re.fullmatch(wanted[words], last)
        checks = {"mypy", "ruff check .", "ruff format --check .", "mkdocs build --quiet --strict"}
        assert checks <= {*before} or words in ("--nightly", "--flaky tests/router")

    hold_each(printed("bash scripts/test.sh"), check, least=len(wanted))


def can_compute_in_batch() -> bool:
    """Whether there is the program for it, and nothing forbids it."""
    if shutil.which("chrt") is None:
        return False
    return subprocess.run(["chrt", "--batch", "0", "true"], stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.skipif(not can_compute_in_batch(), reason="they compute as all programs do then")
def test_what_tests_start_computes_in_batch(start: Start, tmp_path: Path) -> None:
    (tmp_path / "venv/bin/python").write_text('#!/bin/sh\nchrt --pid $$ >>"$NOTE"\n')
    ours = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        *_, policy, _ = start(printed("bash scripts/test.sh")[0])
    finally:
        os.sched_setscheduler(0, ours, os.sched_param(0))
    assert policy.endswith(" SCHED_BATCH")


def test_the_conformance_tests_are_there(start: Start) -> None:
    def check(command: Command) -> None:
        (line,) = start(command)
        assert line.startswith("python -m pytest ") and there(line) and line.count("test_conformance") == 5

    hold_each(printed("bash scripts/conformance.sh"), check, least=2)


def test_tests_of_the_original_and_of_sglang_are_there(start: Start) -> None:
    (original,), (sglang,) = printed("bash scripts/test-original.sh"), printed("bash scripts/test-sglang.sh")
    assert start(original) == ["python -m pytest tests/original"] and (ROOT / "tests/original").is_dir()
    *_, whole, adapters = [line for line in start(sglang) if line.startswith("python -m pytest")]
    assert whole.startswith("python -m pytest -o timeout=300 tests/sglang_cpu tests/") and there(whole)
    assert adapters.endswith("/test_conformance_adapters.py") and there(adapters)


def test_the_quickstart_gets_its_flags(start: Start) -> None:
    def check(command: Command) -> None:
        assert start(command) == [" ".join(("python -P -m tools.quickstart", *command.words[2:]))]

    hold_each(printed("bash scripts/quickstart.sh"), check, least=3)


def test_the_comparison_of_algorithms_gets_those_that_are_named(start: Start) -> None:
    def check(command: Command) -> None:
        (line,) = start(command)
        assert line == " ".join(("python -P -m tools.quickstart.learning", *command.words[2:]))
        assert {*command.words[3:]} <= {*ALGORITHMS}

    hold_each(printed("bash scripts/learning.sh"), check, least=2)


def test_every_piece_for_a_gpu_starts_what_is_there(start: Start) -> None:
    pieces = re.findall(r"^    ([a-zA-Z0-9-]+)\) (?:TAIL|piece)", (ROOT / "scripts/gpu.sh").read_text(), re.M)
    tried = []

    def check(command: Command) -> None:
        lines = start(command)
        asked = [name for name in command.words[2:] if name != "check"]
        started = [line for line in lines if line.startswith("python") and "/" in line]
        assert len(started) == len(asked) and all(map(there, started))
        tried.extend(command.words[2:])

    hold_each(printed("bash scripts/gpu.sh"), check, least=7)
    assert sorted(tried) == sorted(pieces)
