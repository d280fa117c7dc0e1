"""Architectures as ``transformers`` knows them, for a trainer that needs of most no more than their sizes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.models.checkpoint.quantization import read_quantization
from slime.models.hf_config import HfConfig, HfConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def transformers_config(path: str | Path, trust_remote_code: bool) -> "PretrainedConfig":
    """The directory's config.json as ``transformers`` reads it.

    Raises:
        HfConfigError: it does not know the architecture, or only by code that may not run; or a value is
            none of it.
    """
    from transformers import (
        CONFIG_MAPPING,
        AutoConfig,
    )  # takes seconds, which a known family need not wait for

    own = HfConfig.read(path)
    code = own.mapping("auto_map").get("AutoConfig")
    if code is not None and not trust_remote_code and own.get("model_type") not in CONFIG_MAPPING:
        described = (
            f"model_type {own.get('model_type')!r} is known by the checkpoint's own code {code!r} alone"
        )
        raise HfConfigError(f"{own.origin}: {described} (wanted: --trust-remote-code, which runs it)")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever the code of an architecture raises
        raise _unknown(path, error) from error
    return config


def require_causal(config: "PretrainedConfig", path: str | Path, trust_remote_code: bool) -> None:
    """Refuses what ``AutoModelForCausalLM`` would not build: an encoder, for instance, or a model of images.

    Raises:
        HfConfigError: neither ``transformers`` nor code that may run has a causal language model for it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not (own_code and trust_remote_code):
        name = type(config).__name__
        raise HfConfigError(f"{Path(path) / 'config.json'}: {name} is of no causal language model")


def _unknown(path: str | Path, error: Exception) -> HfConfigError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return HfConfigError(f"{Path(path) / 'config.json'}: {reason}")


def shape_of_any(path: str | Path, trust_remote_code: bool) -> dict[str, Any]:
    """Sizes under the trainer's names, as ``transformers`` reads the directory's config.json.

    What an architecture has not, as heads where there is no attention, is 1 or 0.

    Raises:
        HfConfigError: ``transformers`` does not know it, it is no language model, or its weights are
            quantised in a way that is not read.
    """
    read_quantization(HfConfig.read(path))
    config = transformers_config(path, trust_remote_code).get_text_config()
    try:
        hidden, layers, vocab = config.hidden_size, config.num_hidden_layers, config.vocab_size
    except AttributeError as error:
        raise _unknown(path, error) from error
    heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    epsilon = float(getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_eps", None) or 1e-5)
    return {
        "model_type": config.model_type,
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": width,
        "num_attention_heads": heads,
        "num_query_groups": getattr(config, "num_key_value_heads", None) or heads,
        "kv_channels": getattr(config, "head_dim", None) or max(1, hidden // heads),
        "vocab_size": vocab,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2**31 - 1,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "norm_epsilon": epsilon,
        "layernorm_epsilon": epsilon,
        "qk_layernorm": False,
        "add_qkv_bias": False,
        **{"num_experts": 0, "moe_router_topk": 0, "moe_ffn_hidden_size": 0, "moe_layer_freq": ()},
    }
