"""``slime new-task`` writes tasks whose own tests pass and whose flags can start a run."""

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from slime.arguments import validated_args
from slime.cli.main import main
from slime.cli.new_task import FORMS
from tools.make_tiny_model import main as make_tiny_model

FILES = ["README.md", "make_data.py", "run.sh", "run.yaml", "sft.yaml", "task.py", "test_task.py"]
MODULES = ("task", "make_data", "test_task")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(["--output", str(path), "--hidden-size", "32", "--num-layers", "1", "--head-dim", "8"])
    return path


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a form, and makes its directory the one that we are in."""

    def write(form: str) -> Path:
        directory = tmp_path / "my task"
        assert main(["new-task", str(directory), "--form", form]) == 0
        monkeypatch.chdir(directory)
        monkeypatch.syspath_prepend(directory)
        return directory

    before = {name: sys.modules.pop(name, None) for name in MODULES}
    yield write
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update({name: module for name, module in before.items() if module})


@pytest.mark.parametrize("form", FORMS)
def test_its_own_tests_pass(task, form) -> None:
    directory = task(form)
    assert sorted(path.name for path in directory.iterdir()) == FILES
    own = import_module("test_task")
    tests = [getattr(own, name) for name in dir(own) if name.startswith("test_")]
    assert len(tests) >= 3
    for test in tests:
        test()


@pytest.mark.parametrize("form", FORMS)
def test_its_flags_can_start_a_run(task, form, model, monkeypatch) -> None:
    directory = task(form)
    monkeypatch.setattr(sys, "argv", ["make_data.py"])
    import_module("make_data").main()
    for name in ("model", "model-sft"):
        shutil.copytree(model, directory / "outputs" / name)
    imitation = validated_args(["--config", "sft.yaml", "--save-hf", "outputs/another"])
    practice = validated_args(["--config", "run.yaml", "--lr", "1e-3"])
    assert imitation.loss_type == "sft_loss" and imitation.lr == 4e-3
    assert (practice.lr, practice.custom_rm_path, practice.save) == (1e-3, "task.reward", "outputs/run")
    assert practice.custom_generate_function_path == ("task.generate" if form == "multi-turn" else None)
    assert practice.eval_datasets[0].name == "held_out"


def test_it_overwrites_nothing(tmp_path, capsys) -> None:
    (tmp_path / "mine").write_text("kept")
    assert main(["new-task", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: is not empty (wanted: a new directory)\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_its_script_runs_as_it_stands(task) -> None:
    directory = task("multi-turn")
    assert subprocess.run(["bash", "-n", "run.sh"], check=False).returncode == 0
    assert (directory / "run.sh").stat().st_mode & 0o111
