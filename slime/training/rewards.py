"""From what reward functions said to what advantages are made of."""

import torch

from slime.arguments.advantages import ESTIMATORS
from slime.arguments.views import TrainingView
from slime.training.batch import BatchError
from slime.utils.misc import load_function
from slime.utils.types import Sample, name_samples

_STD_EPSILON = 1e-6


def post_process_rewards(args: TrainingView, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Raw rewards, and those that the advantages are made of.

    With a group-based estimator and ``--rewards-normalization``: (r - mean) / (std + 1e-6) within the
    group of a prompt, std being the sample standard deviation (GRPO, arXiv 2402.03300, sec. 4.1.2).
    A batch that is not ``rollout_batch_size`` groups of ``n_samples_per_prompt`` is one group.

    Raises:
        BatchError: a sample has no reward.
    """
    if args.custom_reward_post_process_path:
        return load_function(args.custom_reward_post_process_path)(args, samples)
    raw = [_reward_number(args, sample) for sample in samples]
    estimator = ESTIMATORS[args.advantage_estimator]
    if not estimator.centred or not args.rewards_normalization:
        return raw, raw
    regular = len(raw) == args.n_samples_per_prompt * args.rollout_batch_size
    # In float32 the mean of equal rewards may be a little off, and the division by a std of about zero
    # would make advantages of that.
    rewards = torch.tensor(raw, dtype=torch.float64).reshape(
        -1, args.n_samples_per_prompt if regular else len(raw)
    )
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    if estimator.scaled and args.grpo_std_normalization:
        centred = centred / (centred.std(dim=-1, keepdim=True) + _STD_EPSILON)
    return raw, centred.flatten().tolist()


def _reward_number(args: TrainingView, sample: Sample) -> float:
    reward = sample.get_reward_value(args)
    if reward is None:
        raise BatchError(f"{name_samples(sample)} ({sample.status.value}) has no reward")
    if isinstance(reward, dict):
        raise BatchError(f"{name_samples(sample)}: reward is a dict, pass --reward-key: {reward!r:.200}")
    return float(reward)
