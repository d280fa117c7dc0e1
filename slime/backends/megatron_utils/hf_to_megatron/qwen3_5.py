"""Where plug-ins import what reads such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import from_hf

qwen3_5_hf_tensor = from_hf("qwen3_5_moe")
__all__ = ["qwen3_5_hf_tensor"]
