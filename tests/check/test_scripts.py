"""Every launch script passes ``--check`` for a published model, of which only config.json is there."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.arguments import validated_args
from slime.check import report
from slime.config.run import run_config
from tests.models.public_configs import CONFIGS
from tests.scripts.test_launchers import flags_of

ROOT = Path(__file__).parents[2]
LAUNCHERS = sorted((ROOT / "scripts").rglob("run-*.sh"))
EXAMPLES = sorted((ROOT / "examples").glob("*/run.sh"))

# `use_model NAME` of a script means the config.json of that name in CONFIGS; GPUS has the
# GiB of the GPUs that a script is for, where that is not 80.
GPUS: dict[str, int] = {}
# The model that an example's README shows.
EXAMPLE_MODELS = {
    **dict.fromkeys(("anthropic_agent", "coding_agent", "environment", "simulated_user"), "qwen3-4B"),
    "eval_multi_task": "qwen3-4B",
    "fully_async": "qwen3-4B",
    "multi_agent": "qwen3-4B",
    "on_policy_distillation": "qwen3-8B",
    "openai_agent": "qwen3-4B",
    "retool": "qwen3-4B",
    "rollout_buffer": "qwen3-4B",
    "search_r1": "qwen2.5-3B",
    "train_infer_mismatch_helper": "qwen3-4B",
    "self_play": "qwen3-4B",
    "two_policies": "qwen3-4B",
}
CHAT = [{"role": "user", "content": "1+1"}]
CONVERSATION = [*CHAT, {"role": "assistant", "content": "2"}]
ROWS = 256  # no rollout of an epoch is larger


def words_of(flags):
    """Each flag with its values."""
    values = {}
    for word in flags:
        if word.startswith("--"):
            values[word] = []
            last = word
        else:
            values[last].append(word)
    return values


def write_rows(path, row):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row] * ROWS), path)
    else:
        path.write_text((json.dumps(row) + "\n") * ROWS)


def write_data(values):
    """Records such as the flags ask for, where they ask for them."""
    imitates = "sft_rollout" in values.get("--rollout-function-path", [""])[0]
    prompt = CONVERSATION if imitates else CHAT if "--apply-chat-template" in values else "1+1"
    (key,), (label,) = values.get("--input-key", ["input"]), values.get("--label-key", ["label"])
    row = {key: prompt, label: "2"}
    for path in (*values.get("--prompt-data", []), *values.get("--eval-prompt-data", [])[1::2]):
        write_rows(path, row)


def checked(flags, config, gpu=80):
    """The report of a run with this config.json and nothing beside it."""
    values = words_of(flags)
    model = Path(values["--hf-checkpoint"][0])
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    write_data(values)
    return report(run_config(validated_args([*flags, "--check", "--check-gpu-memory-gb", str(gpu)])))


def model_of(launcher):
    (name,) = re.findall(r"^use_model (.+)$", launcher.read_text(), re.MULTILINE)
    return name


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda path: path.stem)
def test_a_launcher_would_start(launcher, tmp_path):
    found = checked(flags_of(launcher, tmp_path), CONFIGS[model_of(launcher)], GPUS.get(launcher.stem, 80))
    assert found.misfits == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.parent.name)
def test_an_example_would_start_with_a_real_model(example, tmp_path, monkeypatch):
    given = {name: str(tmp_path / f"{name.lower()}.jsonl") for name in ("QUESTIONS", "CORPUS")}
    given |= {"MODEL": str(tmp_path / "model"), "TEACHER_URL": "http://127.0.0.1:1/generate"}
    given |= {"SEARCH_URL": "http://127.0.0.1:2", "BUFFER_URL": "http://127.0.0.1:3"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DATASETS", str(tmp_path / "datasets"))
    monkeypatch.chdir(ROOT)
    for name in ("aime-2024/aime-2024", "gpqa_diamond/gpqa_eval", "calculator/eval"):
        write_rows(tmp_path / f"datasets/{name}.jsonl", {"prompt": CHAT, "label": "A"})
    write_rows(given["CORPUS"], {"contents": '"Title"\nText'})
    found = checked(flags_of(example, tmp_path), CONFIGS[EXAMPLE_MODELS[example.parent.name]])
    assert found.misfits == []


def test_each_launcher_names_a_published_model():
    assert {model_of(launcher) for launcher in LAUNCHERS} <= CONFIGS.keys()
    assert GPUS.keys() <= {launcher.stem for launcher in LAUNCHERS}
