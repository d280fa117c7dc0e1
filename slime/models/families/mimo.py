"""MiMo-7B: Qwen2 with MTP layers."""

from dataclasses import replace

from slime.models.decoder import DECODER_WEIGHTS
from slime.models.families.qwen2 import qwen2_shape
from slime.models.family import Family
from slime.models.mtp import MIMO_MTP


def _predicts_further_tokens(name: str, num_layers: int) -> bool:
    return name.startswith("model.mtp_layers.")


FAMILY = Family(
    shape=qwen2_shape,
    weights=replace(DECODER_WEIGHTS, untrained=_predicts_further_tokens, mtp=MIMO_MTP),
    like_llama=True,
)
