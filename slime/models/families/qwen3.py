"""Qwen3, dense: norms on queries and keys."""

from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.family import Family
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape


def qwen3_shape(config: HfConfig) -> ModelShape:
    """Returns the shape of the dense model; one with experts has the same attention."""
    return decoder_shape(config, qk_layernorm=True)


def _shape(config: HfConfig) -> ModelShape:
    # Qwen3Config's; others derive the size of a head from the hidden size
    return qwen3_shape(config.filled(head_dim=128, num_key_value_heads=32))


FAMILY = Family(shape=_shape, weights=DECODER_WEIGHTS, like_llama=True)
