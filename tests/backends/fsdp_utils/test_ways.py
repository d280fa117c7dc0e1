"""How FSDP computes what tells tokens of a batch how far they see, and what it refuses to train.

Tiny models whose windows, chunks and contexts are longer than a few tokens would reach.
"""

import pytest
import torch
import transformers

from slime.backends.fsdp_utils.attention import PackedAttention, UnknownAttention
from slime.backends.fsdp_utils.small_config import small_config
from slime.models import shape_of_any
from slime.training.packed_layout import PackedLayout
from tests.backends.fsdp_harness import fsdp_args, train
from tests.backends.fsdp_utils.random_models import agrees, built, compared
from tests.backends.fsdp_utils.test_any_model import SFT, plain_step
from tests.each import hold_each
from tests.megatron_harness import run_ranks
from tests.trainer_batches import random_rollout

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_group")]

_SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8},
    **{"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
}
_LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24},
    **{"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 14, "max_window_layers": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
# A config, and how its rows may be computed.
MECHANISMS = {
    "chunked attention": (
        "Llama4Text",
        {
            **{"attention_chunk_size": 16, "floor_scale": 20, "attn_temperature_tuning": True},
            **{"num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 2},
        },
        "padded",
    ),
    "PhiMoE's window": ("Phimoe", {"sliding_window": 14, "num_local_experts": 2}, "padded"),
    "Doge's window": ("Doge", {"sliding_window": 14, "keep_window_size": 64}, "padded"),
    "Doge's choice of keys": ("Doge", {"keep_window_size": 14}, "alone"),
    "Qwen2-MoE's window": ("Qwen2Moe", {**_QWEN_WINDOW, **_EXPERTS, "num_experts": 4}, "padded"),
    "longrope": ("Phi3", {"rope_parameters": _LONGROPE, "sliding_window": None}, "alone"),
    "a window that attention is told": ("Mistral", {"sliding_window": 14}, "packed"),
    "no mechanism": ("Llama", {}, "packed"),
}


def _model(mechanism):
    architecture, changes, _ = MECHANISMS[mechanism]
    sizes = {**_SIZES, **changes}
    return built(getattr(transformers, f"{architecture}Config")(**sizes))


def test_rows_beyond_windows_chunks_and_contexts_are_those_of_each_sequence_alone():
    def check(mechanism):
        found = compared(_model(mechanism))
        assert agrees(found), found
        assert found["way"] == MECHANISMS[mechanism][2]

    hold_each(MECHANISMS, check)


def test_logits_that_depend_on_the_sequences_before_or_on_later_tokens_are_refused_by_name():
    dynamic = built(transformers.LlamaConfig(**_SIZES, rope_parameters=_DYNAMIC))
    assert compared(dynamic)["refused"] == (
        "--train-backend fsdp: not with LlamaForCausalLM: its logits depend on the sequences before"
    )
    bert = built(transformers.BertConfig(**_SIZES))
    assert "BertLMHeadModel: it is not causal" in compared(bert)["refused"]


def test_an_implementation_that_would_leave_something_out_is_refused_by_name():
    """Gemma 2's cap of scores, which scaled_dot_product_attention does not know."""
    capped = built(transformers.Gemma2Config(**_SIZES, sliding_window=14, attn_logit_softcapping=2.0))
    assert compared(capped)["way"] == "padded"
    refused = compared(capped, "sdpa")["refused"]
    assert refused.startswith("--attn-implementation sdpa: not with Gemma2ForCausalLM: ")
    assert refused.endswith(" (wanted: eager)")
    assert compared(built(transformers.LlamaConfig(**_SIZES)), "sdpa")["way"] == "padded"


def test_an_architecture_of_which_nothing_small_can_be_built_goes_one_by_one(monkeypatch):
    model = _model("no mechanism")
    monkeypatch.setattr("slime.backends.fsdp_utils.probe._MAX_PARAMETERS", 10)
    found = compared(model)
    assert found["way"] == "alone" and found["difference"] == 0
    assert "no small model of it" in found["why"]


def test_other_masks_than_causal_are_refused_with_a_window_too():
    attention = PackedAttention()
    attention.layout = PackedLayout.from_boundaries([0, 5, 8], torch.device("cpu"))
    query = torch.randn(1, 2, 8, 4)
    module = torch.nn.Module()
    window = {"sliding_window": 3, "scaling": 0.5}
    assert attention(module, query, query, query, None, **window, position_ids=query, use_cache=False)
    for wanted, mask, more in (
        ("a mask of its own", query, {}),
        ("no causal mask", None, {"is_causal": False}),
        ("softcap", None, {"softcap": 2.0}),
        ("of_tomorrow", None, {"of_tomorrow": True}),
    ):
        with pytest.raises(UnknownAttention, match=f"Module wants {wanted}"):
            attention(module, query, query, query, mask, **window, **more)
    module.is_causal = False
    with pytest.raises(UnknownAttention, match="no causal mask"):
        attention(module, query, query, query, None, **window)


def test_a_small_config_keeps_the_order_of_what_it_makes_shorter():
    config = transformers.Llama4TextConfig()
    small = small_config(config, 0)
    values = small.config
    assert set(values.layer_types) == set(config.layer_types)
    assert 4 < values.attention_chunk_size < values.max_position_embeddings
    assert max(small.lengths) > values.max_position_embeddings
    assert any(values.floor_scale < length < values.max_position_embeddings for length in small.lengths)
    assert values.head_dim == config.head_dim and values.num_attention_heads == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_step_with_sequences_one_by_one(ranks, tmp_path):
    """Ranks that have fewer of them than others compute some again, which changes nothing."""
    model = _model("longrope")
    model.save_pretrained(tmp_path)
    rollout = random_rollout(96)
    loss, norm, weights = plain_step(str(tmp_path), rollout)
    args = fsdp_args(str(tmp_path), shape=shape_of_any(tmp_path, False), **SFT)
    results = run_ranks(train, ranks, args, [rollout])
    ((step,), _) = results[0]["reports"][0]
    assert step["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(results[0]["weights"][name], weight.detach(), rtol=0, atol=1e-4)
