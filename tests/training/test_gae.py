"""Generalised advantage estimation against the sum that it is defined as, in float64."""

import random

import pytest
import torch

from slime.config.run import run_config
from slime.training.advantages import compute_advantages_and_returns
from slime.utils.ppo_utils import (
    chunked_discounted_returns,
    chunked_gae,
    get_advantages_and_returns,
    get_advantages_and_returns_batch,
    vanilla_gae,
)
from tests.run_args import run_args

DISCOUNTS = [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0), (0.9, 0.5)]


def gae(rewards, values, gamma, lambd):
    """A_t = sum over k of (gamma * lambd)^k * delta_(t+k) (arXiv 1506.02438, eq. 16)."""
    rewards, values = [float(r) for r in rewards], [*map(float, values), 0.0]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [
        sum((gamma * lambd) ** (t - at) * deltas[t] for t in range(at, len(deltas)))
        for at in range(len(deltas))
    ]


def exactly(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def noise(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(("gamma", "lambd"), DISCOUNTS)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 9, 27, 28, 100])
@pytest.mark.parametrize(
    "compute",
    [vanilla_gae, chunked_gae, lambda *arguments: chunked_gae(*arguments, chunk_size=3)],
    ids=["loop", "chunks", "chunks of 3"],
)
def test_each_advantage_and_return_is_that_of_the_definition(compute, length, gamma, lambd):
    rewards, values = noise(3, length), noise(3, length, seed=1)
    advantages, returns = compute(rewards, values, gamma, lambd)
    expected = exactly([gae(r, v, gamma, lambd) for r, v in zip(rewards, values, strict=True)])
    expected = expected.reshape(3, length)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, expected + values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("discount", [1.0, 0.999])
def test_a_long_row_in_float32_is_near_to_the_recursion_in_float64(discount):
    x = noise(2, 20_000, dtype=torch.float32)
    running, expected = 0.0, []
    for value in reversed(x[1].tolist()):
        running = value + discount * running
        expected.append(running)
    found = chunked_discounted_returns(x, discount)[1].double()
    torch.testing.assert_close(found, exactly(expected[::-1]), rtol=1e-5, atol=1e-3)


def test_rows_are_worked_on_in_blocks_that_do_not_touch_one_another(monkeypatch):
    rewards, values = noise(5, 40), noise(5, 40, seed=1)
    whole = chunked_gae(rewards, values, 0.9, 0.9)
    monkeypatch.setattr("slime.training.estimators.gae._BLOCK_ELEMENTS", 80)
    for block, expected in zip(chunked_gae(rewards, values, 0.9, 0.9), whole, strict=True):
        torch.testing.assert_close(block, expected, rtol=0, atol=0)


@pytest.mark.parametrize("chunked", [True, False])
def test_responses_of_a_batch_do_not_feel_its_padding(chunked):
    lengths = [4, 0, 7, 1]
    rewards, values = ([noise(n, seed=n + s) for n in lengths] for s in (0, 10))
    totals = [n + 3 for n in lengths]
    batch = get_advantages_and_returns_batch(totals, lengths, values, rewards, 0.9, 0.8, chunked)
    for i, length in enumerate(lengths):
        alone = get_advantages_and_returns(totals[i], length, values[i], rewards[i], 0.9, 0.8)
        expected = exactly(gae(rewards[i], values[i], 0.9, 0.8))
        for found in (batch[0][i], alone[0]):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        for found in (batch[1][i], alone[1]):
            torch.testing.assert_close(found, expected + values[i], rtol=0, atol=1e-12)


def test_the_layout_in_memory_does_not_matter():
    rewards, values = noise(64, 3).t(), noise(64, 4, seed=1)[:, 1:].t()
    expected = vanilla_gae(rewards, values, 0.9, 0.8)
    for found, wanted in zip(chunked_gae(rewards, values, 0.9, 0.8), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    before = rewards.clone()
    returns = chunked_discounted_returns(rewards, 0.9)
    assert torch.equal(rewards, before), "its input was written over"
    torch.testing.assert_close(returns, vanilla_gae(rewards, 0 * rewards, 0.9, 1.0)[0], rtol=0, atol=1e-12)


def test_nothing_is_differentiated():
    values = noise(1, 5).requires_grad_()
    assert not any(result.requires_grad for result in chunked_gae(noise(1, 5), values, 0.9, 0.9))


@pytest.mark.parametrize("seed", range(30))
def test_ppo_takes_the_trained_tokens_for_steps_and_rewards_the_last_of_them(seed):
    pick = random.Random(seed)
    gamma, lambd = pick.choice([1.0, 0.9]), pick.choice([1.0, 0.7])
    args = run_args(advantage_estimator="ppo", gamma=gamma, lambd=lambd, kl_coef=pick.choice([0.0, 0.3]))
    lengths = [pick.randint(0, 9) for _ in range(5)]
    shard = {name: [noise(n, dtype=torch.float32, seed=seed + n + i) for n in lengths]
             for i, name in enumerate(("values", "log_probs", "ref_log_probs"))}  # fmt: skip
    masks = [[pick.random() < 0.7 for _ in range(n)] for n in lengths]
    shard |= {"loss_masks": [torch.tensor(mask, dtype=torch.int) for mask in masks]}
    shard |= {"rewards": [pick.gauss(0, 1) for _ in lengths], "total_lengths": [n + 2 for n in lengths]}
    # What is not trained has no say, whatever stands there.
    for name in ("values", "log_probs"):
        for row, mask in zip(shard[name], shard["loss_masks"], strict=True):
            row[mask == 0] = float("nan")
    compute_advantages_and_returns(run_config(args), shard)
    for i, mask in enumerate(masks):
        steps = [t for t, trained in enumerate(mask) if trained]
        kl = shard["log_probs"][i].double() - shard["ref_log_probs"][i].double()
        rewards = [-args.kl_coef * float(kl[t]) for t in steps] if args.kl_coef else [0.0] * len(steps)
        if steps:
            rewards[-1] += shard["rewards"][i]
        expected = dict(
            zip(steps, gae(rewards, shard["values"][i][steps], args.gamma, args.lambd), strict=True)
        )
        for t in range(len(mask)):
            wanted = expected.get(t, 0.0)
            assert shard["advantages"][i][t] == pytest.approx(wanted, abs=1e-5)
            value = float(shard["values"][i][t]) if t in expected else 0.0
            assert shard["returns"][i][t] == pytest.approx(wanted + value, abs=1e-5)
