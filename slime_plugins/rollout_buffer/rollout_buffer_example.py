"""``--rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout``.

The generator of ``--rollout-task-type`` makes trajectories of ``--prompt-data`` with the run's own engines
and writes them to the service at ``--rollout-buffer-url``; each rollout fetches its groups from there, under
leases that it acknowledges once it has all of them: a rollout that fails leaves them to the next one.
"""

import asyncio
import uuid
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import RolloutError, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpStatusError, post, share_key_with
from slime_plugins.rollout_buffer.samples import sample_of
from slime_plugins.rollout_buffer.store import Group, Item
from slime_plugins.rollout_buffer.trajectory import LONGEST_LEASE_S

POLL_S = 1.0
LEASE_AFTER_S = 60.0
"""How much longer than the time of a rollout its leases run."""
_HOLDER = uuid.uuid4().hex
"""This process, which is another one once its manager was lost."""
# Services whose generator this process has started.
_started: set[str] = set()


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
    share_key_with(args.rollout_buffer_url)
    groups: list[Group] = []
    wanted = max(1, int(args.rollout_batch_size * args.min_batch_collection_ratio))
    try:
        async with asyncio.timeout(args.rollout_timeout):
            if args.rollout_buffer_url not in _started:
                await _start(args, done)
                _started.add(args.rollout_buffer_url)
            await _collect(args, groups, wanted, done)
    except TimeoutError as error:
        raise RolloutError(
            f"rollout {rollout_id}: {len(groups)} groups from {args.rollout_buffer_url} after "
            f"{args.rollout_timeout:g} s (args.rollout_timeout), wanted {wanted}"
        ) from error
    data_source.update_metadata({"finished_groups": [*done, *(group[0]["instance_id"] for group in groups)]})
    tokenizer = GenerateState(args).tokenizer
    samples = [
        [sample_of(item, tokenizer, args.loss_mask_type, len(done) + number) for item in group]
        for number, group in enumerate(groups)
    ]
    for index, sample in enumerate(sample for group in samples for sample in group):
        sample.index = len(done) * args.n_samples_per_prompt + index
    return RolloutFnTrainOutput(samples=samples)


async def _start(args: Namespace, done: list[str], resume: bool = False) -> None:
    data = {
        "resume": resume,
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
        "run": getattr(args, "run_uid", None),
        "holder": _HOLDER,
        **({"api_key": args.sglang_api_key} if getattr(args, "sglang_api_key", None) else {}),
    }
    answer = await post(f"{args.rollout_buffer_url}/start_rollout", data)
    if not answer["success"]:
        raise RolloutError(f"--rollout-buffer-url {args.rollout_buffer_url}: {answer['message']}")


async def _collect(args: Namespace, groups: list[Group], wanted: int, done: list[str]) -> None:
    """Fetch until there are enough groups, and keep them for good."""
    in_vain, leases = 0, []
    while len(groups) < wanted:
        lease = f"{getattr(args, 'run_uid', None)}.{_HOLDER}.{uuid.uuid4().hex}"
        answer = await _fetch(args, lease, args.rollout_batch_size - len(groups))
        if answer["success"]:
            in_vain = 0
            leases.append(lease)
            groups += _grouped(answer["data"]["data"])
            continue
        in_vain += 1
        if answer["data"]["stopped"]:
            await _start(args, done, resume=True)
        elif answer["data"]["failed"] or 0 <= args.fetch_trajectory_retry_times < in_vain:
            raise RolloutError(
                f"--rollout-buffer-url {args.rollout_buffer_url}: {answer['message']} after {in_vain} fetches"
            )
        await asyncio.sleep(POLL_S)
    try:
        await post(f"{args.rollout_buffer_url}/buffer/acknowledge", {"leases": leases})
    except HttpStatusError as error:
        raise RolloutError(f"--rollout-buffer-url {args.rollout_buffer_url}: {error.body}") from error


def _grouped(items: list[Item]) -> list[Group]:
    """By prompt, of which there is one group in an answer; the next answer may have another one of it."""
    groups: dict[str, Group] = {}
    for item in items:
        groups.setdefault(item["instance_id"], []).append(item)
    return list(groups.values())


async def _fetch(args: Namespace, lease: str, most: int) -> Any:
    """Asks again under the same lease if an answer is lost, so that its groups are not."""
    seconds = args.rollout_timeout + LEASE_AFTER_S
    asked = {"lease": lease, "lease_s": min(seconds, LONGEST_LEASE_S), "max_groups": most}
    return await post(f"{args.rollout_buffer_url}/get_rollout_data", asked)
