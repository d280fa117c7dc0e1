"""Tokens with what was recorded of each, and the text they make: the labels of the tree's edges."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.router.middleware_hub.token_text import token_spans

ID, LOGP, SPAN = 0, 1, 2
_GENERATED, _CLOSED, _LENGTH_SHIFT = 1, 2, 2


@dataclass(frozen=True, eq=False)
class TokenRun:
    """Some tokens in a row.

    Attributes:
        text: what they make.
        rows: int32 [n, 3]: the id, the bits of the float32 log-prob, and the characters that the token adds
            times 4, plus 2 if a character ends with it, plus 1 if it was generated.
    """

    text: str
    rows: np.ndarray

    @staticmethod
    def of(
        text: str, ids: Sequence[int], logp: Sequence[float], loss_mask: Sequence[int], tokenizer: Any
    ) -> "TokenRun":
        lengths, closed = token_spans(text, ids, tokenizer)
        rows = np.empty((len(ids), 3), np.int32)
        rows[:, ID] = ids
        rows[:, LOGP] = np.asarray(logp, np.float32).view(np.int32)
        generated = np.asarray(loss_mask, np.int32) != 0
        rows[:, SPAN] = (lengths << _LENGTH_SHIFT) | (closed * _CLOSED) | (generated * _GENERATED)
        return TokenRun(text, rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> list[int]:
        return self.rows[:, ID].tolist()

    @property
    def logp(self) -> list[float]:
        return np.ascontiguousarray(self.rows[:, LOGP]).view(np.float32).tolist()

    @property
    def loss_mask(self) -> list[int]:
        return (self.rows[:, SPAN] & _GENERATED).tolist()

    @property
    def ends(self) -> np.ndarray:
        """The position in the text where each token ends, int64 [n]."""
        return np.cumsum(self.rows[:, SPAN] >> _LENGTH_SHIFT)

    @property
    def closed(self) -> np.ndarray:
        """Whether the run may be split after each token, bool [n]."""
        return (self.rows[:, SPAN] & _CLOSED) != 0

    @property
    def first_piece(self) -> str:
        """The text of the fewest tokens at the start that may be parted from the rest."""
        span = int(self.rows[0, SPAN])
        if span & _CLOSED:
            return self.text[: span >> _LENGTH_SHIFT]
        count = int(self.closed.argmax()) + 1
        return self.text[: int((self.rows[:count, SPAN] >> _LENGTH_SHIFT).sum())]

    def head(self, count: int) -> "TokenRun":
        """The first tokens; a character ends with the last of them."""
        if count == len(self):
            return self
        length = int((self.rows[:count, SPAN] >> _LENGTH_SHIFT).sum())
        return TokenRun(self.text[:length], self.rows[:count].copy())

    def tail(self, count: int) -> "TokenRun":
        """What follows the first ``count`` tokens."""
        length = int((self.rows[:count, SPAN] >> _LENGTH_SHIFT).sum())
        return TokenRun(self.text[length:], self.rows[count:].copy())

    def tokens_within(self, characters: int) -> int:
        """The most tokens that make no more than so many characters and may be parted from the rest."""
        fitting = np.flatnonzero(self.closed & (self.ends <= characters))
        return int(fitting[-1]) + 1 if len(fitting) else 0

    def shared_with(self, other: "TokenRun") -> int:
        """The most tokens at the start of both that are the same in every respect."""
        most = min(len(self), len(other))
        differing = (self.rows[:most] != other.rows[:most]).any(axis=1)
        same = int(differing.argmax()) if differing.any() else most
        ends, closed = self.ends[:same], self.closed[:same]
        for count in np.flatnonzero(closed)[::-1] + 1:
            end = int(ends[count - 1])
            if self.text[:end] == other.text[:end]:
                return int(count)
        return 0

    def until_last_generated(self) -> "TokenRun":
        """The run without the tokens after the last one that was generated."""
        generated = (self.rows[:, SPAN] & _GENERATED) != 0
        last = np.flatnonzero(generated & self.closed)
        return self.head(int(last[-1]) + 1 if len(last) else 0)


EMPTY = TokenRun("", np.empty((0, 3), np.int32))


def joined(runs: Sequence[TokenRun]) -> TokenRun:
    """One run of several."""
    if not runs:
        return EMPTY
    return TokenRun("".join(run.text for run in runs), np.concatenate([run.rows for run in runs]))
