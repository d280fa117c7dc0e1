"""The default rollout: collect groups of samples from the engines behind the router.

``--rollout-function-path slime.rollout.sglang_rollout.generate_rollout`` asks the data source for more
groups than it needs if told to, drops those that a filter finds useless, and aborts what still runs
when the batch is full.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from slime.arguments.views import RolloutView
from slime.backends.sglang_utils.server_control import abort_servers_until_idle
from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput, blame
from slime.rollout.evaluation import eval_rollout, eval_rollout_single_dataset
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate, generate_and_rm, generate_and_rm_group, get_model_url
from slime.rollout.ledger import RolloutAccount
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.async_utils import cancel_all, run
from slime.utils.http_utils import get
from slime.utils.misc import load_function
from slime.utils.types import Sample

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

# A multi-turn function may send its next request after an abort; the next one catches it.
_FIRST_ABORT_INTERVAL_S = 0.1
_LAST_ABORT_INTERVAL_S = 3.0


def generate_rollout(
    args: RolloutView, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Collect the samples of one training rollout, or evaluate; blocks until done."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))
    return run(generate_rollout_async(args, rollout_id, data_source))


async def generate_rollout_async(
    args: RolloutView, rollout_id: int, data_source: Any
) -> RolloutFnTrainOutput:
    """Collect ``--rollout-batch-size`` groups; unfinished ones go back to ``data_source`` if they may.

    Raises:
        RolloutError: user code failed, or ``args.rollout_timeout`` seconds have passed; the message
            names function and sample, or the groups that were waited for.
    """
    if not args.rollout_global_dataset:
        raise RolloutError("--disable-rollout-global-dataset: needs a --rollout-function-path of your own")
    state = GenerateState(args)
    set_current_rollout_id(rollout_id)
    collection = _Collection(args, RolloutAccount(data_source))
    async with _deadline(state, rollout_id, args.rollout_timeout):
        await collection.fill(state)
        unfinished = await abort(args, rollout_id)
    collection.settle(unfinished)
    groups = sorted(collection.kept, key=_first_index)
    _run_batch_hooks(args, groups, collection)
    collection.account.close()
    return RolloutFnTrainOutput(samples=groups, metrics=collection.metrics.collect())


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
    """The groups of one rollout and their fates."""

    args: RolloutView
    account: RolloutAccount
    kept: list[list[Any]] = field(default_factory=list)
    finished: list[list[Any]] = field(default_factory=list)
    metrics: MetricGatherer = field(default_factory=MetricGatherer)

    async def fill(self, state: GenerateState) -> None:
        """Generate until enough groups are kept; what still runs then stays in ``state.pending``."""
        target = self.args.rollout_batch_size
        while len(self.kept) < target:
            while len(self.kept) + len(state.pending) < target:
                for group in self.account.take(self.args.over_sampling_batch_size):
                    task = asyncio.create_task(generate_and_rm_group(self.args, group, state.sampling_params))
                    state.pending[task] = group
            done, _ = await asyncio.wait(state.pending, return_when=asyncio.FIRST_COMPLETED)
            # By index: the order in which a set iterates must not decide which groups are trained on.
            for task in sorted(done, key=lambda task: _first_index(state.pending[task])):
                group = task.result()
                self._sort_out(group, in_flight=len(state.pending))
                del state.pending[task]

    def _sort_out(self, group: list[Any], in_flight: int) -> None:
        target = self.args.rollout_batch_size
        if len(group) != self.args.n_samples_per_prompt:
            raise RolloutError(
                f"group of sample {_first_index(group)} came back with {len(group)} samples, "
                f"expected {self.args.n_samples_per_prompt}"
            )
        self.finished.append(group)
        path = self.args.dynamic_sampling_filter_path
        dynamic_filter = load_function(path) if path else None
        with blame(dynamic_filter or call_dynamic_filter, _flatten(group)):
            verdict = call_dynamic_filter(dynamic_filter, self.args, group)
        remaining = len(self.kept) + in_flight
        if should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=remaining, target_data_size=target
        ):
            self.account.filtered += 1
            self.metrics.on_dynamic_filter_drop(verdict.reason)
        elif len(self.kept) < target:
            self.account.trained += 1
            self.kept.append(group)
        else:
            self.account.dropped += 1

    def settle(self, unfinished: list[list[Any]]) -> None:
        """Hand aborted groups back for the next rollout, or drop them without ``--partial-rollout``."""
        if not self.args.partial_rollout:
            self.account.dropped += len(unfinished)
            return
        # A sample that was split cannot be taken up again.
        resumable = [group for group in unfinished if all(isinstance(sample, Sample) for sample in group)]
        self.account.dropped += len(unfinished) - len(resumable)
        self.account.give_back(sorted(resumable, key=_first_index))


async def abort(args: RolloutView, rollout_id: int) -> list[list[Any]]:
    """Stop all generation and return the groups that were in flight, in the state they got to.

    With ``--partial-rollout`` samples with a response are marked with the rollout that began them.
    """
    state = GenerateState(args)
    state.aborted = True
    interval = _FIRST_ABORT_INTERVAL_S
    while any(not task.done() for task in state.pending):
        listing = await get(get_model_url(args, endpoint="/workers"))
        await abort_servers_until_idle([worker["url"] for worker in listing["workers"]])
        await asyncio.wait(state.pending, timeout=interval)
        interval = min(2 * interval, _LAST_ABORT_INTERVAL_S)
    groups = [task.result() for task in state.pending]
    state.pending = {}
    if args.partial_rollout:
        for sample in _flatten(groups):
            if sample.response_length:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups


def _run_batch_hooks(args: RolloutView, groups: list[list[Any]], collection: _Collection) -> None:
    if args.rollout_sample_filter_path:
        sample_filter = load_function(args.rollout_sample_filter_path)
        with blame(sample_filter, _flatten(groups)):
            sample_filter(args, groups)
    if args.rollout_all_samples_process_path:
        process = load_function(args.rollout_all_samples_process_path)
        with blame(process, _flatten(collection.finished)):
            process(args, collection.finished, collection.account.take_for_hook)


def _flatten(nested: list[Any]) -> list[Sample]:
    return [s for item in nested for s in (_flatten(item) if isinstance(item, list) else [item])]


def _first_index(group: list[Any]) -> int:
    """Running index of a group's first sample; orders groups as the data source gave them out."""
    index = _flatten(group)[0].index
    if index is None:
        raise RolloutError("a sample has no index: the data source must number its samples")
    return index
