"""Small models with the mechanisms of a large one: its config, with less of everything that is a number.

What changes how tokens see each other (windows, chunks, contexts) becomes so short that a few dozen tokens
reach beyond it. Names of configs are not standardised: numbers are known by patterns of their names, and a
caller has to be ready for a config of which no model can be built.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from transformers import PretrainedConfig

_WINDOW = re.compile(
    r"window(?!.*layers)|chunk|span|floor|original_max|context_len|block_size|local_attn|block_len"
)
_CONTEXT = re.compile(r"max_position|n_positions|n_ctx|max_seq|seq_len|seq_length|max_len|context_window")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_OF_LAYERS = re.compile(
    r"interval|period|every|pattern|layer_freq|sparse_step|moe_layer|dense_replace|offset|layer_step"
)
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "model_dim")
_WIDTH = re.compile(
    r"intermediate_size|intermediate_dim|ffn_dim|n_inner|d_ff|ffn_hidden|mlp_dim|lru_width|mamba_n_heads|mamba_num_heads|n_mamba_heads"
)
_EXPERTS = re.compile(r"(num|n)_(local_|routed_)?experts$|moe_num_experts$|ffn_num_experts$")
_CHOSEN = re.compile(r"per_tok|top_?k$|_topk")
_VOCAB = re.compile(r"vocab_size")

_SMALL_LENGTH, _STEP = 12, 4
_FEW_LAYERS, _MAX_LAYERS, _SMALL_VOCAB, _ALIGNED = 2, 8, 512, 8


@dataclass(frozen=True)
class Small:
    """A small config.

    Attributes:
        lengths: of rows that together reach beyond every window, chunk and context, some beyond each.
        within: those of them that are no longer than the longest sequence the model says it knows.
    """

    config: PretrainedConfig
    lengths: tuple[int, ...]
    within: tuple[int, ...]


def small_config(config: PretrainedConfig, variant: int) -> Small:
    """The first of ``VARIANTS`` is the smallest; others leave alone what may be so large for a reason.

    Raises:
        Exception: whatever the class of the config has to say against it.
    """
    values = deepcopy(config.to_dict())
    scale = _scale(values)
    for cut in (*_CUTS[variant], partial(_shorter, scale=scale)):
        _everywhere(values, cut)
    return Small(type(config).from_dict(values), *_rows(scale))


def _everywhere(values: dict[str, Any], cut: Callable[[dict[str, Any]], None]) -> None:
    """Calls ``cut`` for a config and for those within it."""
    cut(values)
    for value in values.values():
        if _is_config(value):
            _everywhere(value, cut)


def _is_config(value: Any) -> bool:
    """Tells a config from a mapping of numbers, such as labels or what is special of a layer."""
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _lengths(values: Mapping[str, Any], pattern: re.Pattern[str]) -> Iterator[int]:
    for name, value in values.items():
        if _is_config(value):
            yield from _lengths(value, pattern)
        elif pattern.search(name):
            yield from filter(_is_count, value if isinstance(value, list) else [value])


@dataclass(frozen=True)
class _Scale:
    """What stands for each length of a config: ``windows``, and ``contexts`` that are longer than those."""

    windows: Mapping[int, int]
    contexts: Mapping[int, int]

    def of(self, value: int) -> int:
        return self.windows.get(value, self.contexts.get(value, value))


def _scale(values: Mapping[str, Any]) -> _Scale:
    windows = sorted({*_lengths(values, _WINDOW)})
    contexts = sorted({*_lengths(values, _CONTEXT)} - {*windows})
    small: dict[int, int] = {}
    for value in [*windows, *contexts]:
        last = max(small.values(), default=_STEP - 1)
        free = last + _STEP if value in windows else 2 * last + 4 * _STEP
        small[value] = value if value <= _SMALL_LENGTH else free
    return _Scale({v: small[v] for v in windows}, {v: small[v] for v in contexts})


def _rows(scale: _Scale) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two beyond the longest, one after the other, then short and long ones in turns."""
    windows, contexts = sorted({*scale.windows.values()}), sorted({*scale.contexts.values()})
    longest = max([_STEP, *windows])
    within = (longest + 5, longest + 3, 2, *(length + 1 for length in windows), 3)
    if not contexts:
        return within, within
    return (contexts[-1] + 5, contexts[-1] + 3, *within), tuple(min(n, contexts[0]) for n in within)


def _shorter(values: dict[str, Any], scale: _Scale) -> None:
    for name, value in values.items():
        if not (_WINDOW.search(name) or _CONTEXT.search(name)):
            continue
        if isinstance(value, list):
            values[name] = [scale.of(one) if _is_count(one) else one for one in value]
        elif _is_count(value):
            values[name] = scale.of(value)


def _fewer_layers(values: dict[str, Any]) -> None:
    """The first ones, as many as a pattern of layers needs, and one of each kind that comes later."""
    count = next((values[name] for name in _LAYERS if _is_count(values.get(name))), None)
    if count is None:
        return
    periods = [v for n, v in values.items() if _OF_LAYERS.search(n) and _is_count(v) and v <= _MAX_LAYERS]
    first = min(count, max([_FEW_LAYERS, *(period + 1 for period in periods)]))
    named = [n for n, v in values.items() if _names_layers(n, v, count)]
    per_layer = [n for n, v in values.items() if isinstance(v, list) and len(v) == count and n not in named]
    kinds = [repr([values[name][layer] for name in per_layer]) for layer in range(count)]
    kept = sorted({*range(first), *(kinds.index(kind) for kind in kinds)})
    for name in per_layer:
        values[name] = [values[name][layer] for layer in kept]
    for name in named:
        values[name] = _renumbered(values[name], kept)
    for name in values:
        if name in _LAYERS:
            values[name] = len(kept)
        elif name.endswith("window_layers") and _is_count(values[name]):
            values[name] = min(values[name], len(kept) - 1)


def _names_layers(name: str, value: Any, count: int) -> bool:
    """Whether it has numbers of layers in it: a rising list of them, or what is special of each."""
    if isinstance(value, dict):
        return bool(value) and "layer" in name and all(str(layer).isdigit() for layer in value)
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < count for one in value):
        return False
    return len(value) > 1 and all(one < after for one, after in pairwise(value))


def _renumbered(layers: Any, kept: list[int]) -> Any:
    if isinstance(layers, dict):
        return {kept.index(int(layer)): value for layer, value in layers.items() if int(layer) in kept}
    return [kept.index(layer) for layer in layers if layer in kept]


def _narrower(values: dict[str, Any], few: int) -> None:
    """A few heads of the same size, other widths in the same proportion; fewer experts and words."""
    heads, key_heads = _first(values, _HEADS), _first(values, _KEY_HEADS)
    if heads is not None and heads > few:
        _set(values, _HEADS, few)
        if key_heads is not None:
            _set(values, _KEY_HEADS, few if key_heads == heads else 1)
        for name in values:
            if name in _HIDDEN or _WIDTH.search(name):
                values[name] = _scaled(values[name], few / heads)
    _fewer_experts(values)
    for name, value in values.items():
        if _VOCAB.search(name) and _is_count(value):
            values[name] = min(value, _SMALL_VOCAB)
        elif name.endswith(("_token_id", "_token_index")) and _is_count(value):
            values[name] = value % _SMALL_VOCAB


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, list):
        return [_scaled(one, factor) for one in value]
    # A multiple of what kernels of grouped products take.
    return max(1, round(value * factor / _ALIGNED)) * _ALIGNED if _is_count(value) else value


def _fewer_experts(values: dict[str, Any]) -> None:
    groups = values.get("n_group") or 1
    chosen = [
        v for n, v in values.items() if _CHOSEN.search(n) and "group" not in n and _is_count(v) and v <= 64
    ]
    few = max([8, 2 * groups, *(2 * value for value in chosen)])
    for name, value in values.items():
        if _EXPERTS.search(name) and _is_count(value) and value > few:
            values[name] = -(-few // groups) * groups


def _first(values: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((values[name] for name in names if _is_count(values.get(name))), None)


def _set(values: dict[str, Any], names: Sequence[str], value: int) -> None:
    for name in names:
        if _is_count(values.get(name)):
            values[name] = value


_CUTS = (
    (_fewer_layers, partial(_narrower, few=2)),
    (_fewer_layers, partial(_narrower, few=8)),
    (partial(_narrower, few=2),),
    (_fewer_layers,),
    (),
)
VARIANTS = len(_CUTS)
