"""Where plug-ins import what reads such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import from_hf

glm4_hf_tensor = from_hf("glm4")
glm4_moe_hf_tensor = from_hf("glm4_moe")
__all__ = ["glm4_hf_tensor", "glm4_moe_hf_tensor"]
