"""Where plug-ins import what reads such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import from_hf

deepseek_hf_tensor = from_hf("deepseek_v3", "deepseek_v32")
__all__ = ["deepseek_hf_tensor"]
