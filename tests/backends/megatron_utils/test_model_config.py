"""What megatron-core is told of a model beside what flags of its own name say."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.model_config import transformer_config
from slime.config.run import run_config
from tests.each import hold_each
from tests.families import save_tiny_config
from tests.megatron_harness import make_args

_EXPERTS = {"moe_router_load_balancing_type": ["aux_loss", "none"], "moe_aux_loss_coeff": [0.25, 0.0]}
_ALWAYS = {
    **{"normalization": "RMSNorm", "gated_linear_unit": True},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
    **{"mtp_num_layers": None, "variable_seq_lengths": True, "cuda_graph_scope": []},
    **{"masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False},
    **{"persist_layer_norm": False, "moe_grouped_gemm": False, "moe_permute_fusion": False},
    **{"params_dtype": torch.float32, "pipeline_dtype": torch.float32, "autocast_dtype": torch.float32},
    **{"bf16": False, "fp16": False, "layernorm_epsilon": 1e-6},
}
FAMILIES = {
    "qwen3": {"num_moe_experts": None, "qk_layernorm": True, "activation_func": F.silu},
    "qwen3_moe": {
        **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [1, 0, 1, 1]},
        **{"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.25},
        **{"moe_router_num_groups": None, "moe_router_group_topk": None},
    },
    "deepseek_v3": {
        **{"multi_latent_attention": True, "q_lora_rank": 24, "qk_layernorm": False},
        **{"rope_type": "rope", "rotary_percent": 1.0, "rotary_interleaved": False},
        **{"rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0},
        **{"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    },
    "moonlight": {"q_lora_rank": None, "moe_router_num_groups": None, "moe_router_group_topk": None},
    "minimax_m2": {"qk_layernorm": False},
    "qwen3_next": {"linear_attention_freq": [1, 0, 1, 0]},
}


def config_of(family, path, **changes):
    path.mkdir()
    args = make_args(save_tiny_config(family, path), **{**_EXPERTS, **changes})
    return transformer_config(run_config(args))


def test_a_family_is_told_as_it_is(tmp_path):
    def check(case):
        family, wanted = case
        made = config_of(family, tmp_path / family)
        found = {name: getattr(made, name) for name in _ALWAYS | wanted}
        other = {
            name: (found[name], value) for name, value in (_ALWAYS | wanted).items() if found[name] != value
        }
        assert not other, other

    hold_each(FAMILIES.items(), check)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"params_dtype": torch.bfloat16}, {"bf16": True, "fp16": False, "pipeline_dtype": torch.bfloat16}),
        ({"params_dtype": torch.float16}, {"bf16": False, "fp16": True, "autocast_dtype": torch.float16}),
        ({}, {"overlap_p2p_comm": False, "batch_p2p_comm": True}),
        (
            {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            {"overlap_p2p_comm": True, "batch_p2p_comm": False},
        ),
        ({"moe_token_dispatcher_type": "allgather"}, {"moe_token_dispatcher_type": "alltoall"}),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_flags_say_of_a_dense_model(tmp_path, changes, wanted):
    made = config_of("qwen3", tmp_path / "model", **changes)
    assert {name: getattr(made, name) for name in wanted} == wanted


def test_a_mixture_of_experts_has_the_dispatcher_of_its_flag(tmp_path):
    made = config_of("qwen3_moe", tmp_path / "model", moe_token_dispatcher_type="allgather")
    assert made.moe_token_dispatcher_type == "allgather"


def test_each_gelu_is_the_one_that_its_name_says(tmp_path):
    x = torch.linspace(-3, 3, 50)
    gemma = config_of("gemma3_text", tmp_path / "gemma").activation_func
    torch.testing.assert_close(gemma(x), F.gelu(x, approximate="tanh"), rtol=0, atol=0)
    quick = config_of("qwen3", tmp_path / "quick", activation="quick_gelu").activation_func
    torch.testing.assert_close(quick(x), x * torch.sigmoid(1.702 * x))


def test_a_dense_model_has_megatron_cores_own_values_of_experts(tmp_path):
    """It refuses such a model with their sizes."""
    made = config_of("qwen3", tmp_path / "model", moe_router_topk=7)
    kept = {field.name: field.default for field in dataclasses.fields(made)}
    assert made.moe_router_topk == kept["moe_router_topk"] != 7
