"""Qwen3, dense: norms on queries and keys."""

from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.family import Family
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape

_HEAD_DIM = 128  # Qwen3Config's default; others derive it from the hidden size


def qwen3_shape(config: HfConfig) -> ModelShape:
    """That of the dense model; one with experts has the same attention."""
    return decoder_shape(config, qk_layernorm=True, kv_channels=config.size("head_dim", _HEAD_DIM))


FAMILY = Family(shape=qwen3_shape, weights=DECODER_WEIGHTS, like_llama=True)
