"""``--spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec``: what config.json asks for anyway."""

from slime.backends.megatron_utils.layer_spec import layer_spec as get_minimax_m2_layer_spec

__all__ = ["get_minimax_m2_layer_spec"]
