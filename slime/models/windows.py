"""Layers that see only the last tokens."""

from slime.models.hf_config import HfConfig

SEES_ALL, LOCAL = "full_attention", "sliding_attention"


def attention_windows(config: HfConfig, num_layers: int, window: int, pattern: int) -> tuple[int | None, ...]:
    """How many tokens each layer sees, None for all.

    Args:
        config: says it by ``layer_types``, or by ``sliding_window_pattern``.
        num_layers: of the model.
        window: where ``sliding_window`` is missing.
        pattern: each layer of such a number sees all, where config.json says neither.
    """
    window, pattern = config.size("sliding_window", window), config.size("sliding_window_pattern", pattern)
    default = [LOCAL if (layer + 1) % pattern else SEES_ALL for layer in range(num_layers)]
    kinds = config.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != num_layers or {*kinds} - {SEES_ALL, LOCAL}:
        raise config.wrong("layer_types", kinds, f"{SEES_ALL} or {LOCAL} for each of {num_layers} layers")
    return tuple(window if kind == LOCAL else None for kind in kinds)
