"""What an engine says per token: the kept nucleus, the routed experts, the version of the weights."""

import base64
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

Nucleus = tuple[list[int], list[int]]
"""Token ids of all positions, and where each position's begin: one offset more than positions."""

ASKS_FOR_NUCLEI = {"return_top_p_token_ids": True}
"""``custom_params`` of a request to an engine that tells of nuclei in the manner of the original's SGLang."""

VersionSpans = list[tuple[str | None, int]]
"""Versions of the weights and how many tokens in a row each made; None where nobody said."""

_TOP_P_KEYS = (
    ("top_p_token_ids", "top_p_token_offsets"),
    ("top_p_kept_token_ids", "top_p_kept_token_offsets"),
)
# Of SGLang itself: a list of ids per token, and log-probs within them.
_MASKS, _WITHIN_MASKS = "output_token_sampling_mask", "output_token_sampling_logprobs"


RequestTimes = dict[str, list[float]]
"""What an engine measured of a request, by name, with one value per request that has it."""

_MAX_DIGITS = 18  # Python raises of thousands
_MEASURED = ("e2e_latency", "queue_time", "inference_time", "first_token_latency", "decode_throughput")
_MEASURED_PREFIXES = ("pd_prefill_", "pd_decode_", "prefill_", "decode_")


class RoutedShape(Protocol):
    """The part of ``args`` that gives the shape of the experts that a token was routed to."""

    @property
    def num_layers(self) -> int: ...

    @property
    def moe_router_topk(self) -> int: ...


def version_number(version: str) -> int | None:
    """The number of a version of the weights; None of any other text, however many digits it has."""
    return int(version) if version.isdecimal() and len(version) <= _MAX_DIGITS else None


def decode_int32_array(value: Any) -> np.ndarray:
    """A flat int32 array from base64 text, bytes (both little-endian C order), a tensor or a list."""
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype=np.int32)
    return np.asarray(value, dtype=np.int32).reshape(-1)


def merge_top_p(earlier: Nucleus, meta_info: Mapping[str, Any], new_tokens: int) -> Nucleus | None:
    """The nuclei of earlier tokens and of the ``new_tokens`` that ``meta_info`` brought; None if it has none.

    Raises:
        ValueError: there are nuclei of another number of tokens.
    """
    if (found := _nuclei(meta_info)) is None:
        return None
    key, (ids, offsets) = found
    if len(offsets) != new_tokens + 1 or offsets[0] != 0:
        raise ValueError(f"{key}: expected {new_tokens + 1} entries from 0, found {offsets[:9]}...")
    earlier_ids, earlier_offsets = earlier
    end = earlier_offsets[-1]
    return [*earlier_ids, *ids], [*earlier_offsets, *(end + o for o in offsets[1:])]


def _nuclei(meta_info: Mapping[str, Any]) -> tuple[str, Nucleus] | None:
    """Reads the nuclei of an answer's tokens, and names the key that says how many tokens there are."""
    for ids_key, offsets_key in _TOP_P_KEYS:
        if meta_info.get(ids_key) is not None:
            ids, offsets = (decode_int32_array(meta_info[key]).tolist() for key in (ids_key, offsets_key))
            return offsets_key, (ids, offsets)
    masks = meta_info.get(_MASKS)
    if masks is None:
        return None
    return _MASKS, ([token for mask in masks for token in mask], [0, *accumulate(map(len, masks))])


def log_probs_within(meta_info: Mapping[str, Any], log_probs: Sequence[float] | None) -> Any:
    """Log-probs within the nuclei: ``log_probs`` as they are, or those that SGLang tells beside them."""
    told = any(meta_info.get(ids_key) is not None for ids_key, _ in _TOP_P_KEYS)
    within = None if told else meta_info.get(_WITHIN_MASKS)
    return log_probs if within is None or log_probs is None else within


def nuclei_of_first(meta_info: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What an answer says of the nuclei of its first ``count`` tokens."""
    if (found := _nuclei(meta_info)) is None:
        return {}
    ids, offsets = found[1]
    keys = "top_p_token_ids", "top_p_token_offsets"
    return dict(zip(keys, (ids[: offsets[count]], offsets[: count + 1]), strict=True))


def asks_for_nuclei(sampling_params: Mapping[str, Any]) -> dict[str, bool]:
    """What SGLang itself wants beside ``sampling_params`` that ask for nuclei."""
    asked = (sampling_params.get("custom_params") or {}).get("return_top_p_token_ids")
    return {"return_sampling_mask": True} if asked else {}


def merge_routed_experts(
    earlier: Any, num_tokens: int, args: RoutedShape | None, meta_info: Mapping[str, Any]
) -> np.ndarray | None:
    """Routed experts, int32 [L - 1, layers, top-k], with the rows before the answer's start; None without.

    Args:
        earlier: the rows so far, or None.
        num_tokens: L.
    """
    if meta_info.get("routed_experts") is None:
        return None
    if args is None:
        raise ValueError("routed experts arrived, but append_response_tokens got no args to shape them by")
    start = int(meta_info.get("routed_experts_start_len", 0))
    shape = (num_tokens - 1 - start, args.num_layers, args.moe_router_topk)
    rows = decode_int32_array(meta_info["routed_experts"]).reshape(shape)
    return np.concatenate([*([earlier[:start]] if start else []), rows])


def routed_experts_of_first(meta_info: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What an answer says of the experts of the prompt and its first ``count`` tokens."""
    if meta_info.get("routed_experts") is None:
        return {}
    values = decode_int32_array(meta_info["routed_experts"])
    before = int(meta_info["prompt_tokens"]) - 1 - int(meta_info.get("routed_experts_start_len", 0))
    made = len(meta_info["output_token_logprobs"])
    return {"routed_experts": values[: values.size // (before + made) * (before + count)]}


def fit_versions(spans: VersionSpans, num_tokens: int) -> VersionSpans:
    """The spans of the first ``num_tokens`` tokens, neighbours of one version merged."""
    fitted: VersionSpans = []
    left = num_tokens
    for version, count in [*spans, (None, num_tokens)]:
        taken = min(count, left)
        left -= taken
        if fitted and fitted[-1][0] == version:
            fitted[-1] = version, fitted[-1][1] + taken
        elif taken > 0:
            fitted.append((version, taken))
    return fitted


def merge_versions(
    earlier: VersionSpans, num_earlier: int, meta_info: Mapping[str, Any] | None, num_new: int
) -> VersionSpans:
    """The spans of ``num_earlier`` tokens and of the ``num_new`` that an answer with ``meta_info`` brought.

    An engine whose weights changed while it answered names each version with the tokens it made.
    """
    meta_info = meta_info or {}
    spans: VersionSpans = [
        (str(span["version"]), span["end"] - span["start"]) for span in meta_info.get("weight_versions") or ()
    ]
    if not spans and meta_info.get("weight_version") is not None:
        spans = [(str(meta_info["weight_version"]), num_new)]
    return fit_versions(
        [*fit_versions(earlier, num_earlier), *fit_versions(spans, num_new)], num_earlier + num_new
    )


def merge_request_times(earlier: RequestTimes, meta_info: Mapping[str, Any]) -> RequestTimes:
    """What was measured of earlier requests and of the one that ended with ``meta_info``.

    Latencies are in seconds, ``decode_throughput`` in tokens per second. ``e2e_latency`` is always there, the
    others with ``--sglang-enable-metrics`` or where prefill and decoding have engines of their own.
    """
    merged = dict(earlier)
    for name, value in meta_info.items():
        measured = name in _MEASURED or name.startswith(_MEASURED_PREFIXES)
        if measured and isinstance(value, int | float):
            merged[name] = [*merged.get(name, ()), float(value)]
    return merged
