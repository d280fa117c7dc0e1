"""Llama 2 and 3."""

from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.family import Family

FAMILY = Family(shape=decoder_shape, weights=DECODER_WEIGHTS, like_llama=True)
