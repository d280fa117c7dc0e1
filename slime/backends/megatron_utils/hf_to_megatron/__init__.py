"""Loads the safetensors files of a Hugging Face checkpoint into this rank's shards."""

from slime.backends.megatron_utils.hf_to_megatron.load import load_hf_weights, supports_hf_weight_loading
from slime.backends.megatron_utils.hf_to_megatron.reader import SafetensorReader

__all__ = ["SafetensorReader", "load_hf_weights", "supports_hf_weight_loading"]
