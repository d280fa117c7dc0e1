"""The default rollout: collect groups of samples from the engines behind the router.

``--rollout-function-path slime.rollout.sglang_rollout.generate_rollout`` asks the data source for more
groups than it needs if told to, drops those that a filter finds useless, and aborts what still runs
when the batch is full.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from slime.backends.sglang_utils.server_control import abort_servers_until_idle
from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.config.served_models import DEFAULT
from slime.rollout.attempts import can_go_on, flatten, is_finished, was_finished
from slime.rollout.base_types import (
    RolloutError,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    blame,
    name_samples,
)
from slime.rollout.evaluation import eval_rollout, eval_rollout_single_dataset
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    filtered,
    should_drop_dynamic_filter_output,
)
from slime.rollout.fruitless import FruitlessGroups
from slime.rollout.generate_state import GenerateState, Task
from slime.rollout.generation import (
    generate,
    generate_and_rm,
    generate_and_rm_group,
    get_model_url,
    is_given_up,
)
from slime.rollout.ledger import ABORTED, SPLIT, SURPLUS, RolloutAccount
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.async_utils import cancel_all, run
from slime.utils.http_utils import get
from slime.utils.misc import load_function
from slime.utils.types import EARLIER_TOKENS, Sample

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]

logger = logging.getLogger(__name__)

# A multi-turn function may send its next request after an abort; the next one catches it.
_FIRST_ABORT_INTERVAL_S = 0.1
_LAST_ABORT_INTERVAL_S = 3.0


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Collect the samples of one training rollout, or evaluate; blocks until done."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))
    return run(generate_rollout_async(args, rollout_id, data_source))


async def generate_rollout_async(args: Any, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """Collect ``--rollout-batch-size`` groups; others go back to ``data_source`` if they may.

    Raises:
        RolloutError: user code failed, or ``args.rollout_timeout`` seconds have passed; the message
            names function and sample, or the groups that were waited for.
    """
    config = filled(GenerationConfig, args)
    if not config.data.rollout_global_dataset:
        raise RolloutError("--disable-rollout-global-dataset: needs a --rollout-function-path of your own")
    state = GenerateState(args)
    set_current_rollout_id(rollout_id)
    collection = _Collection(config, rollout_id, RolloutAccount(data_source))
    async with _deadline(state, rollout_id, config.cluster.rollout_timeout):
        await collection.fill(state)
        running = list(state.pending.values())
        collection.settle(running, await abort(args, rollout_id))
    groups = sorted(collection.kept, key=_first_index)
    _run_batch_hooks(groups, collection)
    collection.account.close()
    return RolloutFnTrainOutput(samples=groups, metrics=collection.collect_metrics())


@asynccontextmanager
async def _deadline(state: GenerateState, rollout_id: int, seconds: float) -> AsyncIterator[None]:
    """Let no task outlive the block, and name those that were waited for if the time runs out."""
    state.reset()
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        waiting = sorted(_first_index(group) for group in state.pending.values())
        raise RolloutError(
            f"rollout {rollout_id}: {len(waiting)} groups unfinished after {seconds:g} s "
            f"(args.rollout_timeout), those of first sample {waiting[:8]}"
        ) from error
    finally:
        await cancel_all(state.pending)
        state.reset()


@dataclass
class _Collection:
    """The groups of one rollout and their fates.

    Attributes:
        finished: groups that were judged, for the hook that sees all of them.
        spare: groups for the next rollout: as the data source gave them, and as they are now.
        given_up: how many groups had a sample that its generate function aborted.
    """

    config: GenerationConfig
    rollout_id: int
    account: RolloutAccount
    kept: list[list[Any]] = field(default_factory=list)
    finished: list[list[Any]] = field(default_factory=list)
    spare: list[tuple[list[Any], list[Any]]] = field(default_factory=list)
    given_up: int = 0
    metrics: MetricGatherer = field(default_factory=MetricGatherer)
    _done: list[Task] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._fruitless = FruitlessGroups(self.config.rollout.over_sampling_batch_size)

    @property
    def full(self) -> bool:
        return len(self.kept) >= self.config.batches.rollout_batch_size

    @property
    def keeps_surplus(self) -> bool:
        """Tells whether surplus groups are kept: if asked for, and not if nothing of a finished group would
        be trained on in the next rollout.
        """
        flags = self.config.rollout
        masked = flags.partial_rollout and flags.mask_offpolicy_in_partial_rollout
        asked = flags.keep_surplus_groups or flags.partial_rollout
        return self.account.keeps_finished and asked and not masked

    async def fill(self, state: GenerateState) -> None:
        """Generate until enough groups are kept; what still runs then stays in ``state.pending``."""
        while not self.full:
            while len(self.kept) + len(state.pending) < self.config.batches.rollout_batch_size:
                self._begin(state, self.account.take(self.config.rollout.over_sampling_batch_size))
            if self.full:
                return
            # Not asyncio.wait, which looks at every pending task each time.
            await self._arrived.wait()
            self._arrived.clear()
            done, self._done = self._done, []
            # By index: the order in which they come in must not decide which groups are trained on.
            for task in sorted(done, key=lambda task: _first_index(state.pending[task])):
                self._sort_out(state.pending[task], task.result(), in_flight=len(state.pending))
                del state.pending[task]

    def _begin(self, state: GenerateState, groups: list[list[Any]]) -> None:
        """Use what an earlier rollout finished; generate the others unless that was enough."""
        ready = [group for group in groups if was_finished(group)]
        others = [group for group in groups if not was_finished(group)]
        for position, group in enumerate(ready):
            waiting = len(others) + len(ready) - position
            self._sort_out(group, group, in_flight=len(state.pending) + waiting)
        if self.full and self.keeps_surplus:
            self.spare += zip(others, others, strict=True)
            return
        for group in others:
            task = asyncio.create_task(generate_and_rm_group(self.config.flat, group, state.sampling_params))
            task.add_done_callback(self._take_in)
            state.pending[task] = group

    def _take_in(self, task: Task) -> None:
        self._done.append(task)
        self._arrived.set()

    def _sort_out(self, taken: list[Any], group: list[Any], in_flight: int) -> None:
        if len(group) != self.config.batches.n_samples_per_prompt:
            raise RolloutError(
                f"group of sample {_first_index(group)} came back with {len(group)} samples, "
                f"expected {self.config.batches.n_samples_per_prompt}"
            )
        self._fruitless.see(group)
        if is_given_up(group):
            self._give_up(taken, group)
            return
        if self.full and self.keeps_surplus:
            self._keep_finished(taken, group)
            return
        self.finished.append(group)
        verdict = filtered(self.config, group)
        if should_drop_dynamic_filter_output(
            verdict,
            remaining_batch_size=len(self.kept) + in_flight,
            target_data_size=self.config.batches.rollout_batch_size,
        ):
            self.account.filter(taken)
            self.metrics.on_dynamic_filter_drop(verdict.reason)
        elif self.full:
            self.account.drop(taken, SURPLUS)
        else:
            self.account.train(taken)
            self.kept.append(group)

    def _give_up(self, taken: list[Any], group: list[Any]) -> None:
        """A sample was aborted, though the rollout did not ask for that; another group takes its place."""
        if not self.given_up:
            logger.warning("%s: a generate function aborted one of them", name_samples(flatten(group)))
        self.given_up += 1
        if self.config.rollout.partial_rollout and can_go_on(group):
            self.spare.append((taken, group))
        else:
            self.account.drop(taken, ABORTED)

    def collect_metrics(self) -> dict[str, int]:
        """Groups that did not make it, by reason."""
        given_up = {"rollout/given_up": self.given_up} if self.given_up else {}
        return self.metrics.collect() | given_up | self.account.metrics()

    def _keep_finished(self, taken: list[Any], group: list[Any]) -> None:
        """Keeps a finished group; its filter judges it once, in the rollout that uses it."""
        for sample in flatten(group):
            sample.metadata.setdefault("start_rollout_id", self.rollout_id)
        self.spare.append((taken, group))

    def settle(self, running: list[list[Any]], unfinished: list[list[Any]]) -> None:
        """Hand groups back for the next rollout; drop aborted ones without ``--partial-rollout``.

        Args:
            running: the groups as the data source gave them.
            unfinished: the same, as the abort left them.
        """
        for taken, group in zip(running, unfinished, strict=True):
            if self.keeps_surplus and is_finished(group):
                self._keep_finished(taken, group)
            elif not self.config.rollout.partial_rollout:
                self.account.drop(taken, SURPLUS if is_finished(group) else ABORTED)
            elif all(isinstance(sample, Sample) for sample in group):
                self.spare.append((taken, group))
            else:  # a sample that was split cannot be taken up again
                self.account.drop(taken, SPLIT)
        self.spare.sort(key=lambda pair: _first_index(pair[1]))
        for sample in flatten([group for _, group in self.spare]):
            if sample.response_length:
                sample.metadata[EARLIER_TOKENS] = sample.response_length
        if self.spare:
            self.account.give_back([group for _, group in self.spare], [taken for taken, _ in self.spare])


async def abort(args: Any, rollout_id: int) -> list[list[Any]]:
    """Stop all generation and return the groups that were in flight, in the state they got to.

    With ``--partial-rollout`` samples with a response are marked with the rollout that began them.
    """
    state, config = GenerateState(args), filled(GenerationConfig, args)
    state.aborted = True
    interval = _FIRST_ABORT_INTERVAL_S
    while any(not task.done() for task in state.pending):
        await abort_servers_until_idle(await _engines(config))
        await asyncio.wait(state.pending, timeout=interval)
        interval = min(2 * interval, _LAST_ABORT_INTERVAL_S)
    groups = [task.result() for task in state.pending]
    state.pending = {}
    if config.rollout.partial_rollout:
        for sample in flatten(groups):
            if sample.response_length:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups


async def _engines(config: GenerationConfig) -> list[str]:
    """The engines of all models that are trained."""
    routers = [get_model_url(config.router, name, "/workers") for name in _trained(config)]
    listings = [await get(url) for url in routers]
    return [worker["url"] for listing in listings for worker in listing["workers"]]


def _trained(config: GenerationConfig) -> list[str]:
    return [*config.policies.trained_policies] or [DEFAULT]


def _run_batch_hooks(groups: list[list[Any]], collection: _Collection) -> None:
    config, args = collection.config.rollout, collection.config.flat
    if config.rollout_sample_filter_path:
        sample_filter = load_function(config.rollout_sample_filter_path)
        with blame(sample_filter, flatten(groups)):
            sample_filter(args, groups)
    if config.rollout_all_samples_process_path:
        process = load_function(config.rollout_all_samples_process_path)
        with blame(process, flatten(collection.finished)):
            process(args, collection.finished, collection.account.take_for_hook)


def _first_index(group: list[Any]) -> int:
    """Running index of a group's first sample; orders groups as the data source gave them out."""
    index = flatten(group)[0].index
    if index is None:
        raise RolloutError("a sample has no index: the data source must number its samples")
    return index
