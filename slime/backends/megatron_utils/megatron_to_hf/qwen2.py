"""Where plug-ins import the conversion of such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import to_hf

convert_qwen2_to_hf = to_hf("qwen3")
__all__ = ["convert_qwen2_to_hf"]
