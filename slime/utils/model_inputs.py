"""What a model computes of one sequence, as rollouts, engines and trainers hand it on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

# Ids are eight bytes each: an odd byte keeps a key with a digest from being that of a longer text.
_NOT_TEXT = b"+"


@dataclass(frozen=True)
class SequenceInputs:
    """All that the logits of a sequence depend on, beside the weights.

    Attributes:
        ids: token ids [L], a list or a tensor.
        positions: [k, L] integers, the place of each token on k axes; None for text, where it is its index.
        media: by name what a model reads beside tokens, patches of images for instance: [n, ...] each.
    """

    ids: Any
    positions: Any = None
    media: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def cache_key(self) -> bytes:
        """Equal for sequences whose keys and values are equal, so that one may start from another's."""
        key = np.asarray(self.ids, dtype=np.int64).tobytes()
        if self.positions is None and not self.media:
            return key
        digest = blake2b(digest_size=32)
        for name, value in [("", self.positions), *sorted(self.media.items())]:
            array = np.ascontiguousarray(() if value is None else value)
            digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
            digest.update(array.data)
        return key + _NOT_TEXT + digest.digest()


def media_names(inputs: Sequence[SequenceInputs]) -> list[str]:
    """The names of what any of them has beside tokens."""
    return sorted({name for one in inputs for name in one.media})
