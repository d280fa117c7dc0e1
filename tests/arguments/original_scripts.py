"""Command lines in the manner of the original's launch scripts, and what they point to.

Each file of launch_scripts/ stands where the original has the script. A line is a flag and its values;
``{root}`` is where models and data are, and ``+NAME`` stands for the lines of parts/NAME.txt.
"""

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.arguments.conftest import write_empty_weights
from tests.models.public_configs import CONFIGS, text_of

FOLDER = Path(__file__).with_name("launch_scripts")
SCRIPTS = {
    f"{path.relative_to(FOLDER).with_suffix('')}.sh": path
    for folder in ("examples", "scripts")
    for path in sorted((FOLDER / folder).rglob("*.txt"))
}
ROLLOUT = 128  # prompts of the largest rollout of those that go through the data by epochs
CHAT = [{"role": "user", "content": "1+1"}]
CONVERSATION = [*CHAT, {"role": "assistant", "content": "2"}]
# The modules that scripts name, and what they import of ours.
PLUG_INS = {
    **dict.fromkeys(("generate_with_retool", "generate_with_search", "generate_with_strands"), ""),
    **dict.fromkeys(("generate_with_tau", "rollout_with_multi_agents"), ""),
    "coding_agent_rl": (
        "from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter\n"
        "from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread\n"
        "from slime.agent.harness import ClaudeCodeHarness, CodexHarness\n"
        "from slime.agent.sandbox import E2BSandbox, Sandbox, exec_and_wait\n"
    ),
}
_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
    },
}
# How the weights of directories are quantised, by what their names end with.
_QUANTISED = {
    **dict.fromkeys(("DeepSeek-R1", "Kimi-K2-Instruct", "-FP8"), _BLOCKS),
    **dict.fromkeys(("Kimi-K2-Thinking", "-INT4"), _GROUPS),
}


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a script, with those of its parts."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("+"):
            yield from lines_of(FOLDER / f"parts/{line.removeprefix('+')}.txt")
        else:
            yield line


def words_of(name: str, root: Path) -> list[str]:
    """A script's command line."""
    text = "\n".join(lines_of(SCRIPTS[name])).replace("{root}", str(root))
    return text.split()


def value_of(words: list[str], flag: str) -> str:
    """The first value of a flag."""
    return words[words.index(flag) + 1]


def model_of(name: str) -> str | None:
    """The model whose shape a script spells out, as tests/models/public_configs.py calls it."""
    first = SCRIPTS[name].read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("+model-") if first.startswith("+") else None


def write_data(root: Path) -> None:
    """Data under the names that the scripts have for it, with the fields that they ask for."""
    lines: dict[str, Any] = {
        "dapo-math-17k.jsonl": {"prompt": CHAT, "label": "2"},
        "aime-2024.jsonl": {"prompt": CHAT, "label": "2"},
        "ifbench.jsonl": {"prompt": CHAT, "label": "2", "metadata": {"instruction_id_list": ["x"]}},
        "retail_train_tasks.jsonl": {"index": "0"},
        "retail_dev_tasks.jsonl": {"index": "0"},
        "retool_sft.jsonl": {"messages": CONVERSATION, "tools": [{"type": "function"}]},
    }
    for name, line in lines.items():
        (root / name).write_text((json.dumps(line) + "\n") * ROLLOUT)
    for name in ("gsm8k", "nq_hotpotqa", "openhermes2_5"):
        row = {"messages": CONVERSATION if name == "openhermes2_5" else CHAT, "prompt": CHAT}
        row |= {"label": "2", "reward_model": {"ground_truth": {"target": ["2"]}, "style": "rule"}}
        pq.write_table(pa.Table.from_pylist([row] * ROLLOUT), root / f"{name}.parquet")
    for name, imports in PLUG_INS.items():
        names = ("generate", "reward_func", "generate_with_multi_agents")
        text = "".join(f"async def {each}(args, sample, *given, **more): ...\n" for each in names)
        (root / f"{name}.py").write_text(imports + text)
    datasets = [
        {"name": "aime", "path": str(root / "aime-2024.jsonl"), "rm_type": "deepscaler"},
        {"name": "ifbench", "path": str(root / "ifbench.jsonl"), "rm_type": "ifbench"},
    ]
    (root / "multi_task.yaml").write_text(json.dumps({"eval": {"datasets": datasets}}))
    (root / "mis.yaml").write_text("use_tis: true\n")
    groups = [{"worker_type": "prefill", "num_gpus": 64}, {"worker_type": "decode", "num_gpus": 192}]
    fleet = {"sglang": [{"name": "default", "server_groups": groups}]}
    (root / "glm5.2.yaml").write_text(json.dumps(fleet))


def config_of(model: str | None, words: list[str]) -> dict[str, Any]:
    """What config.json of a script's model says; of one that is not known, by the flags of its shape."""
    directory = Path(value_of(words, "--hf-checkpoint")).name
    config = CONFIGS[model] if model in CONFIGS else _spelt_out(words)
    for end, described in _QUANTISED.items():
        if directory.endswith(end):
            config = config | {"quantization_config": described}
    return config


def _spelt_out(words: list[str]) -> dict[str, Any]:
    """By the flags of the shape."""
    value = dict(pairwise(words))
    qwen3, experts = "--qk-layernorm" in words, int(value.get("--num-experts", 0))
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
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in words,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
    } | ({"head_dim": int(value["--kv-channels"])} if qwen3 else {})
    if experts:
        config |= {"num_experts": experts, "num_experts_per_tok": int(value["--moe-router-topk"])}
        config |= {"moe_intermediate_size": int(value["--moe-ffn-hidden-size"]), "norm_topk_prob": True}
    return config


def _link_weights(source: Path, target: Path) -> None:
    for file in source.glob("*.safetensors"):
        os.link(file, target / file.name)


def write_model(name: str, words: list[str], tokenizer_of: Path, weights: Path) -> None:
    """A script's Hugging Face directory, and its conversion by Megatron-LM."""
    write_model_of(model_of(name), name, words, tokenizer_of, weights)


def write_model_of(model: str | None, name: str, words: list[str], tokenizer_of: Path, weights: Path) -> None:
    """What the words have for ``--hf-checkpoint`` and ``--ref-load``.

    Args:
        model: whose config.json it gets.
        name: of its weights, if no model is named.
        tokenizer_of: a directory whose tokenizer it gets.
        weights: where the files of weights are kept that scripts share.
    """
    path, config = Path(value_of(words, "--hf-checkpoint")), config_of(model, words)
    path.mkdir(parents=True)
    for file in tokenizer_of.iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    (path / "config.json").write_text(json.dumps(config))
    if "num_hidden_layers" in text_of(config):
        form = "-quantised" if "quantization_config" in config else ""
        shared = weights / f"{model or name}{form}"
        if not shared.exists():
            write_empty_weights(path)
            shared.mkdir(parents=True)
            _link_weights(path, shared)
        else:
            _link_weights(shared, path)
    for flag in {"--ref-load", "--opd-teacher-load"} & {*words}:
        converted = Path(value_of(words, flag))
        converted.mkdir(parents=True, exist_ok=True)
        (converted / "latest_checkpointed_iteration.txt").write_text("release")
        (converted / "release").mkdir(exist_ok=True)
        (converted / "release/metadata.json").write_text("{}")
