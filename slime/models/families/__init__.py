"""The families, by the ``model_type`` of config.json: one file here and one line in `FAMILIES` for each."""

from typing import Any

from slime.models.families import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    gemma3_text,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    llama,
    mimo,
    minimax_m2,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from slime.models.family import Family
from slime.models.hf_config import HfConfigError

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "glm4": glm4.FAMILY,
    "mimo": mimo.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "gemma3": gemma3_text.WITH_IMAGES,
    "glm4_moe": glm4_moe.FAMILY,
    "mixtral": mixtral.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "kimi_k2": deepseek_v3.KIMI_K2,
    "deepseek_v32": deepseek_v32.FAMILY,
    "glm_moe_dsa": glm_moe_dsa.FAMILY,
    "glm4_moe_lite": glm4_moe_lite.FAMILY,
    "deepseek_v2": deepseek_v2.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_5_moe_text": qwen3_5.MOE_FAMILY,
    "qwen3_5": qwen3_5.WITH_IMAGES,
    "qwen3_5_moe": qwen3_5.MOE_WITH_IMAGES,
    "gpt_oss": gpt_oss.FAMILY,
}
"""The families, by the ``model_type`` of config.json."""


def family_of(model_type: Any, origin: str = "config.json") -> Family:
    """The family of a ``model_type``.

    Raises:
        HfConfigError: no family has that type.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        wanted = ", ".join(FAMILIES)
        raise HfConfigError(f"{origin}: model_type {model_type!r} is not supported (wanted: {wanted})")
    return FAMILIES[model_type]
