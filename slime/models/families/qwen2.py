"""Qwen2 and Qwen2.5: biases in the projections to query, key and value."""

from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.family import Family
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape


def qwen2_shape(config: HfConfig) -> ModelShape:
    """Returns the shape of the dense model."""
    return decoder_shape(config.filled(num_key_value_heads=32), add_qkv_bias=True, add_output_bias=False)


FAMILY = Family(shape=qwen2_shape, weights=DECODER_WEIGHTS, like_llama=True)
