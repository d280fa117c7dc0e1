"""What kernels keep for the backward pass beside their inputs and outputs, which depends on the device."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernels:
    """Bytes per token.

    Attributes:
        norm: beside the input of a norm of so many rows with so many features in all, of so many bytes each.
        attention: beside queries and keys of equal width, values and output, for so many heads of queries.
        pads_values: whether values are copied, as wide as keys, and the output is as wide.
    """

    norm: Callable[[int, int, int], float]
    attention: Callable[[int], float]
    pads_values: bool


CUDA = Kernels(
    norm=lambda rows, features, size: 4 * rows,  # a factor of each row
    attention=lambda heads: 4 * heads,  # the logarithm of the sum of each row
    pads_values=True,
)
"""torch's fused norm and ``varlen_attn``."""
