"""A rollout function whose engines never wait: groups are generated across rollouts and weight updates.

``--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async``, with
train_async.py or train.py and engines on GPUs of their own. One worker per process takes groups from the data
source as long as there is room; a rollout takes what is finished. A weight update interrupts what runs; it
then goes on where it was, with the new weights. ``--max-staleness`` bounds how old the oldest token of a
group may be.
"""

import asyncio
from typing import Any

from slime.config.cluster import ClusterConfig
from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.rollout.async_worker import AsyncRolloutWorker
from slime.rollout.attempts import flatten
from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput, blame
from slime.rollout.evaluation import eval_rollout
from slime.rollout.generate_state import GenerateState, requests_at_once
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.async_utils import run
from slime.utils.misc import load_function

__all__ = ["AsyncRolloutWorker", "generate_rollout_fully_async"]

_worker: AsyncRolloutWorker | None = None


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Hand out ``--rollout-batch-size`` finished groups, or evaluate; blocks until done.

    An evaluation runs beside the groups under way, and no others begin meanwhile: to abort them would waste
    work, to wait for the longest would idle the engines, and a full queue would slow the evaluation down.
    """
    if evaluation:
        return run(_evaluate(args, rollout_id))
    return run(_collect(args, rollout_id, _worker_for(args, data_buffer)))


def stop_worker() -> None:
    """End the worker of this process, if there is one; its groups go back to the data source."""
    global _worker
    if _worker is not None:
        worker, _worker = _worker, None
        worker.stop()


def _worker_for(args: Any, data_buffer: Any) -> AsyncRolloutWorker:
    """The worker of this process, which the first call starts; it has the groups that engines take now."""
    global _worker
    config = filled(GenerationConfig, args)
    samples = requests_at_once(config)
    groups = max(config.batches.rollout_batch_size, samples // config.batches.n_samples_per_prompt)
    if _worker is not None:
        _worker.concurrency = groups
    if _worker is None or _worker.data_buffer is not data_buffer:
        stop_worker()
        _worker = AsyncRolloutWorker(args, data_buffer, concurrency=groups)
        _worker.start()
    return _worker


async def _evaluate(args: Any, rollout_id: int) -> RolloutFnEvalOutput:
    if _worker is None:
        return await eval_rollout(args, rollout_id)
    with _worker.held():
        return await eval_rollout(args, rollout_id)


async def _collect(args: Any, rollout_id: int, worker: AsyncRolloutWorker) -> RolloutFnTrainOutput:
    GenerateState(args).reset()
    set_current_rollout_id(rollout_id)
    config = worker.config
    deadline = asyncio.timeout(filled(ClusterConfig, args).rollout_timeout)
    try:
        async with deadline:
            groups = await worker.collect(rollout_id, config.batches.rollout_batch_size)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RolloutError(
            f"rollout {rollout_id}: no {config.batches.rollout_batch_size} groups after "
            f"{config.cluster.rollout_timeout:g} s (args.rollout_timeout): {worker.describe()}"
        ) from error
    _run_batch_hooks(groups, worker)
    return RolloutFnTrainOutput(samples=groups, metrics=worker.metrics(groups))


def _run_batch_hooks(groups: list[list[Any]], worker: AsyncRolloutWorker) -> None:
    config, finished = worker.config.rollout, worker.take_finished()
    if config.rollout_sample_filter_path:
        sample_filter = load_function(config.rollout_sample_filter_path)
        with blame(sample_filter, flatten(groups)):
            sample_filter(worker.args, groups)
    if config.rollout_all_samples_process_path:
        process = load_function(config.rollout_all_samples_process_path)
        with blame(process, flatten(finished)):
            process(worker.args, finished, worker.account.take_for_hook)
