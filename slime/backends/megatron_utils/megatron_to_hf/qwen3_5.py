"""Where plug-ins import the conversion of such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import to_hf

convert_qwen3_5_to_hf = to_hf("qwen3_5_moe")
__all__ = ["convert_qwen3_5_to_hf"]
