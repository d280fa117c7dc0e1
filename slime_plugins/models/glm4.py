"""``--spec slime_plugins.models.glm4 get_glm_spec``: the layers that config.json asks for anyway."""

from slime.backends.megatron_utils.layer_spec import layer_spec as get_glm4_spec

get_glm_spec = get_glm4_spec

__all__ = ["get_glm4_spec", "get_glm_spec"]
