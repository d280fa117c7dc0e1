"""Where plug-ins import the conversion of such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import to_hf

convert_minimax_m2_to_hf = to_hf("minimax_m2")
__all__ = ["convert_minimax_m2_to_hf"]
