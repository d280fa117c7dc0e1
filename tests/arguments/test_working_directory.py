"""Relative paths are those of the command line, also where processes start in another directory."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from slime.arguments import UsageError, validated_args

ADDRESS = "10.0.0.1:6379"


@pytest.fixture
def here(checkpoint, data, tmp_path, monkeypatch) -> Path:
    """A working directory with ``models/own``, ``sets/train.jsonl`` and YAML files that name them."""
    (tmp_path / "models").mkdir()
    (tmp_path / "sets").mkdir()
    (tmp_path / "models/own").symlink_to(checkpoint)
    (tmp_path / "sets/train.jsonl").write_bytes(Path(data).read_bytes())
    datasets = [{"name": "held_out", "path": "sets/train.jsonl@[0:2]", "rm_type": "math"}]
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump({"eval": {"datasets": datasets}}))
    groups = [{"worker_type": "regular", "num_gpus": 1}]
    models = [{"name": "policy", "model_path": "models/own", "server_groups": groups}]
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"sglang": models}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", ADDRESS)
    return tmp_path


def relative(words, **changes):
    given = {"hf_checkpoint": "models/own", "prompt_data": "sets/*.jsonl@[0:4]", "save": "runs/a"}
    given |= {"load": "runs/a", "dump_details": "runs/dump", "eval_config": "eval.yaml", "eval_interval": 1}
    given |= {"sglang_config": "fleet.yaml", "metrics_file": "m.jsonl"}
    return words(**given | changes)


def texts(value):
    """All texts inside, those of mappings, lists and configs included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(asdict(item) if hasattr(item, "__dataclass_fields__") else item)


def test_every_relative_path_of_a_joined_cluster_is_made_absolute(here, words):
    args = validated_args(relative(words))
    assert args.hf_checkpoint == args.synced_checkpoint == f"{here}/models/own"
    assert args.prompt_data == f"{here}/sets/*.jsonl@[0:4]"
    assert args.save == args.load == f"{here}/runs/a"
    assert args.save_debug_rollout_data == f"{here}/runs/dump/rollout_data/{{rollout_id}}.pt"
    assert args.eval_datasets[0].path == f"{here}/sets/train.jsonl@[0:2]"
    assert args.served_models[0].update_weights
    places = ("models/", "sets/", "runs/", "eval.yaml", "fleet.yaml", "m.jsonl")
    assert not [text for text in texts(list(vars(args).values())) if text.startswith(places)]


def test_pairs_of_names_and_files_keep_their_names(here, words):
    (here / "held_out").mkdir()
    pairs = ["held_out", "sets/train.jsonl"]
    args = validated_args(relative(words, eval_config=None, eval_prompt_data=pairs))
    assert args.eval_prompt_data == ["held_out", f"{here}/sets/train.jsonl"]


def test_a_cluster_of_the_run_s_own_has_the_same_directory(here, words, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS")
    args = validated_args(relative(words))
    assert (args.hf_checkpoint, args.save, args.eval_datasets[0].path) == (
        "models/own", "runs/a", "sets/train.jsonl@[0:2]",
    )  # fmt: skip


def test_names_that_are_no_files_stay_names(here, words):
    own = {"data_source_path": "tests.rollout.plugins.BareSource", "prompt_data": "somebody/questions"}
    args = validated_args(relative(words, **own))
    assert args.prompt_data == "somebody/questions"
    with pytest.raises(UsageError, match=r"^--hf-checkpoint Qwen/Qwen3-0.6B"):
        validated_args(relative(words, hf_checkpoint="Qwen/Qwen3-0.6B", sglang_config=None))


def test_a_mixture_of_relative_files_is_refused(here, words):
    sources = [{"name": "own", "path": "sets/train.jsonl"}]
    (here / "mixture.yaml").write_text(yaml.safe_dump({"sources": sources}))
    with pytest.raises(
        UsageError, match=r"^--prompt-data \S+/mixture.yaml: source 'own' has path sets/train"
    ):
        validated_args(relative(words, prompt_data="mixture.yaml"))
    sources[0]["path"] = f"{here}/sets/train.jsonl"
    (here / "mixture.yaml").write_text(yaml.safe_dump({"sources": sources}))
    assert validated_args(relative(words, prompt_data="mixture.yaml")).prompt_data == f"{here}/mixture.yaml"


def test_a_directory_whose_name_would_be_filled_in_is_refused(here, words, monkeypatch):
    (here / "{a}").mkdir()
    monkeypatch.chdir(here / "{a}")
    with pytest.raises(UsageError, match=r"^--save x: a relative path, .* \(wanted: an absolute path\)$"):
        validated_args(words(save="x"))
    assert validated_args(words(save=os.path.join(here, "x"))).save == f"{here}/x"
