"""GLM-4.7-Flash: DeepSeek-V3's layers in other numbers."""

from slime.models.families.deepseek_v3 import LATENT_WEIGHTS, latent_moe_flops, latent_shape
from slime.models.family import Family, InSglang
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape


def _shape(config: HfConfig) -> ModelShape:
    return latent_shape(config.filled(num_key_value_heads=20, rms_norm_eps=1e-5), default_dense=1)


FAMILY = Family(
    shape=_shape,
    weights=LATENT_WEIGHTS,
    forward_flops=latent_moe_flops,
    in_sglang=InSglang(own_head=True),
)
