"""Where plug-ins import what reads such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import from_hf

qwen3_next_hf_tensor = from_hf("qwen3_next")
__all__ = ["qwen3_next_hf_tensor"]
