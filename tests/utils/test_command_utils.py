"""Launch scripts in Python, without what they launch."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from slime.utils.external_utils.command_utils import (
    REPOSITORY,
    ExecuteTrainConfig,
    check_has_nvlink,
    convert_checkpoint,
    exec_command,
    execute_train,
    fp8_cast_bf16,
    get_bool_env_var,
    get_default_wandb_args,
    model_args,
    rsync_simple,
    save_to_temp_file,
)

NOTE = """import json, os, sys, pathlib
noted = [sys.argv[1:], dict(os.environ), os.getcwd()]
pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(noted))
sys.exit("--fail" in sys.argv)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "note.py"
    path.write_text(NOTE)
    return path


def noted(script):
    return json.loads(script.with_suffix(".json").read_text())


def test_a_training_gets_the_flags_of_its_model_and_the_caller_s(script):
    before = []
    execute_train(
        "--lr 1e-6 --run-name 'two words'",
        8,
        "qwen3-30B-A3B",
        train_script=str(script),
        before_ray_job_submit=lambda: before.append(script.with_suffix(".json").exists()),
        extra_env_vars={"A": "1"},
        config=ExecuteTrainConfig(extra_env_vars="B=x=y"),
    )
    words, env, directory = noted(script)
    of_model = model_args("qwen3-30B-A3B")
    assert of_model[:2] == ["--moe-router-dtype", "fp32"] and words[: len(of_model)] == of_model
    assert model_args("qwen3-4B") == []
    assert words[-6:] == ["--lr", "1e-6", "--run-name", "two words", "--num-gpus-per-node", "8"]
    assert (env["A"], env["B"]) == ("1", "x=y") and before == [False]
    assert directory == str(REPOSITORY)


def test_the_caller_s_number_of_gpus_stands(script):
    execute_train("--num-gpus-per-node=2", 8, None, train_script=str(script))
    assert noted(script)[0] == ["--num-gpus-per-node=2"]


def test_a_training_that_fails_is_an_error(script):
    with pytest.raises(subprocess.CalledProcessError):
        execute_train("--fail", 1, None, train_script=str(script))


def test_what_cannot_be_launched_is_named(script, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=r"megatron_model_type qwen9-1B: wanted one of .*qwen3-4B"):
        execute_train("", 1, "qwen9-1B", train_script=str(script))
    with pytest.raises(ValueError, match="num_nodes 2: RAY_ADDRESS is not set"):
        execute_train("", 1, None, train_script=str(script), config=ExecuteTrainConfig(num_nodes=2))
    with pytest.raises(ValueError, match="multinode"):
        convert_checkpoint("m", "qwen3-4B", 1, multinode=True)
    assert not script.with_suffix(".json").exists()


def test_a_checkpoint_is_converted_once(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(
        "slime.utils.external_utils.command_utils.model_args", lambda name: ["--num-layers", "2"]
    )
    convert_checkpoint("m", "qwen3-4B", 4, extra_args="--fp32", dir_dst=str(tmp_path), hf_checkpoint="/hf")
    (tmp_path / "m_torch_dist").mkdir()
    convert_checkpoint("m", "qwen3-4B", 4, dir_dst=str(tmp_path))
    (command,) = commands
    assert command[command.index("--nproc-per-node") + 1] == "4"
    target = str(tmp_path / "m_torch_dist")
    assert command[-7:] == ["--num-layers", "2", "--hf-checkpoint", "/hf", "--save", target, "--fp32"]


def test_wandb_is_asked_for_where_there_is_a_key_and_the_key_is_in_no_flag(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert get_default_wandb_args("tests/x/test_short.py") == ""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    words = get_default_wandb_args("tests/x/test_short.py", "pre", "id")
    assert words.split() == ["--use-wandb", "--wandb-project", "slime-test_short", "--wandb-group", "pre_id"]
    assert get_bool_env_var("WANDB_API_KEY") is False and get_bool_env_var("NOT_SET", "True")


def test_a_command_of_bash_is_run_and_its_failure_told(capfd):
    assert exec_command("echo one; echo two >&2", capture_output=True) == "one\n"
    assert exec_command("test -f train.py && echo here") is None
    assert "here" in capfd.readouterr().out
    with pytest.raises(subprocess.CalledProcessError):
        exec_command("exit 3")


def test_a_text_gets_a_file_of_its_own():
    first, second = save_to_temp_file("a: 1\n", "yaml"), save_to_temp_file("b", "yaml")
    try:
        assert first != second and first.endswith(".yaml") and Path(first).read_text() == "a: 1\n"
    finally:
        for path in (first, second):
            os.unlink(path)


def test_tools_are_called_by_their_names(tmp_path, monkeypatch):
    """rsync and nvidia-smi that note what they got."""
    for name, code in (("rsync", 'echo "$@" > "$NOTED"'), ("nvidia-smi", 'echo "GPU0 X NV18"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    rsync_simple(str(tmp_path / "a b"), str(tmp_path / "c"))
    assert (tmp_path / "noted").read_text().split()[-3:] == [f"{tmp_path}/a", "b/", f"{tmp_path}/c"]
    assert (tmp_path / "c").is_dir() and check_has_nvlink()
    (tmp_path / "c" / "model.safetensors.index.json").write_text("{}")
    fp8_cast_bf16(str(tmp_path / "a b"), str(tmp_path / "c"))  # is there already
