"""From finished samples to what each data-parallel rank trains on. Plain lists; the trainer makes tensors."""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch

from slime.arguments.advantages import GROUP_CENTRED, GROUP_SCALED
from slime.rollout.base_types import RolloutError, name_samples
from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.misc import load_function
from slime.utils.types import RolloutBatch, Sample

_STD_EPSILON = 1e-6

REQUIRED_KEYS = frozenset(
    {
        "tokens",
        "response_lengths",
        "rewards",
        "raw_reward",
        "rollout_ids",
        "loss_masks",
        "rollout_mask_sums",
    }
)
"""What a trainer needs of a batch, whoever made it."""

_OPTIONAL: dict[str, Callable[[Sample], Any]] = {
    "round_number": lambda sample: sample.metadata.get("round_number"),
    "rollout_log_probs": lambda sample: sample.rollout_log_probs,
    "rollout_top_p_token_ids": lambda sample: sample.rollout_top_p_token_ids,
    "rollout_top_p_token_offsets": lambda sample: sample.rollout_top_p_token_offsets,
    "rollout_routed_experts": lambda sample: sample.rollout_routed_experts,
    "teacher_log_probs": lambda sample: sample.teacher_log_probs,
    "metadata": lambda sample: sample.train_metadata,
}
# What a rank gets of every sample in its partition, as far as the batch has it.
_SHARD_KEYS = (
    "tokens",
    "response_lengths",
    "rewards",
    "truncated",
    "loss_masks",
    "sample_indices",
    "rollout_ids",
    "rollout_mask_sums",
    "round_number",
    "rollout_log_probs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
    "teacher_log_probs",
)


def samples_to_train_data(args: Namespace, samples: list[Sample]) -> RolloutBatch:
    """Rewards and conversion in one, with the user's functions in place of ours where given."""
    if args.custom_convert_samples_to_train_data_path:
        path = args.custom_convert_samples_to_train_data_path
        batch = load_function(path)(args, samples)
        if missing := REQUIRED_KEYS - batch.keys():
            raise RolloutError(f"{path}: its result lacks {', '.join(sorted(missing))}")
        return batch
    return convert_samples_to_train_data(args, samples, *post_process_rewards(args, samples))


def flatten_samples(groups: list[Any]) -> list[Sample]:
    """All samples of a rollout in order, those of a split execution (a list inside a group) included.

    Raises:
        RolloutError: siblings of a split execution do not share one rollout id.
    """
    return _flatten(groups, depth=0)


def _flatten(items: list[Any], depth: int) -> list[Sample]:
    if depth >= 2 and len(items) > 1 and all(isinstance(item, Sample) for item in items):
        ids = {sample.rollout_id for sample in items}
        if len(ids) != 1 or None in ids:
            raise RolloutError(
                f"{name_samples(items)} come from one execution but have rollout ids "
                f"{[sample.rollout_id for sample in items]}, expected one common id"
            )
    flat: list[Sample] = []
    for item in items:
        flat += _flatten(item, depth + 1) if isinstance(item, list) else [item]
    return flat


def post_process_rewards(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Raw rewards, and those that the advantages are made of.

    With a group-based estimator and ``--rewards-normalization``: (r - mean) / (std + 1e-6) within the
    group of a prompt, std being the sample standard deviation (GRPO, arXiv 2402.03300, sec. 4.1.2).
    A batch that is not ``rollout_batch_size`` groups of ``n_samples_per_prompt`` is one group.

    Raises:
        RolloutError: a sample has no reward.
    """
    if args.custom_reward_post_process_path:
        return load_function(args.custom_reward_post_process_path)(args, samples)
    raw = [_reward_number(args, sample) for sample in samples]
    if args.advantage_estimator not in GROUP_CENTRED or not args.rewards_normalization:
        return raw, raw
    regular = len(raw) == args.n_samples_per_prompt * args.rollout_batch_size
    # In float32 the mean of equal rewards may be a little off, and the division by a std of about zero
    # would make advantages of that.
    rewards = torch.tensor(raw, dtype=torch.float64).reshape(
        -1, args.n_samples_per_prompt if regular else len(raw)
    )
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    if args.advantage_estimator in GROUP_SCALED and args.grpo_std_normalization:
        centred = centred / (centred.std(dim=-1, keepdim=True) + _STD_EPSILON)
    return raw, centred.flatten().tolist()


def _reward_number(args: Namespace, sample: Sample) -> float:
    reward = sample.get_reward_value(args)
    if reward is None:
        raise RolloutError(f"{name_samples(sample)} ({sample.status.value}) has no reward")
    if isinstance(reward, dict):
        raise RolloutError(f"{name_samples(sample)}: reward is a dict, pass --reward-key: {reward!r:.200}")
    return float(reward)


def convert_samples_to_train_data(
    args: Namespace, samples: list[Sample], raw_rewards: list[float], rewards: list[float]
) -> RolloutBatch:
    """The batch of a rollout: one entry per sample under each key.

    Raises:
        RolloutError: a loss mask does not fit its response, or only some samples carry a field.
    """
    masks = [_loss_mask(sample) for sample in samples]
    rollout_ids = fill_rollout_ids([sample.rollout_id for sample in samples])
    mask_sums: dict[int, int] = defaultdict(int)
    for rollout_id, mask in zip(rollout_ids, masks, strict=True):
        mask_sums[rollout_id] += sum(mask)
    batch: RolloutBatch = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": _reported_rewards(samples, raw_rewards),
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": rollout_ids,
        "loss_masks": masks,
        "rollout_mask_sums": [mask_sums[rollout_id] for rollout_id in rollout_ids],
    }
    for key, read in _OPTIONAL.items():
        values = [read(sample) for sample in samples]
        if all(value is None for value in values):
            continue
        missing = [sample for sample, value in zip(samples, values, strict=True) if value is None]
        if missing:
            raise RolloutError(f"{name_samples(missing)} have no {key}, but others in the batch do")
        batch[key] = values
    return batch


def _loss_mask(sample: Sample) -> list[int]:
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    if len(mask) != sample.response_length:
        raise RolloutError(
            f"{name_samples(sample)}: loss mask of {len(mask)} for {sample.response_length} response tokens"
        )
    return [0] * len(mask) if sample.remove_sample else mask


def _reported_rewards(samples: list[Sample], raw_rewards: list[float]) -> list[Any]:
    """For metrics: what the reward function said, where it left that in the metadata."""
    if not any("raw_reward" in sample.metadata for sample in samples):
        return raw_rewards
    return [sample.metadata.get("raw_reward", sample.reward) for sample in samples]


def fill_rollout_ids(rollout_ids: list[int | None]) -> list[int]:
    """Give samples without a rollout id the smallest non-negative ones that are not taken."""
    taken = set(rollout_ids)
    unused = (number for number in count() if number not in taken)
    return [next(unused) if rollout_id is None else rollout_id for rollout_id in rollout_ids]


def split_train_data_by_dp(
    args: Namespace, batch: RolloutBatch, parallel_config: Mapping[str, int]
) -> list[RolloutBatch]:
    """One shard per data-parallel rank: its samples and the schedule of its micro-batches.

    Args:
        parallel_config: dp_size, cp_size, vpp_size, microbatch_group_size_per_vp_stage.
    """
    total_lengths = [len(tokens) for tokens in batch["tokens"]]
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build_dp_schedule(
        args,
        parallel_config,
        total_lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=batch["rollout_ids"],
    )
    return [
        {key: [batch[key][i] for i in partition] for key in _SHARD_KEYS if key in batch}
        | {
            "partition": partition,
            "raw_reward": batch["raw_reward"],
            "total_lengths": total_lengths,
            "global_batch_sizes": global_batch_sizes,
            "num_microbatches": num_microbatches,
            "micro_batch_indices": indices,
        }
        for partition, indices in zip(partitions, micro_batch_indices, strict=True)
    ]
