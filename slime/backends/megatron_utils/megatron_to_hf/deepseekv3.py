"""Where plug-ins import the conversion of such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import to_hf

convert_deepseekv3_to_hf = to_hf("deepseek_v3", "deepseek_v32")
__all__ = ["convert_deepseekv3_to_hf"]
