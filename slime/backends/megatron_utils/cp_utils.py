"""Where plug-ins import what concerns context parallelism, and the reducer of losses."""

from slime.training.cp_plugins import (
    all_gather_with_cp,
    get_logits_and_tokens_offset_with_cp,
    slice_log_prob_with_cp,
)
from slime.training.losses.reducers import get_sum_of_sample_mean

__all__ = [
    "all_gather_with_cp",
    "get_logits_and_tokens_offset_with_cp",
    "get_sum_of_sample_mean",
    "slice_log_prob_with_cp",
]
