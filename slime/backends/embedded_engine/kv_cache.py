"""Keys and values of running sequences: one row per sequence, rows kept without holes."""

from itertools import chain

import torch

from slime.backends.embedded_engine.model_config import ModelConfig

_FIRST_LENGTH = 128
_FIRST_ROWS = 8


class KVCache:
    """``k``, ``v``: ``[layers, rows, kv_heads, length, head_dim]``.

    Rows and length grow by doubling, as long as their product stays within ``max_tokens``.

    Zeroed when allocated: masked entries still take part in a product with weight 0, which is NaN
    for garbage that happens to be NaN.
    """

    def __init__(
        self, config: ModelConfig, max_rows: int, max_length: int, max_tokens: int | None = None
    ) -> None:
        self._config = config
        self._max_rows = max_rows
        self._max_length = max_length
        self._max_tokens = max_rows * max_length if max_tokens is None else max_tokens
        self.clear()

    @staticmethod
    def bytes_per_token(config: ModelConfig) -> int:
        shape = config.shape
        width = 2 * shape.num_layers * shape.num_query_groups * shape.kv_channels
        return width * torch.empty(0, dtype=config.dtype).element_size()

    def clear(self) -> None:
        """Frees everything."""
        self._rows = self._length = 0
        self.k = self._allocate(0, 0)
        self.v = self._allocate(0, 0)

    def _allocate(self, rows: int, length: int) -> torch.Tensor:
        c = self._config.shape
        size = (c.num_layers, rows, c.num_query_groups, length, c.kv_channels)
        return torch.zeros(size, dtype=self._config.dtype, device=self._config.device)

    def reserve(self, rows: int, length: int) -> None:
        if rows <= self._rows and length <= self._length:
            return
        new_rows, new_length = self._size_for(rows, length)
        self._resize(new_rows, new_length)
        self._rows, self._length = new_rows, new_length

    def _resize(self, rows: int, length: int) -> None:
        """Moves everything to tensors of this size."""
        kept_rows, kept_length = min(self._rows, rows), min(self._length, length)
        for name in ("k", "v"):
            resized = self._allocate(rows, length)
            resized[:, :kept_rows, :, :kept_length] = getattr(self, name)[:, :kept_rows, :, :kept_length]
            setattr(self, name, resized)

    def _size_for(self, rows: int, length: int) -> tuple[int, int]:
        """Rows and length to allocate: with room to grow, or as much of it as the limit allows."""
        new_rows = _grown(self._rows, rows, _FIRST_ROWS, self._max_rows)
        new_length = _grown(self._length, length, _FIRST_LENGTH, self._max_length)
        if new_rows * new_length > self._max_tokens:
            # length first: every step needs more of it, and more rows only come with new requests
            new_length = max(length, min(new_length, self._max_tokens // rows))
            new_rows = max(rows, min(new_rows, self._max_tokens // new_length))
        return new_rows, new_length

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of a row over another row."""
        self.k[:, target, :, :length] = self.k[:, source, :, :length]
        self.v[:, target, :, :length] = self.v[:, source, :, :length]

    def import_row(self, other: "KVCache", target: int, length: int) -> None:
        """Copies the first ``length`` tokens of another cache's row 0."""
        self.k[:, target, :, :length] = other.k[:, 0, :, :length]
        self.v[:, target, :, :length] = other.v[:, 0, :, :length]


class LayerCache(KVCache):
    """A cache that grows layer by layer, in sizes that the model alone knows: those of the first keys and
    values.

    ``layers``: by number a layer's keys and values, each ``[rows, heads, length, width]``.
    """

    def clear(self) -> None:
        """Frees everything."""
        self._rows = self._length = 0
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, number: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer that now has such ones, ``[B, heads, T, width]``."""
        if number not in self.layers:
            self.layers[number] = self._like(k), self._like(v)
        return self.layers[number]

    def _like(self, new: torch.Tensor) -> torch.Tensor:
        return new.new_zeros(self._rows, new.shape[1], self._length, new.shape[3])

    def _resize(self, rows: int, length: int) -> None:
        kept_rows, kept_length = min(self._rows, rows), min(self._length, length)
        for number, pair in self.layers.items():
            resized = [old.new_zeros(rows, old.shape[1], length, old.shape[3]) for old in pair]
            for new, old in zip(resized, pair, strict=True):
                new[:kept_rows, :, :kept_length] = old[:kept_rows, :, :kept_length]
            self.layers[number] = resized[0], resized[1]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of a row over another row."""
        for tensor in chain.from_iterable(self.layers.values()):
            tensor[target, :, :length] = tensor[source, :, :length]

    def import_row(self, other: KVCache, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of another cache's row 0."""
        assert isinstance(other, LayerCache)
        for number, (k, v) in other.layers.items():
            own = self.layer(number, k, v)
            for tensor, theirs in zip(own, (k, v), strict=True):
                tensor[target, :, :length] = theirs[0, :, :length]


def _grown(current: int, wanted: int, first: int, limit: int) -> int:
    if wanted <= current:
        return current
    return min(max(wanted, 2 * current, first), limit)
