"""Arrays that an engine returns per token: the kept nucleus and the routed experts."""

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from slime.utils.types import Sample

_TOP_P_KEYS = (
    ("top_p_token_ids", "top_p_token_offsets"),
    ("top_p_kept_token_ids", "top_p_kept_token_offsets"),
)


class RoutedShape(Protocol):
    """Of ``args``: the shape of the experts that a token was routed to."""

    @property
    def num_layers(self) -> int: ...

    @property
    def moe_router_topk(self) -> int: ...


def decode_int32_array(value: Any) -> np.ndarray:
    """A flat int32 array from base64 text, bytes (both little-endian C order), a tensor or a list."""
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype=np.int32)
    return np.asarray(value, dtype=np.int32).reshape(-1)


def merge_top_p(sample: "Sample", meta_info: Mapping[str, Any], new_tokens: int) -> None:
    """Append the nuclei of the last ``new_tokens`` tokens, shifting their offsets.

    Raises:
        ValueError: the offsets do not have ``new_tokens`` + 1 entries that start at 0.
    """
    for ids_key, offsets_key in _TOP_P_KEYS:
        if meta_info.get(ids_key) is None:
            continue
        ids = decode_int32_array(meta_info[ids_key]).tolist()
        offsets = decode_int32_array(meta_info[offsets_key]).tolist()
        if len(offsets) != new_tokens + 1 or offsets[0] != 0:
            raise ValueError(
                f"{offsets_key}: expected {new_tokens + 1} entries from 0, found {offsets[:9]}..."
            )
        earlier = sample.rollout_top_p_token_offsets or [0] * (sample.response_length - new_tokens + 1)
        sample.rollout_top_p_token_ids = [*(sample.rollout_top_p_token_ids or []), *ids]
        sample.rollout_top_p_token_offsets = [*earlier, *(earlier[-1] + o for o in offsets[1:])]
        return


def pad_top_p(sample: "Sample", new_tokens: int) -> None:
    """Give tokens that no model sampled an empty nucleus, if nuclei are recorded at all."""
    if sample.rollout_top_p_token_offsets is not None:
        last = sample.rollout_top_p_token_offsets[-1]
        sample.rollout_top_p_token_offsets = [*sample.rollout_top_p_token_offsets, *[last] * new_tokens]


def merge_routed_experts(sample: "Sample", args: RoutedShape | None, meta_info: Mapping[str, Any]) -> None:
    """Store routed experts as int32 [L - 1, layers, top-k], keeping the rows before the answer's start."""
    if meta_info.get("routed_experts") is None:
        return
    if args is None:
        raise ValueError("routed experts arrived, but append_response_tokens got no args to shape them by")
    start = int(meta_info.get("routed_experts_start_len", 0))
    shape = (len(sample.tokens) - 1 - start, args.num_layers, args.moe_router_topk)
    rows = decode_int32_array(meta_info["routed_experts"]).reshape(shape)
    kept = [sample.rollout_routed_experts[:start]] if start else []
    sample.rollout_routed_experts = np.concatenate([*kept, rows])
