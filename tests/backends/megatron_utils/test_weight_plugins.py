"""Parameters one by one, under the original's names and in the order of rows that megatron-core has."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.hf_to_megatron.common import SafetensorReader
from tests.each import hold_each
from tests.run_args import plugin_args

ROOM = "slime.backends.megatron_utils"
ARGS = plugin_args(
    hidden_size=8, num_attention_heads=4, num_query_groups=2, kv_channels=None, num_layers=2, vocab_size=16
)
CONFIG = SimpleNamespace(hidden_size=8, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
LAYER = "module.module.decoder.layers.1"
# Converter, reader, Megatron's name, rows of its parameter, HF names.
CASES = [
    ("qwen2:qwen2", "qwen:qwen", "embedding.word_embeddings.weight", 16, ["model.embed_tokens.weight"]),
    (
        "qwen2:qwen2",
        "qwen:qwen",
        f"{LAYER}.self_attention.linear_qkv.layer_norm_weight",
        8,
        ["model.layers.1.input_layernorm.weight"],
    ),
    (
        "qwen2:qwen2",
        "qwen:qwen",
        f"{LAYER}.mlp.linear_fc1.weight",
        12,
        ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"],
    ),
    (
        "qwen3moe:qwen3moe",
        "qwen:qwen_moe",
        f"{LAYER}.mlp.experts.linear_fc2.weight7",
        8,
        ["model.layers.1.mlp.experts.7.down_proj.weight"],
    ),
    (
        "qwen3moe:qwen3moe",
        "qwen:qwen_moe",
        f"{LAYER}.mlp.shared_experts.gate_weight",
        1,
        ["model.layers.1.mlp.shared_expert_gate.weight"],
    ),
    (
        "glm4:glm4",
        "glm:glm4",
        f"{LAYER}.mlp.linear_fc1.weight",
        12,
        ["model.layers.1.mlp.gate_up_proj.weight"],
    ),
    (
        "glm4moe:glm4moe",
        "glm:glm4_moe",
        f"{LAYER}.mlp.router.expert_bias",
        4,
        ["model.layers.1.mlp.gate.e_score_correction_bias"],
    ),
    (
        "deepseekv3:deepseekv3",
        "deepseek:deepseek",
        f"{LAYER}.self_attention.linear_q_up_proj.layer_norm_weight",
        8,
        ["model.layers.1.self_attn.q_a_layernorm.weight"],
    ),
    (
        "deepseekv3:deepseekv3",
        "deepseek:deepseek",
        "module.module.mtp.layers.0.final_layernorm.weight",
        8,
        ["model.layers.2.shared_head.norm.weight"],
    ),
    (
        "minimax_m2:minimax_m2",
        "qwen:minimax_m2",
        f"{LAYER}.mlp.experts.linear_fc1.weight3",
        12,
        [
            "model.layers.1.block_sparse_moe.experts.3.w1.weight",
            "model.layers.1.block_sparse_moe.experts.3.w3.weight",
        ],
    ),
    (
        "mimo:mimo",
        "qwen:mimo",
        "module.module.mtp.layers.0.enorm.weight",
        8,
        ["model.mtp_layers.0.token_layernorm.weight"],
    ),
    (
        "qwen3_next:qwen3_next",
        "qwen3_next:qwen3_next",
        f"{LAYER}.self_attention.linear_attn.in_proj_ba.weight",
        8,
        ["model.layers.1.linear_attn.in_proj_ba.weight"],
    ),
    (
        "qwen3_5:qwen3_5",
        "qwen3_5:qwen3_5",
        f"{LAYER}.mlp.linear_fc1.layer_norm_weight",
        8,
        ["model.language_model.layers.1.post_attention_layernorm.weight"],
    ),
]


def functions(case):
    (module, name), (reading, read) = (text.split(":") for text in case[:2])
    convert = getattr(import_module(f"{ROOM}.megatron_to_hf.{module}"), f"convert_{name}_to_hf")
    return convert, getattr(import_module(f"{ROOM}.hf_to_megatron.{reading}"), f"{read}_hf_tensor")


def test_each_parameter_has_its_tensors_and_comes_back_from_them(tmp_path):
    def check(case):
        convert, read = functions(case)
        *_, name, rows, hf_names = case
        param = torch.arange(float(rows * 2)).view(rows, 2)
        found = convert(ARGS, name, param)
        assert [hf_name for hf_name, _ in found] == hf_names
        path = tmp_path / str(CASES.index(case))
        path.mkdir()
        save_file({key: tensor.clone() for key, tensor in found}, path / "model.safetensors")
        with SafetensorReader(path) as reader:
            assert torch.equal(read(name, reader, CONFIG), param)

    hold_each(CASES, check, name=lambda case: case[2])


def test_a_query_group_has_its_query_heads_then_its_key_and_its_value():
    convert, _ = functions(CASES[0])
    rows = torch.arange(16.0)[:, None]  # two groups of [2 query heads, key, value], two features each
    found = convert(ARGS, f"{LAYER}.self_attention.linear_qkv.weight", rows)
    assert [name.split(".")[-2] for name, _ in found] == ["q_proj", "k_proj", "v_proj"]
    values = [tensor.flatten().tolist() for _, tensor in found]
    assert values == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


def test_a_parameter_that_no_family_has_is_named():
    convert, _ = functions(CASES[0])
    with pytest.raises(ValueError, match=r"'decoder\.layers\.1\.nothing': no Hugging Face counterpart"):
        convert(ARGS, f"{LAYER}.nothing", torch.zeros(1))
