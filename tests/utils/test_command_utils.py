"""Launch scripts in Python, without what they launch."""

import json
import subprocess

import pytest

from slime.utils.external_utils.command_utils import (
    REPOSITORY,
    ExecuteTrainConfig,
    convert_checkpoint,
    execute_train,
    get_bool_env_var,
    get_default_wandb_args,
    model_args,
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
        "qwen3-4B",
        train_script=str(script),
        before_ray_job_submit=lambda: before.append(script.with_suffix(".json").exists()),
        extra_env_vars={"A": "1"},
        config=ExecuteTrainConfig(extra_env_vars="B=x=y"),
    )
    words, env, directory = noted(script)
    assert words[: len(model_args("qwen3-4B"))] == model_args("qwen3-4B")
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
