"""Which waiting sequences start next."""

from collections import deque
from dataclasses import dataclass, field

from slime.backends.embedded_engine.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """``tokens`` bounds rows times their length, which is what the cache allocates at most."""

    rows: int
    tokens: int
    chunk: int
    context: int


@dataclass
class Plan:
    """``fresh`` are computed together; ``copies`` take the prompt of another sequence; or one long."""

    fresh: list[Sequence] = field(default_factory=list)
    copies: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    long: Sequence | None = None


class Admission:
    """Plans one prefill: first come, first served, within the limits.

    A sequence only starts when its longest possible response fits, so none is ever thrown out for
    lack of memory.
    """

    def __init__(self, limits: Limits, running: list[Sequence], single: bool) -> None:
        self._limits = limits
        self._single = single
        self._rows = len(running)
        self._longest = max((s.max_length for s in running), default=0)
        self._sources = {s.prompt_key: s for s in running if s.prompt_hidden is not None}
        self._padded = 0

    def plan(self, waiting: deque[Sequence]) -> Plan:
        """Takes what starts now from the queue."""
        plan = Plan()
        while waiting and self._fits(waiting[0]):
            sequence = waiting[0]
            # Who can share depends on who runs, and so on timing: one by one, not even that may vary.
            shareable = not (self._single or sequence.output_ids or sequence.needs_prompt_logprobs)
            source = self._sources.get(sequence.prompt_key) if shareable else None
            if source is not None:
                plan.copies.append((sequence, source))
            elif sequence.length > self._limits.chunk:
                if plan.fresh or plan.copies:
                    break
                plan.long = waiting.popleft()
                break
            elif not self._joins(plan.fresh, sequence):
                break
            else:
                plan.fresh.append(sequence)
                if not sequence.output_ids:
                    self._sources[sequence.prompt_key] = sequence
            self._rows += 1
            self._longest = max(self._longest, sequence.max_length)
            waiting.popleft()
        return plan

    def _fits(self, sequence: Sequence) -> bool:
        rows = self._rows + 1
        longest = max(self._longest, sequence.max_length)
        return rows <= self._limits.rows and (rows == 1 or rows * longest <= self._limits.tokens)

    def _joins(self, fresh: list[Sequence], sequence: Sequence) -> bool:
        """Whether a prompt may be computed beside those, which have one adapter; padding counts."""
        if not fresh:
            return True
        if sequence.adapter is not fresh[0].adapter:
            return False
        self._padded = max(*(s.length for s in fresh), sequence.length)
        return not self._single and self._padded * (len(fresh) + 1) <= self._limits.chunk
