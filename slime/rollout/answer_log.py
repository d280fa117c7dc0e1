"""Answers under way that outlive the rollout manager: what of samples goes into the token log, and back.

An engine is asked for ``--token-log-interval`` tokens of an answer at once, and each part is logged when it
comes. A rollout manager that takes another's place gives its samples what the log has of them, and they go on
there, as samples of a partial rollout do. Finished answers come back as well, without their rewards: if
short answers were made anew and long ones went on, the long ones would be favoured, and if only finished
ones were kept, the short ones.
"""

import logging
import threading
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from slime.config.generation import GenerationConfig
from slime.config.token_log import LOGGED_FUNCTIONS
from slime.rollout.attempts import FINISHED, flatten
from slime.rollout.base_types import name_samples
from slime.rollout.generate_state import GenerateState, decoder
from slime.rollout.log_lineage import Lineage, within
from slime.rollout.token_log import Key, LoggedAnswer, TokenLog, read_answers
from slime.utils.engine_meta import fit_versions
from slime.utils.notes import note
from slime.utils.types import EARLIER_TOKENS, Sample
from slime.utils.weight_clock import clock

logger = logging.getLogger(__name__)

Call = Callable[[dict[str, Any]], Awaitable[Any]]
"""Asks a generate function for a sample's answer, with these sampling parameters."""

_GB = 10**9
_NEAR_THE_END = 16  # tokens before the end of the context, where engines refuse to go on with a prompt
_PROBLEMS_TOLD = 3
_current: "AnswerLog | None" = None


def answer_log_of(function: Callable[..., Any]) -> "AnswerLog | None":
    """The log of this process, if it keeps answers of this generate function."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return _current if name in LOGGED_FUNCTIONS else None


def answer_log_for(config: GenerationConfig, context: int) -> "AnswerLog | None":
    """The log of a run, in which generation in this process keeps its answers from now on; None without one.

    Args:
        context: see `AnswerLog`.
    """
    global _current
    _current = AnswerLog(config, context) if config.token_log.token_log_dir is not None else None
    return _current


def _leased(source: Any) -> set[Key]:
    """The samples that are out, as far as a data source has books on them."""
    ledger = getattr(source, "ledger", None)
    if ledger is None:
        return set()
    with ledger.lock:
        groups = list(ledger.records.values())
    return {key for sample in flatten(groups) if (key := _key_of(sample)) is not None}


class AnswerLog:
    """The answers of one rollout manager.

    Args:
        context: the most tokens that engines hold of a prompt and its answer.
    """

    def __init__(self, config: GenerationConfig, context: int) -> None:
        flags = config.token_log
        self._args, self._every, self._context = config.flat, flags.token_log_interval, context
        self._masked = config.rollout.partial_rollout and config.rollout.mask_offpolicy_in_partial_rollout
        self._directory = Path(flags.token_log_dir or "")
        self._log = TokenLog(self._directory, int(flags.token_log_max_gb * _GB))
        self._found: dict[Key, LoggedAnswer] = {}  # by the manager before this one
        self._takes_up = False
        self._out: set[Key] | None = None  # at the end of the latest rollout
        self._rollout_id = 0
        self._logged: dict[Key, tuple[str, int]] = {}  # attempt, and how many of its tokens
        self._under_way: set[Key] = set()
        self._restored = self._dropped = 0
        self._lineage, self._places = Lineage(self._directory), config.checkpoints
        self._max_staleness = config.rollout.max_staleness
        self._lock = threading.Lock()

    def read(self) -> None:
        """Takes up what a manager before this one has left."""
        self._found, problems = read_answers(self._directory)
        self._takes_up = True
        for problem in problems[:_PROBLEMS_TOLD]:
            note(f"--token-log-dir: {problem}; {len(problems)} lines in all")
        logger.info("the token log has %d answers", len(self._found))

    def resume(self, rollout_id: int) -> None:
        """Takes up what is left of a run that now goes on from the checkpoint of a rollout.

        Answers begin anew, or where newer weights than the checkpoint's went on with them.
        """
        self.read()
        newest = self._lineage.newest(rollout_id, self._places.load)
        oldest = None if newest is None or self._max_staleness is None else newest - self._max_staleness
        left, lost = dict[Key, LoggedAnswer](), list[Key]()
        for key, answer in self._found.items():
            known = None if newest is None else within(answer, newest, oldest)
            if known is not answer:
                lost.append(key)
            if known is not None:
                left[key] = known
        if lost:
            first = sorted(lost, key=lambda key: key[1])[:_PROBLEMS_TOLD]  # they are logged as they come
            names = ", ".join(f"sample {index} of group {group}" for group, index in first)
            of = "a checkpoint of another run" if newest is None else f"weights up to version {newest}"
            note(
                f"--token-log-dir: {len(lost)} of {len(self._found)} answers begin anew, or where other "
                f"weights went on with them, as the run goes on from {of}: {names}"
            )
        self._found, self._dropped = left, len(lost)

    def begin(self, rollout_id: int, source: Any) -> None:
        """Forgets what no rollout from this one on needs.

        That is all but the samples that are out, or were at the end of the rollout before this one: another
        manager would go on there. The first rollout of a manager that has taken up answers needs them all.
        """
        with self._lock:
            if not self._takes_up:
                written = read_answers(self._directory)[0] if self._out is not None else {}
                out = (self._out or set()) | (_leased(source) if written else set())
                self._found = {key: answer for key, answer in written.items() if key in out}
            self._log.begin(self._found.values())
            self._logged = {key: at for key, at in self._logged.items() if key in self._found}
            if not self._takes_up:
                self._found = {}  # its sample has it
            self._takes_up, self._rollout_id = False, rollout_id
            if clock.version is not None and self._log.failure is None:
                self._lineage.begin(rollout_id, clock.version, self._places.save)
        self._tell_failure()

    def end(self, source: Any) -> dict[str, int]:
        """Notes which samples are out now, when a rollout has ended.

        Returns:
            The metrics of tokens that were taken from the log, and of answers that could not be; nothing if
            there were none.
        """
        self._out = _leased(source)
        found = {"rollout/restored_tokens": self._restored, "rollout/dropped_answers": self._dropped}
        self._restored = self._dropped = 0
        return {name: count for name, count in found.items() if count}

    async def answer(self, sample: Sample, params: dict[str, Any], call: Call) -> Any:
        """What ``call`` makes of a sample; it is in the log as it grows.

        Returns early, with status ABORTED and what there is, when the rollout is aborted or weights change.
        """
        key = _key_of(sample)
        if key is None or key in self._under_way:
            return await call(params)
        self._under_way.add(key)
        try:
            sample.tokens = sample.tokens or GenerateState(self._args).encode_prompt(sample)
            self._restore(key, sample, params)
            if sample.status in FINISHED:
                return sample
            return await self._in_parts(key, sample, params, call)
        finally:
            self._under_way.discard(key)

    async def _in_parts(self, key: Key, sample: Sample, params: dict[str, Any], call: Call) -> Any:
        with self._lock:
            # What there is may be masked by now: all of it is written again.
            self._logged[key] = uuid.uuid4().hex, 0
        updates, parts = clock.updates, 0
        while True:
            part = self._part(sample, params)
            result = await call(part)
            if result is not sample:
                return result
            goes_on = _ends_with_its_part(sample, part, params)
            if goes_on:
                sample.status = Sample.Status.ABORTED
            if parts and sample.weight_versions[-2:-1] == sample.weight_versions[-1:]:
                sample.weight_versions.pop()  # one for each answer
            self._write(key, sample)
            if not goes_on or GenerateState(self._args).aborted or clock.updates != updates:
                return sample
            parts += 1

    def _part(self, sample: Sample, params: dict[str, Any]) -> dict[str, Any]:
        """Sampling parameters of the next part, which may be the last one."""
        end = sample.response_length + self._every
        too_near = len(sample.tokens) + self._every > self._context - _NEAR_THE_END
        return params if too_near or end >= params["max_new_tokens"] else params | {"max_new_tokens": end}

    def _write(self, key: Key, sample: Sample) -> None:
        with self._lock:
            if key not in self._logged:  # another rollout has begun that knows nothing of it
                self._logged[key] = uuid.uuid4().hex, 0
            attempt, start = self._logged[key]
            if self._log.append(_record_of(key, sample, self._rollout_id, attempt, start)):
                self._logged[key] = attempt, sample.response_length
        self._tell_failure()

    def _tell_failure(self) -> None:
        if self._log.failure is not None:
            note(f"--token-log-dir: nothing is logged for the rest of a rollout: {self._log.failure}")

    def _restore(self, key: Key, sample: Sample, params: dict[str, Any]) -> None:
        """Gives a sample what the log has of it, if that is more than it has."""
        found = self._found.pop(key, None)
        if found is None or len(found.tokens) < max(sample.response_length, 1):
            return
        tokens = found.prompt + found.tokens
        if tokens[: len(sample.tokens)] != sample.tokens:
            note(f"--token-log-dir: {name_samples(sample)} begins anew: the log has another prompt or answer")
            return
        _fill_in(sample, found)
        if found.response is None:
            sample.response = decoder(self._args, params)(found.tokens)
        if self._masked and sample.status not in FINISHED:
            sample.loss_mask = [0] * sample.response_length
        self._restored += sample.response_length


def _key_of(sample: Sample) -> Key | None:
    return None if sample.index is None else (sample.group_index, sample.index)


def _ends_with_its_part(sample: Sample, part: dict[str, Any], params: dict[str, Any]) -> bool:
    """Whether an answer is as long as it was asked for, and may be longer."""
    asked = part["max_new_tokens"]
    full = sample.status is Sample.Status.TRUNCATED and sample.response_length == asked
    return full and asked < params["max_new_tokens"]


def _record_of(key: Key, sample: Sample, rollout_id: int, attempt: str, start: int) -> LoggedAnswer:
    length, prompt = sample.response_length, len(sample.tokens) - sample.response_length
    group, index = key
    return LoggedAnswer(
        group,
        index,
        attempt,
        rollout=sample.metadata.get("start_rollout_id", rollout_id),
        prompt=[] if start else sample.tokens[:prompt],
        start=start,
        status=sample.status.value,
        tokens=sample.tokens[prompt + start :],
        log_probs=(sample.rollout_log_probs or [])[start:],
        loss_mask=(sample.loss_mask or [1] * length)[start:],
        spans=fit_versions(sample.version_spans, length),
        versions=sample.weight_versions,
        response=sample.response if sample.status in FINISHED else None,
    )


def _fill_in(sample: Sample, found: LoggedAnswer) -> None:
    """Gives a sample what it would have after its answer, as if another rollout had begun it."""
    sample.tokens = found.prompt + found.tokens
    sample.response, sample.response_length = found.response or "", len(found.tokens)
    sample.rollout_log_probs, sample.loss_mask = found.log_probs, found.loss_mask
    sample.version_spans = [(version, count) for version, count in found.spans]
    sample.weight_versions = found.versions
    sample.status = Sample.Status(found.status)
    sample.metadata.setdefault("start_rollout_id", found.rollout)
    sample.metadata[EARLIER_TOKENS] = sample.response_length
