"""Where a response is within its grammar, and which tokens may come next."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import xgrammar

_BITS = 32


class Constraint:
    """The state of one response; it moves on with each token, and belongs to the engine's thread.

    Args:
        after: ids whose coming, in this order, ends the reasoning, during which nothing is held to.
    """

    def __init__(self, compiled: "xgrammar.CompiledGrammar", after: tuple[int, ...] = ()) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = -(-compiled.tokenizer_info.vocab_size // _BITS)
        self._after = after
        self._seen: tuple[int, ...] = ()

    @property
    def holds(self) -> bool:
        """False while the response is still reasoning."""
        return not self._after

    @property
    def complete(self) -> bool:
        """Whether the grammar has come to its end, a stop token included."""
        return self.holds and self._matcher.is_terminated()

    def accept(self, token: int) -> bool:
        """Moves on; False if the grammar does not allow the token."""
        if self._after:
            self._seen = (*self._seen, token)[-len(self._after) :]
            if self._seen == self._after:
                self._after = ()
            return True
        return self.complete or self._matcher.accept_token(token)

    def restrict(self, logits: torch.Tensor) -> None:
        """Sets the logits of tokens that may not come next to minus infinity.

        Args:
            logits: ``[vocab]`` float32, changed in place.
        """
        if not self.holds or self.complete:
            return
        mask = torch.zeros(1, self._words, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(mask)
        bits = mask[0].to(logits.device)[:, None] >> torch.arange(_BITS, device=logits.device)
        logits.masked_fill_((bits & 1).flatten()[: len(logits)] == 0, float("-inf"))
