"""What a gated delta net keeps for its backward pass, in bytes per token of a rank.

The terms follow ``slime_plugins/models/gated_delta_net.py`` and, in plain torch, ``delta_rule.py``: the
kernels of flash-linear-attention keep less.
"""

from slime.check.kernels import Kernels
from slime.config.model import ModelConfig
from slime.models.linear_attention import DeltaNetSizes

_FLOAT32, _INDEX = 4, 8
_CHUNK = 64


def delta_net(
    model: ModelConfig, kernels: Kernels, size: int, tp: int, cp: int, longest: int
) -> tuple[float, float, float]:
    """(projections and gates, the rule itself, what the output is projected from).

    Args:
        kernels: of the device.
        size: bytes of an element.
        tp, cp: ranks that share heads, and tokens; the rule is computed for the tokens of all of the latter.
        longest: tokens of a segment.
    """
    sizes = DeltaNetSizes.of(model)
    keys, heads = sizes.key_heads // tp, sizes.key_heads * sizes.ratio // tp
    projected = _convolved(sizes, keys, heads, size) + (2 * _FLOAT32 + size) * heads
    values = heads * sizes.value
    gate = _FLOAT32 * values
    if size == _FLOAT32 and keys == 1:
        gate = size * sizes.projected // tp  # no copy, but a view of all that was projected
    # The rule's output, normed, times the weight; the gate and its silu, both in float32.
    normed = _FLOAT32 * values + kernels.norm(heads, 0, _FLOAT32) + 2 * size * values
    gates = normed + gate + _FLOAT32 * values
    return cp * projected + gates, cp * _rule(sizes, heads, longest), size * values


def _convolved(sizes: DeltaNetSizes, keys: int, heads: int, size: int) -> float:
    """Input and output of the convolution with their places, and queries and keys with their lengths."""
    features = keys * 2 * sizes.key + heads * sizes.value
    wide = features * size if size == _FLOAT32 else 2 * keys * sizes.key * _FLOAT32
    return 2 * features * size + 2 * _INDEX + wide + 2 * keys * _FLOAT32


def _rule(sizes: DeltaNetSizes, heads: int, longest: int) -> float:
    """Counts the activations of the chunked rule, all in float32.

    Matrix products copy what is not in their order.
    """
    size = min(_CHUNK, longest)
    chunks = -(-longest // size)
    # Queries: copied for a product, scaled by the decay; keys: times the strength, copied, and so on. What
    # the last chunk writes into a state is read by nobody.
    of_keys = 9 + (chunks - 1) / chunks
    pairs = (
        5  # decay, what solves the writes (before and after it), what tokens read within a chunk (likewise)
    )
    elements = of_keys * sizes.key + 3 * sizes.value + pairs * size + 4
    return _FLOAT32 * heads * (elements + sizes.key * sizes.value / size)
