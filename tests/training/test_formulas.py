"""Formulas against values worked out by hand or by brute force."""

import math

import pytest
import torch

from slime.config.run import run_config
from slime.utils import ppo_utils as ppo
from tests.run_args import run_args

NEW, OLD = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.5, -1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(1.0) - 2.0]),
        ("low_var_kl", [math.exp(-0.5) - 0.5, math.exp(1.0) - 2.0]),
    ],
)
def test_kl_estimators(kind, expected):
    torch.testing.assert_close(ppo.compute_approx_kl(NEW, OLD, kind), torch.tensor(expected))


def test_only_low_var_kl_is_clamped():
    far = torch.tensor([-20.0]), torch.tensor([0.0])
    assert ppo.compute_approx_kl(*far, "low_var_kl").item() == 10
    assert ppo.compute_approx_kl(*far, "k3").item() > 1e6


def test_importance_ratio_weights_the_kl():
    weighted = ppo.compute_approx_kl(NEW, OLD, "k1", importance_ratio=torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(weighted, torch.tensor([1.0, -3.0]))


def test_unknown_kl_estimator_is_refused():
    with pytest.raises(ValueError, match="--kl-loss-type k9"):
        ppo.compute_approx_kl(NEW, OLD, "k9")


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 1.0, -1.28, 1.0),
        (1.5, -1.0, 1.5, 0.0),
        (0.5, 1.0, -0.5, 0.0),
        (0.5, -1.0, 0.8, 1.0),
        (1.1, 2.0, -2.2, 0.0),
    ],
)
def test_policy_loss_takes_the_pessimistic_side(ratio, advantage, loss, clipped):
    ppo_kl, advantage = torch.tensor([-math.log(ratio)]), torch.tensor([advantage])
    found, fraction = ppo.compute_policy_loss(ppo_kl, advantage, 0.2, 0.28)
    assert found.item() == pytest.approx(loss)
    assert fraction.item() == clipped


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    ppo_kl = torch.tensor([-math.log(10.0), math.log(10.0)])
    loss, _ = ppo.compute_policy_loss(ppo_kl, torch.tensor([-1.0, 1.0]), 0.2, 0.2, eps_clip_c=3.0)
    torch.testing.assert_close(loss, torch.tensor([3.0, -0.1]))


def test_dual_clip_constant_must_exceed_one():
    with pytest.raises(ValueError, match="--eps-clip-c"):
        ppo.compute_policy_loss(NEW, OLD, 0.2, 0.2, eps_clip_c=1.0)


def test_cispo_has_no_gradient_through_the_ratio():
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0 - math.log(1.1), -1.0 - math.log(2.0)])
    loss, clipped = ppo.compute_cispo_loss(old - log_probs, log_probs, torch.tensor([1.0, 1.0]), 0.2, 0.28)
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([-1.1, -1.28]))
    assert clipped.tolist() == [0.0, 1.0]


def test_gspo_spreads_the_mean_log_ratio_of_the_unmasked_tokens():
    new, old, masks = [NEW, NEW[:1]], [OLD, OLD[:1]], [torch.tensor([1, 0]), torch.tensor([0])]
    kl = ppo.compute_gspo_kl(new, old, new, masks)
    torch.testing.assert_close(kl, torch.tensor([-0.5, -0.5, 0.0]))


def test_opsm_drops_drifted_sequences_with_negative_advantages():
    old, mask = torch.tensor([0.0, 0.0]), torch.tensor([1, 1])
    drifted, near = torch.tensor([-1.0, -1.0]), torch.tensor([0.0, 0.0])
    bad, good = torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0])
    masks = [torch.tensor([1, 0]), mask, mask]
    kept, share = ppo.compute_opsm_mask(
        run_config(run_args(opsm_delta=0.1)).off_policy,
        [drifted, drifted, near],
        [old] * 3,
        [bad, good, bad],
        masks,
    )
    assert kept.tolist() == [0, 0, 1, 1, 1, 1] and share.item() == 1


def test_opsm_keeps_a_sequence_at_its_bound():
    old, new, bad, mask = torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([-1.0]), torch.tensor([1])
    for delta, kept in ((0.25, 1), (0.2, 0)):
        args = run_config(run_args(opsm_delta=delta)).off_policy
        assert ppo.compute_opsm_mask(args, [new], [old], [bad], [mask])[0].tolist() == [kept]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns(gamma):
    rewards = torch.randn(7, dtype=torch.float64)
    brute = [sum(gamma ** (j - i) * rewards[j].item() for j in range(i, 7)) for i in range(7)]
    torch.testing.assert_close(ppo.discounted_returns(rewards, gamma), torch.tensor(brute).double())


def test_reinforce_plus_plus_pays_the_reward_at_the_last_trained_token():
    kl, mask = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1, 0, 1, 0])
    returns = ppo.reinforce_plus_plus_returns(2.0, kl, mask, kl_coef=0.1, gamma=0.5)
    # Token rewards: -0.1, 0, -0.1 + 2, 0.
    torch.testing.assert_close(returns, torch.tensor([-0.1 + 0.25 * 1.9, 0.5 * 1.9, 1.9, 0.0]))


def test_reinforce_plus_plus_pays_nothing_to_a_sample_without_a_trained_token():
    returns = ppo.reinforce_plus_plus_returns(1.0, torch.ones(2), torch.zeros(2), 0.1, 1.0)
    assert returns.tolist() == [0.0, 0.0]


def _correction(weights, low=0.5, high=2.0):
    """Arguments of a correction whose weights are ``weights``, on losses of 1."""
    count = len(weights)
    return {
        "args": run_config(run_args(tis_clip=high, tis_clip_low=low)).off_policy,
        "pg_loss": torch.ones(count),
        "train_log_probs": [torch.tensor(weights).log().requires_grad_()],
        "rollout_log_probs": [torch.zeros(count)],
        "loss_masks": [torch.ones(count)],
        "total_lengths": [count + 1],
        "response_lengths": [count],
    }


@pytest.mark.parametrize("correct", [ppo.vanilla_tis_function, ppo.icepop_function])
@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (0.5, 1.0)])
def test_a_weight_at_its_bound_is_used_as_it_is(correct, low, high):
    corrected, _, metrics = correct(**_correction([1.0], low, high))
    assert corrected.tolist() == [1.0] and metrics["tis_clipfrac"].tolist() == [0.0]


@pytest.mark.parametrize("correct", [ppo.vanilla_tis_function, ppo.icepop_function])
def test_no_gradient_flows_through_the_weight_of_a_correction(correct):
    call = _correction([0.75, 1.5])
    losses = call["pg_loss"].requires_grad_()
    corrected, _, metrics = correct(**call)
    corrected.sum().backward()
    torch.testing.assert_close(losses.grad, torch.tensor([0.75, 1.5]))
    assert call["train_log_probs"][0].grad is None
    assert not any(values.requires_grad for values in metrics.values())


def test_tis_clamps_and_icepop_drops():
    call = _correction([0.25, 1.5, 4.0])
    clamped, _, metrics = ppo.vanilla_tis_function(**call)
    torch.testing.assert_close(clamped, torch.tensor([0.5, 1.5, 2.0]))
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 1]
    torch.testing.assert_close(metrics["tis_abs"], torch.tensor([0.75, 0.5, 3.0]))
    dropped, _, metrics = ppo.icepop_function(**call)
    torch.testing.assert_close(dropped, torch.tensor([0.0, 1.5, 0.0]))
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 1]
