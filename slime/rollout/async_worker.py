"""The worker behind the fully async rollout: what runs, what is finished, and what is too old."""

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.rollout.attempts import can_go_on, flatten, oldest_version, was_finished, without_answers
from slime.rollout.base_types import RolloutError, name_samples
from slime.rollout.copies import copied
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    filtered,
    should_drop_dynamic_filter_output,
)
from slime.rollout.fruitless import FruitlessGroups
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate_and_rm_group, is_given_up
from slime.rollout.ledger import ABORTED, SPLIT, RolloutAccount
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.async_utils import cancel_all, get_async_loop, run
from slime.utils.background_generation import background_generation
from slime.utils.types import Sample
from slime.utils.weight_clock import clock

logger = logging.getLogger(__name__)
T = TypeVar("T")
STALE = "stale"
"""Why a group is dropped: too old for ``--max-staleness``, it was generated again, and is too old again."""


@dataclass
class _Work:
    """One leased group.

    Attributes:
        leased: as the data source gave it, by which the books know it.
        begun: a copy of what it was then.
        result: what it is now; samples that were split are lists.
        rollout_id: the rollout in which it began.
        regenerated: whether it has begun again before.
    """

    leased: list[Any]
    begun: list[Any]
    result: list[Any]
    rollout_id: int
    regenerated: bool = False

    @property
    def first_index(self) -> int:
        return flatten(self.begun)[0].index or 0


class AsyncRolloutWorker:
    """Keeps up to ``concurrency`` groups in generation, from ``start`` to ``stop``.

    Tasks run on the process's background event loop, and there alone is the state touched. A finished group
    waits until a rollout takes it. No group begins that would be too old by the time it is trained on, by
    ``--max-staleness``; without that flag as many finished groups may wait as may run.

    Attributes:
        account: the leases, which outlive rollouts.
    """

    def __init__(self, args: Any, data_buffer: Any, concurrency: int = 10) -> None:
        self.args, self.config = args, filled(GenerationConfig, args)
        self.data_buffer, self.concurrency = data_buffer, concurrency
        self.account = RolloutAccount(data_buffer)
        self._running: dict[asyncio.Task[None], _Work] = {}
        self._done: list[_Work] = []
        self._failed: list[_Work] = []
        self._finished: list[list[Any]] = []
        self._drops, self._counts = MetricGatherer(), Counter[str]()
        self._stopped, self._holds = True, 0
        self._rollout_id, self._wanted, self._handed_at = 0, 0, -1
        self._fruitless = FruitlessGroups(concurrency)
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()

    def start(self) -> None:
        """Begin to generate; starting a started worker does nothing."""
        self._stopped = False
        if self.config.rollout.max_staleness != 0:  # else nothing begins before a rollout asks for it
            background_generation.begin(self)
        _on_loop(self._fill)

    def stop(self) -> None:
        """End all generation; every group goes back to the data source. Not to be called on the loop."""
        self._stopped = True
        background_generation.end(self)
        run(self._give_back())

    def get_completed_groups(self, limit: int | None = None) -> list[list[Any]]:
        """Finished groups, at most ``limit``, which count as trained from now on; does not wait."""
        return _on_loop(lambda: self._take_now(limit))

    def queue_size(self) -> int:
        """Finished groups that wait."""
        return len(self._done)

    def describe(self) -> str:
        """What runs and what waits, for messages."""
        first = sorted(work.first_index for work in self._running.values())[:8]
        return f"{len(self._running)} groups run, those of first sample {first}, and {len(self._done)} wait"

    @contextmanager
    def held(self) -> Iterator[None]:
        """No group begins inside the block, which is on the event loop."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._fill()

    async def collect(self, rollout_id: int, count: int) -> list[list[Any]]:
        """Wait for ``count`` groups, and return them in the order of their indices.

        Raises:
            RolloutError: user code failed in a group, of whichever rollout.
        """
        self._rollout_id, self._wanted = rollout_id, count
        try:
            while True:
                self._arrived.clear()
                self._renew()
                self._fill()
                if self._failure is not None:
                    raise self._failure
                if len(self._done) >= count:
                    groups = self._hand_out(count)
                    break
                await self._arrived.wait()
        finally:
            self._wanted = 0
        self._handed_at = clock.updates
        self._fill()
        return sorted(groups, key=lambda group: flatten(group)[0].index or 0)

    def take_finished(self) -> list[list[Any]]:
        """Groups that were judged since the last call, filtered ones too; kept only for a hook that asks."""
        finished, self._finished = self._finished, []
        return finished

    def metrics(self, groups: list[list[Any]]) -> dict[str, float]:
        """Returns the metrics of a rollout's groups, and of what happened since the last call."""
        ages = [clock.age(oldest_version(group)) for group in groups]
        counts, self._counts = self._counts, Counter()
        drops, self._drops = self._drops, MetricGatherer()
        own = {
            "staleness/mean": statistics.fmean(ages),
            "staleness/max": float(max(ages)),
            "waiting": len(self._done),
            "running": len(self._running),
            "resumed": counts["resumed"],
            "regenerated": counts["regenerated"],
        }
        named = {f"rollout/fully_async/{name}": value for name, value in own.items()}
        return named | drops.collect() | self.account.metrics()

    def _fill(self) -> None:
        """Begin as many groups as there is room for."""
        try:
            while self._room() > 0:
                (leased,) = self.account.take(1)
                self._begin(_Work(leased, copied(leased), leased, self._rollout_id))
        except Exception as error:
            self._fail(error)

    def _room(self) -> int:
        """How many groups may begin now."""
        if self._stopped or self._holds or self._failure is not None:
            return 0
        free = self.concurrency - len(self._running)
        if self.config.rollout.max_staleness is None:
            return free if len(self._done) < self.concurrency else 0
        # A group that begins now is trained on after the batches before it, each a version on.
        handed_out = not self._wanted and self._handed_at == clock.updates
        batches = self.config.rollout.max_staleness + 1 - clock.ahead - handed_out
        most = max(batches * self.config.batches.rollout_batch_size, self._wanted)
        return min(free, most - len(self._running) - len(self._done))

    def _begin(self, work: _Work) -> None:
        task = asyncio.get_running_loop().create_task(self._follow(work))
        self._running[task] = work
        task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        work = self._running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.append(work)
            self._fail(error if isinstance(error, Exception) else RolloutError(f"{type(error)}: {error}"))
        self._fill()
        self._arrived.set()

    def _fail(self, error: Exception) -> None:
        """Nothing begins any more; the rollout that waits, or the next one, raises the error."""
        self._failure = self._failure or error
        self._arrived.set()

    async def _follow(self, work: _Work) -> None:
        """Generate a group until it has its fate or is finished, across weight updates."""
        set_current_rollout_id(work.rollout_id)
        params = GenerateState(self.args).sampling_params
        while not was_finished(work.result):
            updates, interrupted = clock.updates, clock.updating
            work.result = await generate_and_rm_group(self.args, work.result, params)
            self._sign(work)
            interrupted = interrupted or clock.updates != updates
            if not interrupted or not _is_aborted(work.result):
                break
            await clock.settled()
            if not self._take_up(work):
                return
        self._fruitless.see(work.result)
        if is_given_up(work.result):
            self._give_up(work)
        else:
            self._judge(work)

    def _give_up(self, work: _Work) -> None:
        """A sample was aborted, though no update interrupted it; another group takes its place."""
        if self._fruitless.in_a_row == 1:
            logger.warning("%s: a generate function aborted one of them", name_samples(work.begun))
        self.account.drop(work.leased, ABORTED)

    def _sign(self, work: _Work) -> None:
        """Whoever checks versions learns here that these samples may be of older weights."""
        if len(work.result) != self.config.batches.n_samples_per_prompt:
            raise RolloutError(
                f"group of {name_samples(work.begun)} came back with {len(work.result)} samples, "
                f"expected {self.config.batches.n_samples_per_prompt}"
            )
        for sample in flatten(work.result):
            sample.metadata.setdefault("start_rollout_id", work.rollout_id)

    def _take_up(self, work: _Work) -> bool:
        """Prepare the next attempt of a group that a weight update interrupted; whether there is one."""
        if not can_go_on(work.result):
            return self._again(work, SPLIT)
        if self._is_stale(work):
            return self._again(work, STALE)
        for sample in work.result:
            if sample.status is Sample.Status.ABORTED:
                sample.reward = None
        self._counts["resumed"] += 1
        return True

    def _again(self, work: _Work, reason: str) -> bool:
        """Let a group begin again with its prompts alone, or drop it if it has done so before."""
        # What came back from an earlier run may have been split in it: its prompt is not known any more.
        if work.regenerated or not can_go_on(work.begun):
            self.account.drop(work.leased, reason)
            return False
        work.regenerated, work.result = True, without_answers(work.begun)
        self.account.restate(work.leased, work.begun)
        self._counts["regenerated"] += 1
        return True

    def _is_stale(self, work: _Work) -> bool:
        limit = self.config.rollout.max_staleness
        return limit is not None and clock.age(oldest_version(work.result)) > limit

    def _judge(self, work: _Work) -> None:
        group = work.result
        if self.config.rollout.rollout_all_samples_process_path:
            self._finished.append(group)
        verdict = filtered(self.config, group)
        if should_drop_dynamic_filter_output(
            verdict,
            remaining_batch_size=len(self._done) + len(self._running),
            target_data_size=self._wanted or self.config.batches.rollout_batch_size,
        ):
            self.account.filter(work.leased)
            self._drops.on_dynamic_filter_drop(verdict.reason)
        else:
            self._done.append(work)
            if self.account.keeps_finished:
                self.account.restate(work.leased, group)

    def _renew(self) -> None:
        """Let finished groups that have become too old while they waited begin again."""
        for work in [work for work in self._done if self._is_stale(work)]:
            self._done.remove(work)
            if self._again(work, STALE):
                self._begin(work)

    def _hand_out(self, count: int) -> list[list[Any]]:
        """Up to ``count`` finished groups, the oldest first."""
        oldest_first = sorted(self._done, key=lambda work: -clock.age(oldest_version(work.result)))
        works = oldest_first[:count]
        for work in works:
            self._done.remove(work)
            self.account.train(work.leased)
        return [work.result for work in works]

    def _take_now(self, limit: int | None) -> list[list[Any]]:
        self._renew()
        groups = self._hand_out(len(self._done) if limit is None else limit)
        self._fill()
        return groups

    async def _give_back(self) -> None:
        running = dict(self._running)
        await cancel_all(running)
        # The others have ended in the meantime, and are among the finished ones or have their fate.
        cut_off = [work for task, work in running.items() if task.cancelled()]
        await asyncio.sleep(0)  # those that failed are noted
        states = [(work, work.begun) for work in [*cut_off, *self._failed]]
        states += [(work, work.result if self.account.keeps_finished else work.begun) for work in self._done]
        self._done, self._failed = [], []
        if states:
            states.sort(key=lambda state: state[0].first_index)
            self.account.give_back([group for _, group in states], [work.leased for work, _ in states])
        self.account.close()


def _is_aborted(group: list[Any]) -> bool:
    return any(sample.status is Sample.Status.ABORTED for sample in flatten(group))


def _on_loop(function: Callable[[], T]) -> T:
    """Call it on the process's background event loop, where this may be already."""

    async def call() -> T:
        return function()

    try:
        here = asyncio.get_running_loop() is get_async_loop()
    except RuntimeError:
        here = False
    return function() if here else run(call())
