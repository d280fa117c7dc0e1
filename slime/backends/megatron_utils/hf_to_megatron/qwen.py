"""Where plug-ins import what reads such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import from_hf

qwen_hf_tensor = from_hf("qwen3")
qwen_moe_hf_tensor = from_hf("qwen2_moe")
mimo_hf_tensor = from_hf("mimo")
minimax_m2_hf_tensor = from_hf("minimax_m2")
__all__ = ["mimo_hf_tensor", "minimax_m2_hf_tensor", "qwen_hf_tensor", "qwen_moe_hf_tensor"]
