"""The commands that pages print can be given as printed; those that take little are."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import pyarrow
import pyarrow.parquet
import pytest

from slime.arguments import validated_args
from slime.arguments.core.config_files import expand
from slime.cli.main import main
from tests.page_commands import NOT_HERE, PAGES, PROGRAMS, ROOT, SHELL, Command, blocks, commands_of, fault

COMMANDS = [command for page in PAGES for command in commands_of(page)]


def test_every_command_of_a_page_is_one_that_its_program_takes() -> None:
    assert len(COMMANDS) > 100
    faults = {str(command): why for command in COMMANDS if (why := fault(command))}
    assert faults == {}


def test_what_is_not_tried_here_stands_in_some_page() -> None:
    assert [words for words in NOT_HERE if not any(command.begins(*words) for command in COMMANDS)] == []
    assert {command.words[0] for command in COMMANDS} <= {*PROGRAMS, *SHELL}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("slime train --lr fast", "--lr: invalid float value: 'fast'"),
        ("slime tarin --lr 1", "tarin: no command"),
        ("slime new-task t --frm sft", "--frm: not among its options"),
        ("python train.py --learning-rate 1", "--learning-rate: unknown flag"),
        ("python tools/nothing.py", "tools/nothing.py: not there"),
        ("python tools/make_tiny_model.py --out x", "--out: not among its options"),
        ("bash scripts/run-qwen3-4B.sh --num-rolout 3", "--num-rolout: unknown flag"),
        ("bash scripts/test.sh --quick", "--quick: not among its options"),
        ("bash scripts/ray-cluster.sh A b -- slime train --lr x", "--lr: invalid float value"),
        ("make", "make: nobody knows how to try it"),
    ],
)
def test_a_command_that_is_wrong_is_noticed(words: str, why: str) -> None:
    found = fault(Command("docs/page.md", tuple(words.split())))
    assert found is not None and found.startswith(why)


def test_blocks_are_bash() -> None:
    for page in PAGES:
        for code in blocks(page):
            done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{page}: {done.stderr}"


def block_with(page: str, text: str, language: str = "bash") -> str:
    (found,) = (code for code in blocks(ROOT / page, language) if text in code)
    return found


def test_a_task_is_written_as_printed(tmp_path: Path) -> None:
    """All but its last line, which trains: tests/e2e/test_new_task.py does that."""
    *lines, last = block_with("docs/your-own-task.md", "slime new-task").splitlines()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "\n".join([*lines, f"bash -n {last.removeprefix('bash ')}"])
    environment = os.environ | {"PATH": path}
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, check=True, timeout=600)
    assert last == "bash run.sh" and (tmp_path / "my-task/run.sh").is_file()


def test_files_of_flags_in_pages_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/models")
    (tmp_path / "run.yaml").write_text(block_with("docs/config-files.md", "run_dir:", "yaml"))
    found = expand(["--config", str(tmp_path / "run.yaml")])
    assert found.mistakes == []
    assert {"--hf-checkpoint", "--lr", "--trace"} <= {word.partition("=")[0] for word in found.words}


def test_the_file_for_a_command_line_is_printed_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = (c for c in COMMANDS if "--write-config" in c.words and "--fp32" in c.words)
    words = ["--hf-checkpoint", "m", "--prompt-data", "d", "--rollout-batch-size", "1"]
    assert main([*command.words[1:], *words]) == 0
    assert re.search(r"^  lr: 0\.0001$", capsys.readouterr().out, re.MULTILINE)


@pytest.fixture
def plug_in(tmp_path: Path) -> Iterator[Path]:
    """A home with the two files of the page's task; what they import is forgotten afterwards."""
    task = tmp_path / "slime-tasks/my_task"
    task.mkdir(parents=True)
    for name, part in (("generate", "async def generate("), ("reward", "async def reward(")):
        (task / f"{name}.py").write_text(block_with("docs/customization.md", part, "python"))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_task"]:
        del sys.modules[name]


TESTING = block_with("docs/customization.md", "make_tiny_model.py")


def test_the_flags_for_a_plug_in_of_the_page_can_start_a_run(plug_in, monkeypatch) -> None:
    monkeypatch.chdir(plug_in)
    monkeypatch.syspath_prepend(plug_in / "slime-tasks")
    for command in commands_of(ROOT / "docs/customization.md"):
        if command.begins("python", "tools/make_tiny_model.py") or "make_data.py" in " ".join(command.words):
            run_program(command, monkeypatch)
    (words,) = (
        c.words[2:] for c in commands_of(ROOT / "docs/customization.md") if c.begins("python", "train.py")
    )
    args = validated_args(words)
    assert (args.custom_rm_path, args.debug_rollout_only) == ("my_task.reward.reward", True)


def test_yaml_files_of_pages_are_read_by_what_they_are_for(plug_in, monkeypatch) -> None:
    """Data of several sources, an evaluation of two datasets, flags of the critic, a policy with a judge."""
    monkeypatch.chdir(plug_in)
    (tiny,) = (c for c in commands_of(ROOT / "docs/customization.md") if "make_tiny_model.py" in str(c))
    run_program(tiny, monkeypatch)
    Path("data/math").mkdir(parents=True)
    for name in ("math/a.jsonl", "aime-2024.jsonl"):
        Path("data", name).write_text('{"prompt": "1+1", "label": "2"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1"], "label": ["2"]}), "data/code.parquet")
    # Sizes and places of this machine: an engine has one GPU here, the tiny model a context of 1,024 tokens.
    here = {
        "/data/": f"{plug_in}/data/",
        "/models/judge": "outputs/tiny",
        "/checkpoints/critic": "outputs/tiny",
    }
    here |= {"num_gpus_per_engine: 2": "num_gpus_per_engine: 1", "16384": "512"}
    for name, page, part in YAML:
        text = block_with(page, part, "yaml")
        for printed, ours in here.items():
            text = text.replace(printed, ours)
        Path(f"{name}.yaml").write_text(text)
    args = validated_args(WITH_YAML.split())
    assert [dataset.name for dataset in args.eval_datasets] == ["aime", "aime_greedy"]
    assert [model.name for model in args.served_models] == ["policy", "judge"]


YAML = (
    ("mixture", "docs/usage.md", "sources:"),
    ("eval", "docs/usage.md", "eval:\n"),
    ("roles", "docs/algorithms/ppo.md", "megatron:"),
    ("fleet", "docs/fleets.md", "# fleet.yaml"),
)
WITH_YAML = """
--hf-checkpoint outputs/tiny --fp32 --prompt-data mixture.yaml --input-key prompt --label-key label
--rm-type math --rollout-batch-size 2 --num-rollout 2 --rollout-max-response-len 64
--actor-num-gpus-per-node 1 --eval-config eval.yaml --eval-interval 1
--advantage-estimator ppo --megatron-config-path roles.yaml
--sglang-config fleet.yaml --rollout-num-gpus 8
"""


def run_program(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(command.words[1:]))
    try:
        run_path(str(ROOT / command.words[1]), run_name="__main__")
    except SystemExit as end:
        assert not end.code


@pytest.mark.nightly
def test_the_plug_in_of_the_page_keeps_to_its_contracts(plug_in: Path) -> None:
    block = block_with("docs/customization.md", "--plugin-module")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(plug_in / "slime-tasks")}
    done = subprocess.run(
        ["bash", "-ec", block], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.nightly
@pytest.mark.e2e
def test_the_plug_in_of_the_page_runs_as_printed(plug_in: Path) -> None:
    """In the repository's root, with the environment of the tests in place of the quickstart's."""
    root = plug_in / "clone"
    root.mkdir()
    for name in ("tools", "examples", "train.py", "slime"):
        (root / name).symlink_to(ROOT / name)
    (root / ".venv").symlink_to(sys.prefix)
    environment = os.environ | {"HOME": str(plug_in)}
    command = ["bash", "-ec", TESTING]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "rollout" in (root / "outputs/metrics.jsonl").read_text()
