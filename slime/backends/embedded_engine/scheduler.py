"""Decides which sequences run, and keeps each of them consistent with its cache row.

Invariant: ``running[i]`` owns row ``i`` of the cache, which holds all of its tokens but the newest.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from slime.backends.embedded_engine.adapters import Adapters
from slime.backends.embedded_engine.admission import Admission, Limits
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.prompt_logprobs import record_prompt_logprobs
from slime.backends.embedded_engine.sampler import SampledTokens, SamplingBatch
from slime.backends.embedded_engine.sequence import Logprobs, Sequence, abort_reason, length_reason
from slime.backends.embedded_engine.serving_model import ModelExecutor, SequenceCache
from slime.backends.embedded_engine.stopping import StopChecker

_NOT_FINITE = "the logits are NaN or infinite: are the weights finite, and the penalties no extremes?"
_NO_TOKEN = "the grammar and min_new_tokens leave no token that may come next, or the logits are NaN"


@dataclass
class DecodeGroup:
    """Rows that are decoded in one forward pass, with their state as tensors."""

    first_row: int
    sequences: list[Sequence]
    ids: torch.Tensor
    positions: torch.Tensor
    longest: int
    sampling: SamplingBatch


@dataclass
class PartialPrefill:
    """A prompt too long for one step, computed in a cache of its own until it is complete."""

    sequence: Sequence
    cache: SequenceCache
    computed: int = 0
    shareable: bool = True
    """False once a part of it comes from older weights."""
    prompt_logprobs: Logprobs = field(default_factory=Logprobs)
    """Log-probs of the part computed so far: if it is given up, the sequence keeps nothing of it."""
    routes: list[torch.Tensor] = field(default_factory=list)
    """Likewise."""


class Scheduler:
    """Continuous batching: each step admits and prefills what fits, then decodes one token for all.

    With ``deterministic`` every sequence is computed by itself, in steps that depend on nothing but
    itself; then no bit of a result depends on what else the engine was doing.
    """

    def __init__(
        self, executor: ModelExecutor, stops: StopChecker, limits: Limits, deterministic: bool
    ) -> None:
        self._executor = executor
        self._stops = stops
        self._limits = limits
        self._deterministic = deterministic
        self._groups: list[DecodeGroup] | None = None
        self.weight_version = "default"
        self.adapters = Adapters({}, torch.empty(0), 0)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.partial: PartialPrefill | None = None
        self._starting: list[Sequence] = []
        self.touched: list[Sequence] = []
        """Sequences that got a token or ended since the engine last told their owners."""
        self.generated_tokens = 0

    @property
    def computing(self) -> list[Sequence]:
        """Sequences that own keys and values."""
        return self.running + self._starting + ([self.partial.sequence] if self.partial else [])

    @property
    def live(self) -> list[Sequence]:
        return self.computing + list(self.waiting)

    def enqueue(self, sequences: Iterable[Sequence]) -> None:
        """Lets them wait for their turn, with the adapters that have their names by now."""
        for sequence in sequences:
            try:
                sequence.adapter = self.adapters.find(sequence.lora_path)
            except BadRequest as error:
                self._finish(sequence, abort_reason(str(error), error.status, error.kind))
            else:
                self.waiting.append(sequence)

    def step(self, admit: bool) -> None:
        """Prefills at most one chunk or batch, then decodes every running sequence once."""
        if self.partial is not None:
            self._prefill_chunk(self.partial)
        elif admit and self.waiting:
            self._prefill_batch()
        self._decode()

    def abort(self, sequences: list[Sequence], reason: dict[str, object] | None = None) -> None:
        """Ends sequences wherever they are, with what they have so far."""
        doomed = set(sequences)
        self.waiting = deque(s for s in self.waiting if s not in doomed)
        if self.partial and self.partial.sequence in doomed:
            self.partial = None
        self._starting = [s for s in self._starting if s not in doomed]
        self._leave([row for row, s in enumerate(self.running) if s in doomed])
        for sequence in sequences:
            if not sequence.finished:
                self._finish(sequence, dict(reason or abort_reason("Aborted")))

    def drop_all(self, reason: dict[str, object]) -> None:
        """Ends everything without relying on the state of rows or cache: the way out of a failed step."""
        dropped = self.live
        self.waiting.clear()
        self.running, self._starting, self.partial, self._groups = [], [], None, None
        for sequence in dropped:
            if not sequence.finished:
                self._finish(sequence, dict(reason))

    def retract(self) -> None:
        """Sends running sequences back to the queue; their keys and values are recomputed later."""
        retracted = self.computing
        for sequence in retracted:
            sequence.num_retractions += 1
            sequence.prompt_hidden = None
        self.waiting.extendleft(reversed(retracted))
        self.running, self.partial, self._groups = [], None, None

    def forget_shared(self) -> None:
        """Lets no new sequence start from what older weights computed."""
        for sequence in self.running:
            sequence.prompt_hidden = None
        if self.partial is not None:
            self.partial.shareable = False

    def _prefill_chunk(self, partial: PartialPrefill) -> None:
        sequence = partial.sequence
        tokens = sequence.prompt_ids + sequence.output_ids
        chunk = tokens[partial.computed : partial.computed + self._limits.chunk]
        self._executor.model.adapter = sequence.adapter
        hidden = self._executor.prefill_chunk(chunk, partial.computed, partial.cache)[0]
        if self._executor.routes is not None:
            partial.routes.append(self._executor.routes[0])
        model, found = self._executor.model, partial.prompt_logprobs
        if sequence.needs_prompt_logprobs:
            record_prompt_logprobs(model, sequence, hidden, partial.computed, found)
        partial.computed += len(chunk)
        if partial.computed == len(tokens):
            if sequence.needs_prompt_logprobs:
                sequence.prompt_logprobs = found
            sequence.routes = partial.routes
            self._make_room([sequence])
            self._executor.cache.import_row(partial.cache, len(self.running), len(tokens))
            self.partial = None
            self._enter([sequence], hidden[-1:], partial.shareable)

    def _prefill_batch(self) -> None:
        plan = Admission(self._limits, self.running, single=self._deterministic).plan(self.waiting)
        if plan.long is not None:
            self.partial = PartialPrefill(plan.long, self._executor.new_cache(plan.long.length))
            self._prefill_chunk(self.partial)
            return
        self._starting = plan.fresh + [copy for copy, _ in plan.copies]
        if self._starting:
            self._make_room(self._starting)
            states = [*self._prefill(plan.fresh)] if plan.fresh else []
            states += self._copy(plan.fresh, plan.copies, states)
            self._enter(self._starting, torch.stack(states))

    def _make_room(self, starting: list[Sequence]) -> None:
        """Reserves rows for sequences behind the running ones."""
        sequences = self.running + starting
        self._executor.cache.reserve(len(sequences), max(s.length for s in sequences))

    def _prefill(self, fresh: list[Sequence]) -> torch.Tensor:
        """Computes prompts into the rows after the running ones; ``[B, hidden]`` of their last tokens."""
        tokens = [s.prompt_ids + s.output_ids for s in fresh]
        self._executor.model.adapter = fresh[0].adapter
        hidden, routes = self._executor.prefill(tokens, len(self.running)), self._executor.routes
        for row, sequence in enumerate(fresh):
            if routes is not None:
                sequence.routes = [routes[row, : len(tokens[row])]]
            if sequence.needs_prompt_logprobs:
                found = Logprobs()
                record_prompt_logprobs(self._executor.model, sequence, hidden[row], 0, found)
                sequence.prompt_logprobs = found
        return hidden[torch.arange(len(fresh)), torch.tensor([len(t) - 1 for t in tokens])]

    def _copy(
        self,
        fresh: list[Sequence],
        copies: list[tuple[Sequence, Sequence]],
        fresh_states: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Gives sequences the prompt of a sequence that has the same one; their last hidden states."""
        if not copies:
            return []
        rows = {s: row for row, s in enumerate(self.running + fresh)}
        first = len(rows)
        states = []
        for offset, (sequence, source) in enumerate(copies):
            row = rows[source]
            self._executor.cache.copy_row(row, first + offset, len(sequence.prompt_ids))
            sequence.cached_tokens = len(sequence.prompt_ids)
            sequence.routes = _first_rows(source.routes, len(sequence.prompt_ids))
            entered = row < len(self.running)
            state = source.prompt_hidden if entered else fresh_states[row - len(self.running)]
            assert state is not None
            states.append(state)
        return states

    def _enter(self, sequences: list[Sequence], hidden: torch.Tensor, shareable: bool = True) -> None:
        """Computed prompts join the running sequences and get their first token.

        Others may start from them if they are ``shareable``.
        """
        for sequence, state in zip(sequences, hidden, strict=True):
            if shareable and not sequence.output_ids:
                sequence.prompt_hidden = state.clone()
        first_row = len(self.running)
        self.running.extend(sequences)
        self._groups, self._starting = None, []
        size = 1 if self._deterministic else len(sequences)
        sampled = []
        for start in range(0, len(sequences), size):
            part = sequences[start : start + size]
            logits = self._executor.model.logits(hidden[start : start + size])
            sampled.append((part, self._sampling(part).sample(logits)))
        self._commit(first_row, sampled)

    def _decode(self) -> None:
        if not self.running:
            return
        groups = self._groups = self._groups or self._group()
        self._executor.cache.reserve(len(self.running), max(group.longest for group in groups))
        sampled = []
        for group in groups:
            self._executor.model.adapter = group.sequences[0].adapter
            hidden = self._executor.decode(group.ids, group.positions, group.first_row, group.longest)
            if self._executor.routes is not None:
                for sequence, row in zip(group.sequences, self._executor.routes, strict=True):
                    sequence.routes.append(row[None])
            tokens = group.sampling.sample(self._executor.model.logits(hidden))
            sampled.append((group.sequences, tokens))
            group.ids = tokens.tensor
            group.positions += 1
            group.longest += 1
        self._commit(0, sampled)

    def _group(self) -> list[DecodeGroup]:
        """Rows in a row that have the same adapter; each by itself if ``deterministic``."""
        running, device = self.running, self._executor.device
        parted = lambda row: self._deterministic or running[row].adapter is not running[row - 1].adapter
        starts = [row for row in range(len(running)) if row == 0 or parted(row)]
        groups = []
        for start, end in pairwise([*starts, len(running)]):
            sequences = running[start:end]
            newest = [s.length - 1 for s in sequences]
            groups.append(
                DecodeGroup(
                    first_row=start,
                    sequences=sequences,
                    ids=torch.tensor([s.output_ids[-1] for s in sequences], device=device),
                    positions=torch.tensor(newest, device=device),
                    longest=max(newest) + 1,
                    sampling=self._sampling(sequences),
                )
            )
        return groups

    def _sampling(self, sequences: list[Sequence]) -> SamplingBatch:
        stop_ids = [self._stops.stop_ids(s) for s in sequences]
        return SamplingBatch(sequences, stop_ids, self._executor.device)

    def _commit(self, first_row: int, sampled: list[tuple[list[Sequence], SampledTokens]]) -> None:
        """Appends tokens to sequences that sit in consecutive rows, and retires those that end."""
        ended, row = [], first_row
        for sequences, tokens in sampled:
            for index, sequence in enumerate(sequences):
                reason = self._append(sequence, tokens, index)
                if reason is not None:
                    self._finish(sequence, reason)
                    ended.append(row)
                else:
                    sequence.settled = len(sequence.output_ids)
                    if sequence.on_progress is not None:
                        self.touched.append(sequence)
                row += 1
        self._leave(ended)

    def _append(self, sequence: Sequence, tokens: SampledTokens, index: int) -> dict[str, object] | None:
        """Adds a token; returns the finish reason if it was the last one."""
        if index in tokens.broken:
            # permanent, so not of the 5xx that routers and clients try again
            held = sequence.constraint is not None and sequence.constraint.holds
            return abort_reason(_NO_TOKEN if held else _NOT_FINITE, 400, "BadRequestError")
        token, found = tokens.ids[index], sequence.output_logprobs
        if index in tokens.top:
            found.top.append(tokens.top[index])
        if index in tokens.of_ids:
            found.of_ids.append(tokens.of_ids[index])
        if sequence.params.max_new_tokens == 0:
            sequence.record_version(self.weight_version)
            return length_reason(sequence)
        found.of_tokens.append(tokens.logprobs[index])
        if (nucleus := tokens.nuclei.get(index)) is not None:
            sequence.nuclei.append(nucleus)
            if sequence.params.tells_nuclei:
                found.of_tokens[-1] = nucleus.logprob
        sequence.output_ids.append(token)
        sequence.record_version(self.weight_version)
        self.generated_tokens += 1
        if sequence.constraint is not None and not sequence.constraint.accept(token):
            return abort_reason(f"token {token} does not follow the grammar", 500, "InternalServerError")
        return self._stops.reason(sequence, token)

    def _leave(self, rows: list[int]) -> None:
        """Frees rows, given in ascending order, by moving the last running sequence into each."""
        for row in reversed(rows):
            last = self.running.pop()
            if row < len(self.running):
                self.running[row] = last
                self._executor.cache.copy_row(len(self.running), row, last.length - 1)
        if rows:
            self._groups = None

    def _finish(self, sequence: Sequence, reason: dict[str, object]) -> None:
        sequence.finish_reason = reason
        sequence.prompt_hidden = None
        self._stops.forget(sequence)
        self.touched.append(sequence)


def _first_rows(parts: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The first ``count`` rows of what ``parts`` hold together."""
    rows = []
    for part in parts:
        rows.append(part[:count])
        count -= len(rows[-1])
        if not count:
            break
    return rows
