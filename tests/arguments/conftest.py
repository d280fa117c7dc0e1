"""A checkpoint that looks real to the arguments, and the words of a command line that is in order."""

import json
from pathlib import Path

import pytest

from slime.arguments import parse_args
from tools.make_tiny_model import make_config, make_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A Qwen3 of 3 layers, 4 heads, 2 key-value heads, vocabulary 320; its weights are an empty file."""
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = make_tokenizer()
    make_config(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "model.safetensors").touch()
    return path


@pytest.fixture
def altered_checkpoint(checkpoint, tmp_path):
    """A copy of the checkpoint with other values in its config.json."""

    def alter(**values) -> Path:
        path = tmp_path / "altered"
        path.mkdir()
        for file in checkpoint.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        config = json.loads((path / "config.json").read_text()) | values
        (path / "config.json").write_text(json.dumps(config))
        return path

    return alter


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"{i}+1", "label": str(i + 1)}) + "\n" for i in range(4)))
    return path


@pytest.fixture
def words(checkpoint, data):
    """``words(save="x", seed=None, colocate=True)``: a good command line with some flags changed.

    None leaves a flag out, True gives it no value, a list gives it several.
    """

    def build(**changes) -> list[str]:
        flags = {
            "hf_checkpoint": checkpoint,
            "prompt_data": data,
            "label_key": "label",
            "rm_type": "math",
            "num_rollout": 2,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 16,
            "actor_num_gpus_per_node": 1,
            "colocate": True,
        } | changes
        line: list[str] = []
        for name, value in flags.items():
            if value is None:
                continue
            values = [] if value is True else value if isinstance(value, list) else [value]
            line += ["--" + name.replace("_", "-"), *map(str, values)]
        return line

    return build


@pytest.fixture
def refusal(capsys):
    """``refusal(words)``: the one line that bad input gets, after the checks on how it is given."""

    def refuse(line: list[str]) -> str:
        with pytest.raises(SystemExit) as stop:
            parse_args(line)
        assert stop.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert printed.err.endswith("\n")
        assert printed.err.count("\n") == 1
        return printed.err.removeprefix("error: ").rstrip("\n")

    return refuse
