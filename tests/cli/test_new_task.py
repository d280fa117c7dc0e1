"""``slime new-task`` writes tasks whose own tests pass and whose flags can start a run."""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from slime.arguments import validated_args
from slime.cli.main import main
from slime.cli.new_task import FORMS
from slime.utils.types import Sample
from tests.run_args import plugin_args
from tools.make_tiny_model import main as make_tiny_model

ALL = {"README.md", "make_data.py", "run.sh", "run.yaml", "task.py", "test_task.py"}
OWN = {
    "multi-turn": {"sft.yaml"},
    "single-turn": {"sft.yaml"},
    "environment": {"sft.yaml"},
    "agent": {"sft.yaml", "agent.py"},
    "distillation": {"sft.yaml", "teacher.yaml"},
    "sft": {"eval.yaml"},
}
MODULES = ("task", "make_data", "test_task", "agent")


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
    assert {path.name for path in directory.iterdir()} == ALL | OWN[form]
    assert not re.search(r"@[A-Z]+@", (directory / "run.yaml").read_text())
    own = import_module("test_task")
    tests = [getattr(own, name) for name in dir(own) if name.startswith("test_")]
    assert len(tests) >= 3
    for test in tests:
        test()


def made(directory: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves what a run finds there: the data, and models."""
    monkeypatch.setattr(sys, "argv", ["make_data.py"])
    import_module("make_data").main()
    for name in ("model", "model-sft", "model-teacher"):
        shutil.copytree(model, directory / "outputs" / name)


PRACTICE = {
    "multi-turn": ("task.generate", "task.reward", True),
    "single-turn": (None, "task.reward", True),
    "environment": ("task.generate", None, False),
    "agent": ("task.generate", None, False),
    "distillation": (None, "task.reward", True),
}


@pytest.mark.parametrize("form", PRACTICE)
def test_its_flags_can_start_a_run(task, form, model, monkeypatch) -> None:
    made(task(form), model, monkeypatch)
    imitation = validated_args(["--config", "sft.yaml", "--save-hf", "outputs/another"])
    files = [word for file in sorted(Path().glob("[rt]*.yaml")) for word in ("--config", file.name)]
    practice = validated_args([*files, "--lr", "1e-3"])
    assert imitation.loss_type == "sft_loss" and imitation.lr == 4e-3
    found = practice.custom_generate_function_path, practice.custom_rm_path, practice.apply_chat_template
    assert found == PRACTICE[form]
    assert (practice.lr, practice.save) == (1e-3, "outputs/run")
    assert practice.use_opd == (form == "distillation")
    assert practice.eval_datasets[0].name == "held_out"


def test_imitation_alone_is_judged_by_answers(task, model, monkeypatch) -> None:
    made(task("sft"), model, monkeypatch)
    args = validated_args(["--config", "run.yaml"])
    assert args.loss_type == "sft_loss" and not args.debug_train_only
    assert args.eval_datasets[0].name == "held_out" and args.eval_datasets[0].apply_chat_template


def test_a_teacher_alone_teaches_where_rewards_are_measured(task) -> None:
    task("distillation")
    own, args = import_module("task"), plugin_args()
    samples = [Sample(reward=1.0), Sample(reward=0.1)]
    assert own.measured_only(args, samples) == ([1.0, 0.1], [0.0, 0.0])


def test_it_overwrites_nothing(tmp_path, capsys) -> None:
    (tmp_path / "mine").write_text("kept")
    assert main(["new-task", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: is not empty (wanted: a new directory)\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_its_script_runs_as_it_stands(task) -> None:
    directory = task("multi-turn")
    assert subprocess.run(["bash", "-n", "run.sh"], check=False).returncode == 0
    assert (directory / "run.sh").stat().st_mode & 0o111
