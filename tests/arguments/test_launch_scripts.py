"""Command lines in the manner of the original's launch scripts for Qwen models start as they are."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.arguments.conftest import write_empty_weights

# Each a list of flags and their values; {root} is where models and data are.
SCRIPTS = sorted(Path(__file__).with_name("launch_scripts").glob("*.txt"))
PLUG_INS = ("generate_with_retool", "generate_with_search", "generate_with_strands", "generate_with_tau")
ROLLOUT = 128  # prompts of the largest rollout of those that go through the data by epochs
CHAT = [{"role": "user", "content": "1+1"}]
CONVERSATION = [*CHAT, {"role": "assistant", "content": "2"}]


class ServerArgs:
    """Stands for SGLang's, of which the scripts use these options."""

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--enable-deterministic-inference", action="store_true")
        parser.add_argument("--attention-backend", type=str)
        parser.add_argument("--model-path", required=True)


@pytest.fixture
def sglang(monkeypatch):
    for name in ("sglang", "sglang.srt", "sglang.srt.server_args"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.ServerArgs = ServerArgs
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Data under the names that the scripts have for it, with the fields that they ask for."""
    lines = {
        "dapo-math-17k.jsonl": {"prompt": CHAT, "label": "2"},
        "aime-2024.jsonl": {"prompt": CHAT, "label": "2"},
        "retail_train_tasks.jsonl": {"index": "0"},
        "retail_dev_tasks.jsonl": {"index": "0"},
        "retool_sft.jsonl": {"messages": CONVERSATION, "tools": [{"type": "function"}]},
    }
    for name, line in lines.items():
        (tmp_path / name).write_text((json.dumps(line) + "\n") * ROLLOUT)
    for name in ("gsm8k", "nq_hotpotqa", "openhermes2_5"):
        row = {"messages": CONVERSATION if name == "openhermes2_5" else CHAT, "prompt": CHAT}
        row |= {"label": "2", "reward_model": {"ground_truth": {"target": ["2"]}, "style": "rule"}}
        pq.write_table(pa.Table.from_pylist([row] * ROLLOUT), tmp_path / f"{name}.parquet")
    for name in PLUG_INS:
        (tmp_path / f"{name}.py").write_text("def generate(): ...\ndef reward_func(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write_model(path, value, tokenizer_of):
    """A Hugging Face directory of the shape that these flags spell out, and its conversion by Megatron-LM."""
    qwen3, experts = "--qk-layernorm" in value, int(value.get("--num-experts", 0))
    config = {
        "model_type": "qwen3_moe" if experts else "qwen3" if qwen3 else "qwen2",
        "num_hidden_layers": int(value["--num-layers"]),
        "hidden_size": int(value["--hidden-size"]),
        "intermediate_size": int(value["--ffn-hidden-size"]),
        "num_attention_heads": int(value["--num-attention-heads"]),
        "num_key_value_heads": int(value["--num-query-groups"]),
        "vocab_size": int(value["--vocab-size"]),
        "rms_norm_eps": float(value["--norm-epsilon"]),
        "rope_theta": float(value["--rotary-base"]),
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in value,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
    } | ({"head_dim": int(value["--kv-channels"])} if qwen3 else {})
    if experts:
        config |= {"num_experts": experts, "num_experts_per_tok": int(value["--moe-router-topk"])}
        config |= {"moe_intermediate_size": int(value["--moe-ffn-hidden-size"]), "norm_topk_prob": True}
    path.mkdir()
    for file in tokenizer_of.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (path / file.name).write_bytes(file.read_bytes())
    (path / "config.json").write_text(json.dumps(config))
    write_empty_weights(path)
    converted = path.with_name(f"{path.name}_torch_dist")
    converted.mkdir()
    (converted / "latest_checkpointed_iteration.txt").write_text("release")


def read_script(script, root):
    """The words of a script, and the last value of each of its flags."""
    lines = script.read_text().replace("{root}", str(root)).splitlines()
    words = [word for line in lines for word in line.split()]
    return words, {line.split()[0]: line.split()[-1] for line in lines}


def test_there_are_eleven():
    assert len(SCRIPTS) == 11


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_starts(script, root, checkpoint, sglang, notes):
    words, value = read_script(script, root)
    write_model(Path(value["--hf-checkpoint"]), value, checkpoint)
    told = {line.partition(": ")[0] for line in notes([*words, "--rollout-engine", "sglang"])}
    expected = {f"--ref-load {value['--ref-load']}"}
    expected |= {"--moe-grouped-gemm", "--moe-permute-fusion"} & value.keys()
    if "--sequence-parallel" in value and value["--tensor-model-parallel-size"] == "1":
        expected.add("--sequence-parallel")
    if "--over-sampling-batch-size" in value:
        expected.add("groups finished beyond a batch (without --drop-surplus-groups)")
    assert told == expected
