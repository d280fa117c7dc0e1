"""Models of ``transformers`` for many sequences at once, over one cache with a row for each."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from slime.backends.embedded_engine.executor import padded_ids
from slime.backends.embedded_engine.kv_cache import LayerCache
from slime.backends.embedded_engine.linear import missing_rows
from slime.backends.embedded_engine.row_attention import Chunk, Newest, Prompts, Rows
from slime.backends.embedded_engine.row_states import NewestStates, RowStates, StateCache
from slime.backends.embedded_engine.transformers_model import TransformersLM


class RowExecutor:
    """Prefill and decode, for models all of whose layers attend to keys and values of tokens.

    Everything but attention takes all tokens of a pass at once, padded to a multiple of `VECTOR_ROWS`, so
    that no bit of a sequence's result depends on who else is there.
    """

    def __init__(self, model: TransformersLM, cache: LayerCache) -> None:
        self.model = model
        self.cache = cache
        self.device = model.config.device
        self.routes: torch.Tensor | None = None

    def new_cache(self, length: int) -> LayerCache:
        """Makes a cache for a prompt of that length that is computed alone, in chunks."""
        return LayerCache(self.model.config, 1, length)

    def prefill(self, prompts: list[list[int]], first_row: int) -> torch.Tensor:
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        self.cache.reserve(first_row + len(prompts), longest)
        ids = padded_ids(prompts, longest + missing_rows(longest)).to(self.device)
        positions = self._positions(0, ids.shape[1]).expand_as(ids)
        hidden = self._forward(ids, positions, Prompts(self.cache, first_row, lengths))
        if self.routes is not None:
            self.routes = self.routes[:, :longest]
        return hidden[:, :longest]

    def prefill_chunk(self, ids: list[int], start: int, cache: LayerCache) -> torch.Tensor:
        """Computes tokens ``start...`` of row 0 of a cache of its own; returns ``[1, T, hidden]``."""
        end = start + len(ids)
        cache.reserve(1, end)
        return self._forward(self._ids(ids), self._positions(start, end), Chunk(cache, start))

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, first_row: int, longest: int
    ) -> torch.Tensor:
        self.cache.reserve(first_row + len(ids), longest)
        return self._decode(ids, positions, first_row)

    def _decode(
        self, ids: torch.Tensor, positions: torch.Tensor, first_row: int, states: Any = None
    ) -> torch.Tensor:
        count = len(ids)
        padding = (0, missing_rows(count))
        padded, at = F.pad(ids, padding)[:, None], F.pad(positions, padding)[:, None]
        hidden = self._forward(padded, at, Newest(self.cache, first_row, positions), states)
        if self.routes is not None:
            self.routes = self.routes[:count, 0]
        return hidden[:count, 0]

    def _ids(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self.device)

    def _positions(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end, device=self.device)[None]

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: Rows, states: Any = None
    ) -> torch.Tensor:
        hidden = self.model.forward_rows(ids, positions, rows, states)
        if self.model.recorder is not None:
            self.routes = self.model.recorder.take().unflatten(0, ids.shape)
        return hidden


class StateExecutor(RowExecutor):
    """Computes rows where some layers have a state instead of tokens: prompts come one after the other."""

    def __init__(self, model: TransformersLM, cache: StateCache) -> None:
        super().__init__(model, cache)
        self.cache: StateCache = cache

    def new_cache(self, length: int) -> StateCache:
        """Makes a cache for a prompt of that length that is computed alone, in chunks."""
        cache = StateCache(self.model.config, 1, length)
        cache.growing = self.model.new_states()
        return cache

    def prefill(self, prompts: list[list[int]], first_row: int) -> torch.Tensor:
        self.cache.reserve(first_row + len(prompts), max(map(len, prompts)))
        hidden, routes = [], []
        for row, prompt in enumerate(prompts, first_row):
            states = self.model.new_states()
            ids, positions = self._ids(prompt), self._positions(0, len(prompt))
            (found,) = self._forward(ids, positions, Prompts(self.cache, row, [len(prompt)]), states)
            self.cache.states[row] = RowStates(len(prompt), states.states()).as_prompt()
            hidden.append(found)
            routes += [] if self.routes is None else [self.routes[0]]
        if routes:
            self.routes = pad_sequence(routes, batch_first=True)
        return pad_sequence(hidden, batch_first=True)

    def prefill_chunk(self, ids: list[int], start: int, cache: LayerCache) -> torch.Tensor:
        """Computes tokens ``start...`` of row 0 of a cache of its own; returns ``[1, T, hidden]``."""
        assert isinstance(cache, StateCache) and cache.growing is not None
        end, states = start + len(ids), cache.growing
        cache.reserve(1, end)
        positions = self._positions(start, end)
        hidden = self._forward(self._ids(ids), positions, Chunk(cache, start), states)
        cache.states[0] = RowStates(end, states.states())
        return hidden

    def _decode(
        self, ids: torch.Tensor, positions: torch.Tensor, first_row: int, states: Any = None
    ) -> torch.Tensor:
        rows = slice(first_row, first_row + len(ids))
        newest = NewestStates(self.cache.states[rows])
        hidden = super()._decode(ids, positions, first_row, newest)
        self.cache.states[rows] = newest.split()
        return hidden
