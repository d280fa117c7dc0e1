"""Where plug-ins import the conversion of such models' parameters from."""

from slime.backends.megatron_utils.weight_plugins import to_hf

convert_mimo_to_hf = to_hf("mimo")
__all__ = ["convert_mimo_to_hf"]
