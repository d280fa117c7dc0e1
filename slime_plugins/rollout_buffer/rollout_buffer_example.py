"""``--rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout``.

The generator of ``--rollout-task-type`` makes trajectories of ``--prompt-data`` with the run's own engines
and writes them to the service at ``--rollout-buffer-url``; each rollout fetches its groups from there. They
are text: tokens and masks are made here, and log-probs of the engine are not known.
"""

import asyncio
from argparse import Namespace
from functools import cache
from typing import Any

from slime.rollout.base_types import RolloutError, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from slime.utils.types import Sample

POLL_S = 1.0
# Trajectories that no rollout has taken yet, by the service they come from.
_waiting: dict[str, dict[str, list[dict[str, Any]]]] = {}


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """``--rollout-batch-size`` groups, or ``--min-batch-collection-ratio`` of them.

    Raises:
        RolloutError: the generator failed, ``--fetch-trajectory-retry-times`` fetches in a row brought
            nothing, or there were not enough groups within ``args.rollout_timeout`` seconds.
    """
    if evaluation:
        raise RolloutError("the rollout buffer cannot evaluate: pass an --eval-function-path")
    if args.rollout_buffer_url is None:
        raise RolloutError("--rollout-buffer-url: not given, expected the address of the rollout buffer")
    return run(_generate_rollout(args, rollout_id, data_source))


async def _generate_rollout(args: Namespace, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    done = data_source.get_metadata().get("finished_groups", [])
    if args.rollout_buffer_url not in _waiting:
        await _start(args, done)
        _waiting[args.rollout_buffer_url] = {}
    waiting = _waiting[args.rollout_buffer_url]
    wanted = max(1, int(args.rollout_batch_size * args.min_batch_collection_ratio))
    try:
        async with asyncio.timeout(args.rollout_timeout):
            await _collect(args, waiting, wanted)
    except TimeoutError as error:
        raise RolloutError(
            f"rollout {rollout_id}: {len(waiting)} groups from {args.rollout_buffer_url} after "
            f"{args.rollout_timeout:g} s (args.rollout_timeout), wanted {wanted}"
        ) from error
    names = list(waiting)[: args.rollout_batch_size]
    groups = [waiting.pop(name) for name in names]
    data_source.update_metadata({"finished_groups": [*done, *names]})
    samples = [
        [_sample(args, item, len(done) + number) for item in group] for number, group in enumerate(groups)
    ]
    for index, sample in enumerate(sample for group in samples for sample in group):
        sample.index = len(done) * args.n_samples_per_prompt + index
    return RolloutFnTrainOutput(samples=samples)


async def _start(args: Namespace, done: list[str]) -> None:
    data = {
        "task_type": args.rollout_task_type,
        "input_file": args.prompt_data,
        "num_repeat_per_sample": args.n_samples_per_prompt,
        "remote_engine_url": get_model_url(args, endpoint=""),
        "remote_buffer_url": args.rollout_buffer_url,
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "max_tokens": args.rollout_max_response_len,
        },
        "skip_instance_ids": done,
    }
    answer = await post(f"{args.rollout_buffer_url}/start_rollout", data)
    if not answer["success"]:
        raise RolloutError(f"--rollout-buffer-url {args.rollout_buffer_url}: {answer['message']}")


async def _collect(args: Namespace, waiting: dict[str, list[dict[str, Any]]], wanted: int) -> None:
    """Fetch until there are enough groups."""
    in_vain = 0
    while len(waiting) < wanted:
        answer = await post(f"{args.rollout_buffer_url}/get_rollout_data", {})
        if answer["success"]:
            in_vain = 0
            for item in answer["data"]["data"]:
                waiting.setdefault(item["instance_id"], []).append(item)
            continue
        in_vain += 1
        if answer["data"]["failed"] or 0 <= args.fetch_trajectory_retry_times < in_vain:
            raise RolloutError(
                f"--rollout-buffer-url {args.rollout_buffer_url}: {answer['message']} after {in_vain} fetches"
            )
        await asyncio.sleep(POLL_S)


def _sample(args: Namespace, item: dict[str, Any], group_index: int) -> Sample:
    """The response begins at the first token of the assistant; where there is none, it is the last token."""
    tokenizer = GenerateState(args).tokenizer
    tokens, mask = _mask_generator(tokenizer, args.loss_mask_type).get_loss_mask(item["messages"])
    length = max(1, *get_response_lengths([mask]))
    return Sample(
        group_index=group_index,
        prompt=item["messages"],
        tokens=tokens,
        response=tokenizer.decode(tokens[len(tokens) - length :]),
        response_length=length,
        loss_mask=mask[len(mask) - length :],
        reward=item["reward"],
        status=Sample.Status.COMPLETED,
        metadata={"instance_id": item["instance_id"], **item["extra_info"]},
    )


@cache
def _mask_generator(tokenizer: Any, mask_type: str) -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(tokenizer, mask_type)
