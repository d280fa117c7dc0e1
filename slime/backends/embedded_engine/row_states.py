"""States that layers of linear attention have in the place of tokens, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from slime.backends.embedded_engine.kv_cache import KVCache, LayerCache
from slime.backends.embedded_engine.linear import missing_rows


class State(NamedTuple):
    """The state of a layer for one or more sequences (the first dimension)."""

    convolution: torch.Tensor
    recurrent: torch.Tensor


@dataclass(frozen=True)
class RowStates:
    """The states of a sequence by layer: those after its newest token, and those after its prompt, where
    copies start.

    Nothing writes to the tensors, so that copies share them.
    """

    length: int = 0
    newest: dict[int, State] = field(default_factory=dict)
    prompt_length: int = 0
    prompt: dict[int, State] = field(default_factory=dict)

    def as_prompt(self) -> "RowStates":
        """Takes the present states as those after the prompt."""
        return replace(self, prompt_length=self.length, prompt=self.newest)

    def start(self, length: int) -> "RowStates":
        """Returns the states after ``length`` tokens.

        Raises:
            ValueError: they are not kept.
        """
        if length == self.length:
            return self
        if length != self.prompt_length:
            raise ValueError(f"states after {length} tokens: only those after {self.prompt_length} are kept")
        return RowStates(length, self.prompt, length, self.prompt)


class StateCache(LayerCache):
    """Keys and values of the layers that attend, and the states of the others."""

    def clear(self) -> None:
        """Frees everything."""
        super().clear()
        self.states: list[RowStates] = []
        self.growing: GrowingStates | None = None
        """The states of row 0, if a prompt is computed there in chunks."""

    def reserve(self, rows: int, length: int) -> None:
        super().reserve(rows, length)
        self._have(rows)

    def _have(self, rows: int) -> None:
        self.states += [RowStates() for _ in range(rows - len(self.states))]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of a row over another row."""
        super().copy_row(source, target, length)
        self._have(target + 1)
        self.states[target] = self.states[source].start(length)

    def import_row(self, other: KVCache, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of another cache's row 0, a prompt."""
        super().import_row(other, target, length)
        assert isinstance(other, StateCache)
        self._have(target + 1)
        self.states[target] = other.states[0].start(length).as_prompt()


class GrowingStates(DynamicCache):
    """The states of one sequence of which several tokens are computed at a time.

    Like `NewestStates` it is what ``transformers`` takes for a cache; keys and values go another way.
    """

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return key_states, value_states

    def states(self) -> dict[int, State]:
        """Returns the states by layer; the next pass writes to them."""
        return {
            number: State(layer.conv_states[0], layer.recurrent_states[0])
            for number, layer in enumerate(self.layers)
            if isinstance(layer, LinearAttentionLayer)
        }


class NewestStates:
    """The states of rows of which one token each is computed, and of padding to a multiple of
    `VECTOR_ROWS`.
    """

    def __init__(self, rows: Sequence[RowStates]) -> None:
        self._rows = rows
        self._convolutions: dict[int, torch.Tensor] = {}
        self._recurrent: dict[int, torch.Tensor] = {}

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return key_states, value_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """Which is written to."""
        joined = _joined([row.newest[layer_idx].convolution for row in self._rows])
        self._convolutions[layer_idx] = joined
        return joined

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return _joined([row.newest[layer_idx].recurrent for row in self._rows])

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int) -> None:
        self._recurrent[layer_idx] = recurrent_states

    def split(self) -> list[RowStates]:
        """The rows after the pass."""
        return [
            replace(row, length=row.length + 1, newest=self._of_row(slice(number, number + 1)))
            for number, row in enumerate(self._rows)
        ]

    def _of_row(self, row: slice) -> dict[int, State]:
        return {
            layer: State(convolution[row], self._recurrent[layer][row])
            for layer, convolution in self._convolutions.items()
        }


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    padding = parts[0].new_zeros(missing_rows(len(parts)), *parts[0].shape[1:])
    return torch.cat([*parts, padding])
