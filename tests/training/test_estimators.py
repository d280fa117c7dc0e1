"""RLOO, Dr. GRPO, REINFORCE++ and DAPO's pieces, each as its paper writes it."""

import random

import pytest
import torch

from slime.config.run import run_config
from slime.rollout.filter_hub.overlong import leave_out_truncated
from slime.training.losses.reducers import pg_reducer_of
from slime.training.overlong import soft_overlong_punishment
from slime.training.rewards import post_process_rewards
from slime.utils import ppo_utils as ppo
from slime.utils.types import Sample
from tests.run_args import run_args
from tests.training.cases import flags


def samples_of(*groups):
    """Groups of rewards; a list among them is an execution that was split."""
    samples, ids = [], iter(range(1000))
    for index, group in enumerate(groups):
        for reward in group:
            rollout_id = next(ids)
            for part in reward if isinstance(reward, list) else [reward]:
                samples.append(Sample(group_index=index, rollout_id=rollout_id, reward=part))
    return samples


def rloo(*groups, **overrides):
    samples = samples_of(*groups)
    return post_process_rewards(run_config(flags(advantage_estimator="rloo", **overrides)), samples)[1]


def test_rloo_compares_with_the_mean_of_the_others():
    assert rloo([1.0, 0.0, 5.0], [2.0, 4.0]) == [1 - 2.5, 0 - 3.0, 5 - 0.5, -2.0, 2.0]


def test_rloo_leaves_out_all_parts_of_an_execution_which_share_one_vote():
    # Votes 2 (of 1 and 3), 5, 8.
    assert rloo([[1.0, 3.0], 5.0, 8.0]) == [1 - 6.5, 3 - 6.5, 0.0, 8 - 3.5]


def test_rloo_learns_nothing_where_there_is_no_other():
    assert rloo([7.0], [[7.0, 1.0]], [0.0, 1.0]) == [0.0, 0.0, 0.0, -1.0, 1.0]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_rloo_is_the_centred_reward_times_n_over_n_less_1(size):
    rewards = [random.Random(size).gauss(0, 1) for _ in range(size)]
    samples = samples_of(rewards)
    _, centred = post_process_rewards(run_config(flags(grpo_std_normalization=False)), samples)
    assert rloo(rewards) == pytest.approx([size / (size - 1) * r for r in centred], abs=1e-12)


def test_the_baseline_of_rloo_has_no_part_of_its_own_reward():
    rewards = torch.tensor([0.3, -1.2, 2.0, 0.7], dtype=torch.float64, requires_grad=True)
    advantages = rewards - (rewards.sum() - rewards) / 3
    jacobian = torch.stack([torch.autograd.grad(a, rewards, retain_graph=True)[0] for a in advantages])
    assert torch.equal(jacobian.diagonal(), torch.ones(4).double())
    assert rloo(rewards.tolist()) == pytest.approx(advantages.tolist())


def test_raw_rewards_are_those_before_the_baseline():
    args = flags(advantage_estimator="rloo", rewards_normalization=False)
    assert post_process_rewards(run_config(args), samples_of([1.0, 3.0])) == ([1.0, 3.0], [1.0, 3.0])


def test_dr_grpo_neither_divides_by_the_deviation_nor_by_the_length():
    """arXiv 2503.20783, sec. 3.2: the sum over tokens, over a constant, of the centred reward."""
    args = flags(grpo_std_normalization=False, pg_loss_denominator=10.0)
    _, advantages = post_process_rewards(run_config(args), samples_of([1.0, 0.0]))
    assert advantages == [0.5, -0.5]
    masks = [torch.tensor([1, 1, 0, 1]), torch.tensor([1])]
    batch = dict(total_lengths=[6, 2], response_lengths=[4, 1], loss_masks=masks)
    batch["rollout_mask_sums"] = torch.tensor([3.0, 1.0])
    per_token = torch.tensor([1.0, 2.0, float("inf"), 3.0, 5.0])
    reduce = pg_reducer_of(args, batch, masks, default=torch.sum)
    assert reduce(per_token).item() == pytest.approx((1 + 2 + 3 + 5) / 10)


def test_dapo_clips_higher_than_lower():
    """arXiv 2503.14476, eq. 10."""
    ratios = torch.tensor([0.7, 1.25, 1.5])
    loss, clipped = ppo.compute_policy_loss(-ratios.log(), torch.ones(3), 0.2, 0.28)
    assert loss.tolist() == pytest.approx([-0.7, -1.25, -1.28]) and clipped.tolist() == [0, 0, 1]
    loss, clipped = ppo.compute_policy_loss(-ratios.log(), -torch.ones(3), 0.2, 0.28)
    assert loss.tolist() == pytest.approx([0.8, 1.25, 1.5]) and clipped.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("length", "wanted"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (150, -1)]
)
def test_dapo_punishes_length_softly(length, wanted):
    """arXiv 2503.14476, eq. 13, with L_max 100 and L_cache 20."""
    assert soft_overlong_punishment(length, 100, 20) == pytest.approx(wanted)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_the_punishment_comes_before_the_baseline_and_not_into_the_metric(estimator):
    samples = samples_of([1.0, 1.0])
    samples[0].response_length, samples[1].response_length = 10, 20
    args = flags(
        **dict(advantage_estimator=estimator, grpo_std_normalization=False, rollout_max_response_len=20),
        **dict(overlong_buffer_len=10, overlong_penalty_factor=0.5),
    )
    raw, shaped = post_process_rewards(run_config(args), samples)
    assert raw == [1.0, 1.0]
    assert shaped == {"grpo": [0.25, -0.25], "rloo": [0.5, -0.5]}.get(estimator, [1.0, 0.5])


def test_truncated_samples_may_be_left_out_of_the_loss():
    cut, whole = Sample(status=Sample.Status.TRUNCATED), Sample(status=Sample.Status.COMPLETED)
    deep = Sample(status=Sample.Status.TRUNCATED)
    leave_out_truncated(run_args(), [[cut, [deep]], [whole]])
    assert cut.remove_sample and deep.remove_sample and not whole.remove_sample


KL = [torch.tensor([0.5, 1.0, 2.0]), torch.zeros(0)]


def test_plug_ins_find_the_returns_under_the_names_of_the_original():
    returns = ppo.get_grpo_returns(torch.tensor([2.0, 3.0]), KL)
    assert [r.tolist() for r in returns] == [[2.0] * 3, []]
    advantages = ppo.get_reinforce_plus_plus_baseline_advantages(torch.tensor([2.0, 3.0]), KL, None, 0.1)
    assert advantages[0].tolist() == pytest.approx([1.95, 1.9, 1.8]) and advantages[1].tolist() == []
    masks = [torch.tensor([1, 1, 0]), torch.zeros(0)]
    call = dict(loss_masks=masks, response_lengths=[3, 0], total_lengths=[5, 1], kl_coef=0.1, gamma=0.5)
    returns = ppo.get_reinforce_plus_plus_returns(torch.tensor([2.0, 3.0]), KL, **call)
    # Token rewards -0.05, -0.1 + 2, 0.
    assert returns[0].tolist() == pytest.approx([-0.05 + 0.5 * 1.9, 1.9, 0.0])
    positional = ppo.get_reinforce_plus_plus_returns([2.0, 3.0], KL, masks, [3, 0], [5, 1], 0.1, 0.5)
    assert torch.equal(positional[0], returns[0])
