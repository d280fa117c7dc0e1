"""What scheduler and engine need of a model and its cache, whoever computes it."""

from typing import Any, Protocol

import torch

from slime.backends.embedded_engine.adapters import Adapter


class ServedModel(Protocol):
    """A language model's head, and what is added to its layers.

    Attributes:
        adapter: of what is computed next; None for the base alone.
    """

    adapter: Adapter | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden]`` to ``[N, vocab]`` float32."""


class SequenceCache(Protocol):
    """What has been computed of running sequences: one row per sequence, rows kept without holes."""

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for ``rows`` sequences of ``length`` tokens, and keeps what they hold.

        Rows and tokens beyond these may be given up, so the two must cover all that is in use.
        """

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of a row over another row."""

    def import_row(self, other: Any, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of another cache's row 0."""

    def clear(self) -> None:
        """Frees everything."""


class ModelExecutor(Protocol):
    """Prefill and decode; which sequence sits in which cache row is the scheduler's business.

    No bit of what it computes for a sequence depends on who else is there.

    Attributes:
        device: where hidden states are.
        routes: experts of the tokens that were computed last, int32 on the host, shaped as the hidden states
            with ``[layers, top-k]`` in place of ``hidden``; None where they are not recorded.
    """

    device: torch.device
    routes: torch.Tensor | None

    @property
    def model(self) -> ServedModel: ...

    @property
    def cache(self) -> SequenceCache: ...

    def new_cache(self, length: int) -> SequenceCache:
        """Makes a cache for a prompt of that length that is computed alone, in chunks."""

    def prefill(self, prompts: list[list[int]], first_row: int) -> torch.Tensor:
        """Computes whole prompts into rows ``first_row...``; returns hidden states ``[B, T, hidden]``.

        Right-padded; the hidden states of padding mean nothing.
        """

    def prefill_chunk(self, ids: list[int], start: int, cache: Any) -> torch.Tensor:
        """Computes tokens ``start...`` of row 0 of a cache of its own; returns ``[1, T, hidden]``."""

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, first_row: int, longest: int
    ) -> torch.Tensor:
        """One token for each of the rows ``first_row...``; returns hidden states ``[B, hidden]``.

        Args:
            ids: ``[B]`` newest token of each row.
            positions: ``[B]`` its position.
            first_row: cache row of the first one.
            longest: the largest position plus one.
        """
