"""The notebook runs from its first cell to its last: with checked flags here, with real runs at night."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.arguments import validated_args
from slime.cli import api

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "examples/notebooks/run_from_python.ipynb"


def run_cells(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the cells have left, in their order, in a directory of their own."""
    monkeypatch.chdir(directory)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    return names


def checked(really: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """A start of a run that holds its flags, and leaves what a run of them would."""

    def run(command: list[str]) -> None:
        if "fast" in Path(command[-1].removeprefix("--config=")).read_text():
            really(command)
        validated_args(command[4:])
        if "--config=sft.yaml" in command:
            shutil.copytree("outputs/model", "outputs/model-sft")
            return
        Path("outputs/run").mkdir()
        rows = [{"axis": "rollout", "step": 0, "rollout/raw_reward": 0.25}]
        rows.append({"axis": "eval", "step": 0, "eval/held_out": 0.5})
        Path("outputs/run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("outputs/run/resolved.yaml").write_text("optimizer:\n  lr: 4e-4\n")

    return run


def test_the_cells_of_the_notebook_fit_together(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(api, "_run", checked(api._run))
    monkeypatch.syspath_prepend(tmp_path / "my-task")
    monkeypatch.delitem(sys.modules, "task", raising=False)
    run_cells(tmp_path, monkeypatch)
    sys.modules.pop("task", None)  # unless the function was found by an earlier test
    shown = capsys.readouterr().out
    assert "  1  0.250  ##########" in shown and "{0: 0.5}" in shown
    assert "status 2: " in shown and "--lr: invalid float value: 'fast'" in shown


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_the_notebook_learns(tmp_path, monkeypatch) -> None:
    scores = run_cells(tmp_path, monkeypatch)["rows"]["eval"]
    assert scores[10]["eval/held_out"] > scores[0]["eval/held_out"] + 0.1
