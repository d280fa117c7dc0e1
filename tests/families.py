"""A tiny random checkpoint of each model family, and what ``transformers`` makes of it.

model = tiny_family("glm4", path)      # writes the checkpoint; a float32 ``transformers`` model
"""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from slime.models.chosen_keys import choose_first_of_equals
from tools.make_tiny_model import make_tokenizer

_SIZES = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"head_dim": 16, "tie_word_embeddings": False, "pad_token_id": None},
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
_DEEPSEEK_EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2},
    **{"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    **{"first_k_dense_replace": 1},
}
_LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 24, "num_key_value_heads": 8},
}
_DELTA_NETS = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 12, "linear_conv_kernel_dim": 3, "full_attention_interval": 2},
}
# Fewer keys than most rows of the tests have tokens.
_INDEXER = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 6}
# A name: the class in transformers, and what its config has that the others have not.
FAMILIES = {
    "glm4": ("Glm4", {"attention_bias": True}),
    "mimo": ("Qwen2", {}),
    "gemma3_text": (
        "Gemma3Text",
        {
            **{"sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
            "tie_word_embeddings": True,
        },
    ),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            **{"shared_expert_intermediate_size": 40, "norm_topk_prob": False, "mlp_only_layers": [1]},
        },
    ),
    "glm4_moe": ("Glm4Moe", {**_DEEPSEEK_EXPERTS, "attention_bias": True, "use_qk_norm": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{**_DEEPSEEK_EXPERTS, **_LATENT, "head_dim": 8},
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **{**_DEEPSEEK_EXPERTS, **_LATENT, "head_dim": 8, "norm_topk_prob": False},
            **{"topk_method": "group_limited_greedy", "scoring_func": "softmax"},
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v2-lite": (
        "DeepseekV2",
        {
            **{**_DEEPSEEK_EXPERTS, **_LATENT, "head_dim": 8, "norm_topk_prob": False},
            **{"topk_method": "greedy", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
        },
    ),
    "moonlight": (
        "DeepseekV3",
        {
            **{**_DEEPSEEK_EXPERTS, **_LATENT, "head_dim": 8},
            **{"q_lora_rank": None, "n_group": 1, "topk_group": 1},
        },
    ),
    "kimi_k2": ("DeepseekV3", {**_DEEPSEEK_EXPERTS, **_LATENT, "head_dim": 8}),
    "glm4_moe_lite": ("Glm4MoeLite", {**_DEEPSEEK_EXPERTS, **_LATENT}),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **{**_DEEPSEEK_EXPERTS, **_LATENT, **_INDEXER, "head_dim": 8},
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsa", {**_DEEPSEEK_EXPERTS, **_LATENT, **_INDEXER, "head_dim": 8}),
    "glm_moe_dsa-shared": (
        "GlmMoeDsa",
        {
            **{**_DEEPSEEK_EXPERTS, **_LATENT, **_INDEXER, "head_dim": 8},
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **{**_DELTA_NETS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            **{"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        },
    ),
    "qwen3_5_text": ("Qwen3_5Text", {**_DELTA_NETS, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        {
            **{**_DELTA_NETS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            "shared_expert_intermediate_size": 40,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
            **{"swiglu_limit": 0.3, "rope_parameters": {**_YARN, "truncate": False}},
        },
    ),
}
# Those that most tests take from `tests.megatron_harness`.
USUAL = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            **{"norm_topk_prob": True, "mlp_only_layers": [1]},
        },
    ),
}
# Models that read images: what there is beside the language model, which is that of another row.
_VISION = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 2}
_QWEN_VISION = _VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
_GEMMA_VISION = _VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4}
WITH_IMAGES = {
    "qwen3_5": ("Qwen3_5", "qwen3_5_text", {"vision_config": _QWEN_VISION}),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe_text", {"vision_config": _QWEN_VISION}),
    "gemma3": ("Gemma3", "gemma3_text", {"vision_config": _GEMMA_VISION, "mm_tokens_per_image": 1}),
}
FAMILIES |= {name: FAMILIES[text] for name, (_, text, _) in WITH_IMAGES.items()}
ALL = {**USUAL, **FAMILIES}
_IMAGE_PARTS = ("model.visual.", "vision_tower.", "multi_modal_projector.", "mtp.")
# These have a model_type of their own and are computed as another one.
_RENAMED = {"mimo": "mimo", "kimi_k2": "kimi_k2"}
# Tensors of MTP layers, which are in published checkpoints; nothing reads them. {} stands for
# how many layers the model has.
_UNTRAINED = {
    "mimo": "model.mtp_layers.0.input_proj.weight",
    "deepseek_v3": "model.layers.{}.eh_proj.weight",
    "glm4_moe": "model.layers.{}.eh_proj.weight",
    "qwen3_next": "mtp.fc.weight",
    "qwen3_5": "mtp.fc.weight",
    "qwen3_5_moe": "mtp.fc.weight",
}


def tolerance(name: str) -> float:
    """How far logits of float32 may be apart."""
    # The norm behind a delta net makes much of what it reads where this is close to zero: transformers itself
    # is 3e-5 away from float64 here, and weights that differ in their last bits move logits by as much.
    return 1e-4 if "linear_num_key_heads" in FAMILIES[name][1] else 1e-5


def model_type(name: str) -> str:
    """What its config.json says."""
    return _RENAMED.get(name) or tiny_config(name).model_type


def tiny_config(name: str, **changes: Any) -> transformers.PreTrainedConfig:
    """What ``transformers`` knows the family's model by."""
    if name in WITH_IMAGES:
        whole, text, others = WITH_IMAGES[name]
        inner = tiny_config(text, **changes)
        tied = {"tie_word_embeddings": inner.tie_word_embeddings}
        return getattr(transformers, f"{whole}Config")(text_config=inner.to_dict(), **others, **tied)
    prefix, own = ALL[name]
    sizes = {**_SIZES, **own, **changes}
    if prefix in ("Qwen2", "Glm4MoeLite"):
        sizes.pop("head_dim")
    if prefix == "Qwen3_5MoeText":
        sizes.pop("intermediate_size")
    return getattr(transformers, f"{prefix}Config")(**sizes)


def tiny_family(name: str, path: Path, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """Writes a checkpoint whose every tensor matters to the logits, but for those that nothing trains.

    Of keys with equal scores the indexers of the model choose the first ones, as ours do.
    """
    torch.manual_seed(seed)
    config = tiny_config(name, **changes)
    if name in WITH_IMAGES:
        model_class = f"{WITH_IMAGES[name][0]}ForConditionalGeneration"
    else:
        model_class = ALL[name][0].removesuffix("Text") + "ForCausalLM"
    model = getattr(transformers, model_class)(config).float().eval()
    stir(model, torch.Generator().manual_seed(seed + 1))
    _save(name, model, path)
    _rename(name, path)
    if name in _UNTRAINED:
        file = path / "model.safetensors"
        further = _UNTRAINED[name].format(config.get_text_config().num_hidden_layers)
        save_file(load_file(file) | {further: torch.ones(2, 2)}, file, {"format": "pt"})
    choose_first_of_equals(model)
    return model


def _save(name: str, model: transformers.PreTrainedModel, path: Path) -> None:
    model.save_pretrained(path)
    if name == "qwen3_5_moe":
        # Published ones have experts as the model has, transformers writes them one by one.
        tied = model.config.tie_word_embeddings
        kept = {key: value for key, value in model.state_dict().items() if not (tied and "lm_head" in key)}
        save_file(kept, path / "model.safetensors", {"format": "pt"})


def chat_family(name: str, path: Path, seed: int = 0) -> transformers.PreTrainedModel:
    """Makes a checkpoint of a family with a byte-level chat tokenizer, for whole runs."""
    tokenizer = make_tokenizer()
    model = tiny_family(name, path, seed, vocab_size=320, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(path)
    return model


def save_tiny_config(name: str, path: Path, **changes: Any) -> Path:
    """Writes the family's config.json and nothing else."""
    tiny_config(name, **changes).save_pretrained(path)
    _rename(name, path)
    return path


def _rename(name: str, path: Path) -> None:
    if name in _RENAMED:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": _RENAMED[name]}))


def stored_tensors(name: str, path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of the checkpoint that a model of the family has."""
    kept = kept_tensors(name, path)
    return {key: value for key, value in load_file(path / "model.safetensors").items() if key not in kept}


def kept_tensors(name: str, path: Path) -> dict[str, torch.Tensor]:
    """The others."""
    return {
        tensor_name: tensor
        for tensor_name, tensor in load_file(path / "model.safetensors").items()
        if fnmatch(tensor_name, _UNTRAINED.get(name, "").format("*"))
        or (name in WITH_IMAGES and tensor_name.startswith(_IMAGE_PARTS))
    }


@torch.no_grad()
def stir(model: torch.nn.Module, generator: torch.Generator) -> None:
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name)
    for name, tensor in (*model.named_parameters(), *buffers):
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.add_(0.3 * noise)
        elif "sinks" in name:
            tensor.copy_(noise)
        elif "bias" in name:
            tensor.add_(0.1 * noise)
        elif "conv" in name:
            tensor.copy_(0.5 * noise)
        else:
            tensor.copy_(0.06 * noise)
