"""Sizes of architectures that ``transformers`` knows, and what stands for those that they do not say."""

import json

import pytest
import transformers

from slime.models import HfConfigError
from slime.models.any_decoder import require_causal, shape_of_any

SAID = {
    **{"model_type": "mistral", "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48},
    **{"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16, "vocab_size": 96},
    **{"max_position_embeddings": 64, "untie_embeddings_and_output_weights": True},
    **{"norm_epsilon": 1e-3, "layernorm_epsilon": 1e-3},
}
UNSAID = {
    **{"model_type": "bloom", "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 128},
    **{"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 8, "vocab_size": 96},
    **{"max_position_embeddings": 2**31 - 1, "untie_embeddings_and_output_weights": False},
    **{"norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5},
}
OTHERS = {
    **{"qk_layernorm": False, "add_qkv_bias": False},
    **{"num_experts": 0, "moe_router_topk": 0, "moe_ffn_hidden_size": 0, "moe_layer_freq": ()},
}


def test_sizes_are_those_of_config_json(tmp_path):
    config = transformers.MistralConfig(
        **{"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 64},
        rms_norm_eps=1e-3,
    )
    config.save_pretrained(tmp_path)
    assert shape_of_any(tmp_path, False) == SAID | OTHERS


def test_what_it_does_not_say_is_what_such_models_do(tmp_path):
    transformers.BloomConfig(n_layer=2, n_head=4, hidden_size=32, vocab_size=96).save_pretrained(tmp_path)
    assert shape_of_any(tmp_path, False) == UNSAID | OTHERS


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            {"model_type": "made_up", "auto_map": {"AutoConfig": "its.Config"}},
            "model_type 'made_up' is known by the checkpoint's own code 'its.Config' alone",
        ),
        ({"model_type": "made_up"}, "made_up"),
        ({"model_type": "vit"}, "vocab_size"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_is_no_decoder_or_needs_code_of_its_own_is_refused(tmp_path, config, complaint):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HfConfigError, match=f"config.json.*{complaint}"):
        shape_of_any(tmp_path, False)


def test_only_causal_language_models_pass_and_own_code_where_it_may_run(tmp_path):
    require_causal(transformers.LlamaConfig(), tmp_path, False)
    own = transformers.ViTConfig(auto_map={"AutoModelForCausalLM": "its.Model"})
    require_causal(own, tmp_path, True)
    for config, trusted in (
        (own, False),
        (transformers.ViTConfig(), True),
        (transformers.ViTConfig(), False),
    ):
        with pytest.raises(HfConfigError, match=r"config.json: ViTConfig is of no causal language model"):
            require_causal(config, tmp_path, trusted)
