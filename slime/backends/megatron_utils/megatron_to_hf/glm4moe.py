"""Where plug-ins import the conversion of such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import to_hf

convert_glm4moe_to_hf = to_hf("glm4_moe")
__all__ = ["convert_glm4moe_to_hf"]
