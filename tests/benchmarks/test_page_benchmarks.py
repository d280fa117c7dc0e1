"""Benchmarks that look at git, at the suite or at mutants, on something small.

As CONTRIBUTING.md, docs/performance.md and docs/conformance.md print them.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import compare, mutation, sglang_runs, suite_times
from tests.page_runs import printed

ROOT = Path(__file__).parents[2]
Start = Callable[..., int]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs the command of a page in this process, with these words behind it; returns its status."""

    def run(module: ModuleType, *further: str) -> int:
        name = module.__name__.replace(".", "/")
        (command,) = printed(f"python {name}.py")
        monkeypatch.setattr(sys, "argv", [*command.words[1:], *further])
        try:
            return int(module.main() or 0)
        except SystemExit as end:
            return int(end.code or 0)

    return run


def test_fresh_results_are_held_against_the_last_commit(tmp_path: Path, monkeypatch, start, capsys) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    results = tmp_path / compare.RESULTS
    results.mkdir(parents=True)
    for name in compare.RATIOS:
        (results / f"{name}.json").write_bytes((ROOT / compare.RESULTS / f"{name}.json").read_bytes())
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Results"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    assert start(compare) == 0 and ", 0 worse" in capsys.readouterr().out
    (results / "gae.json").write_text('{"ratio": {"chunked": {"cpu_s": 1e-9}}}')
    assert start(compare) == 1 and "gae/ratio/chunked/cpu_s" in capsys.readouterr().out


def test_the_tiers_of_the_suite_are_measured(tmp_path: Path, monkeypatch, start, capsys) -> None:
    """Whose files are one, of a single test: what the script gets is what pytest is to record."""
    (tmp_path / "scripts").mkdir()
    test = tmp_path / "test_one.py"
    test.write_text("def test_one() -> None:\n    pass\n")
    line = f"{sys.executable} -m pytest -q -p tests.plugins.records -p no:cacheprovider {test}\n"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "scripts/test.sh").write_text(line)
    monkeypatch.setattr(suite_times, "ROOT", tmp_path)
    monkeypatch.setattr(suite_times, "RESULTS", tmp_path / "times.json")
    assert start(suite_times) == 0
    told = json.loads((tmp_path / "times.json").read_text())
    assert {name: tier["tests"] for name, tier in told["tiers"].items()} == {"fast": 1, "whole": 1}
    assert "whole: 1 tests in" in capsys.readouterr().out and len(told["files"]) == 1


def test_what_runs_with_sglang_measured_is_written(tmp_path: Path, monkeypatch, start) -> None:
    from tests.benchmarks.test_sglang_runs import REPORT

    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/test-sglang.sh").write_text(f"cat >\"${{@: -1}}\" <<'END'\n{REPORT}\nEND\nexit 1\n")
    monkeypatch.setattr(sglang_runs, "ROOT", tmp_path)
    monkeypatch.setattr(sglang_runs, "RESULTS", tmp_path / "runs.json")
    assert start(sglang_runs) == 1
    told = json.loads((tmp_path / "runs.json").read_text())
    assert {kind: row["seconds"] for kind, row in told.items()} == {"PPO": 61, "fp8 engines": 9}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_mutants_of_a_module_are_killed(tmp_path: Path, monkeypatch) -> None:
    (command,) = printed("python benchmarks/mutation.py")
    module = "slime/training/estimators/distillation.py"
    monkeypatch.setattr(mutation, "RESULTS", tmp_path / "mutants.json")
    monkeypatch.setattr(sys, "argv", [module if word == "MODULE" else word for word in command.words[1:]])
    mutation.main()
    told = json.loads((tmp_path / "mutants.json").read_text())
    assert told["killed"] == told["mutants"] > 3 and [*told["modules"]] == [module]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "small"),
    [
        ("planted_faults", ["--only", "the router does not strike a dead worker"]),
        ("sampled_mutants", ["--count", "1", "--only", "rollout"]),
    ],
)
def test_faults_are_found(name: str, small: list[str], tmp_path: Path) -> None:
    """In a process of its own: it forks and ends what runs below it."""
    (command,) = printed(f"python benchmarks/{name}.py")
    output = tmp_path / "found.json"
    words = [sys.executable, *command.words[1:], *small, "--output", str(output)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(output.read_text())
