"""The critic's loss, its metrics and its gradients are those of the formulas, whatever the batch.

The reference is in float64, sample by sample, and shares no code with ``slime.training``.
"""

import random

import pytest
import torch

from slime.training.roles import CRITIC
from tests.training.cases import _samples, flags, train
from tests.training.reference import Case, Step
from tests.training.test_gae import gae


def random_critic(seed: int) -> Case:
    """Ragged samples with ragged masks, executions that were split, and outputs before and in training."""
    pick = random.Random(seed)
    samples = _samples(pick)
    executions = len({s.index if s.rollout_id is None else s.rollout_id for s in samples})
    dp_size = min(pick.choice([1, 1, 2]), executions)
    args = flags(
        **dict(advantage_estimator="ppo", gamma=pick.choice([1.0, 0.9]), lambd=pick.choice([1.0, 0.8, 0.0])),
        **dict(value_clip=pick.choice([0.05, 0.2, 0.6]), kl_coef=0.0, normalize_advantages=False),
        **dict(calculate_per_token_loss=pick.random() < 0.4, recompute_loss_function=pick.random() < 0.2),
        **dict(
            global_batch_size=pick.randint(dp_size, executions), max_tokens_per_gpu=pick.choice([1, 12, 100])
        ),
    )
    generator = torch.Generator().manual_seed(seed)
    old = [torch.randn(len(s.tokens), 1, generator=generator) for s in samples]
    new = [x + 0.4 * torch.randn(x.shape, generator=generator) for x in old]
    return Case(args, samples, {"actor": old, "new": new}, dp_size)


def solve(case: Case) -> tuple[list[Step], float]:
    """The steps, and how far the nearest decision is from the other one."""
    args, executions = case.args, {}
    named = {s.rollout_id for s in case.samples if s.rollout_id is not None}
    unnamed = iter(n for n in range(10**6) if n not in named)
    for number, sample in enumerate(case.samples):
        execution = next(unnamed) if sample.rollout_id is None else sample.rollout_id
        executions.setdefault(execution, []).append(number)
    numbers, size = [*executions.values()], args.global_batch_size
    steps, margins = [], []
    for at in range(0, len(numbers) // size * size, size):
        steps.append(_step(case, numbers[at : at + size], margins))
    return steps, min(margins, default=1.0)


def _mask(sample):
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    return [] if sample.remove_sample else [t for t, trained in enumerate(mask) if trained]


def _step(case, executions, margins):
    args, clipped = case.args, 0.0
    tokens = sum(max(len(_mask(case.samples[n])), 1) for execution in executions for n in execution)
    leaves = {n: case.logits["new"][n].double().requires_grad_() for e in executions for n in e}
    loss = sum(0 * leaf.sum() for leaf in leaves.values())
    for execution in executions:
        total = max(sum(len(_mask(case.samples[n])) for n in execution), 1)
        weight = 1 / tokens if args.calculate_per_token_loss else 1 / total / len(executions)
        for n in execution:
            sample, trained = case.samples[n], _mask(case.samples[n])
            first = len(sample.tokens) - sample.response_length - 1
            old = [float(case.logits["actor"][n][first + t, 0]) for t in trained]
            rewards = [0.0] * len(trained)
            rewards[-1:] = [float(sample.reward)] * bool(trained)
            advantages = gae(rewards, old, args.gamma, args.lambd)
            for t, before, advantage in zip(trained, old, advantages, strict=True):
                target, value = advantage + before, leaves[n][first + t, 0]
                near = torch.clamp(value, before - args.value_clip, before + args.value_clip)
                loss = loss + weight * torch.maximum((value - target) ** 2, (near - target) ** 2)
                clipped += weight * (abs(value.item() - before) > args.value_clip)
                margins.append(abs(abs(value.item() - before) - args.value_clip))
                margins.append(abs(value.item() - target))
    loss.backward()
    gradients = {n: leaf.grad for n, leaf in leaves.items()}
    return Step(loss.item(), {"value_loss": loss.item(), "value_clipfrac": clipped}, gradients)


@pytest.mark.parametrize("chunk", range(10))
def test_any_batch_has_the_loss_and_the_gradient_of_the_formulas(chunk):
    clipped = 0.0
    for seed in range(chunk * 1000, chunk * 1000 + 12):
        case = random_critic(seed)
        expected, margin = solve(case)
        if margin < 2e-5:
            continue
        for mine, wanted in zip(train(case, CRITIC), expected, strict=True):
            assert mine.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6), f"seed {seed}"
            assert mine.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-6), f"seed {seed}"
            assert mine.gradients.keys() == wanted.gradients.keys()
            for n, gradient in wanted.gradients.items():
                torch.testing.assert_close(mine.gradients[n].double(), gradient, rtol=1e-5, atol=1e-5)
            clipped += wanted.metrics["value_clipfrac"]
    assert clipped > 0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nothing_at_a_masked_token_reaches_loss_or_gradient(value):
    for seed in range(20):
        case = random_critic(seed)
        clean = train(case, CRITIC)
        for n, sample in enumerate(case.samples):
            first, trained = len(sample.tokens) - sample.response_length - 1, _mask(sample)
            for row in set(range(len(sample.tokens))) - {first + t for t in trained}:
                for outputs in case.logits.values():
                    outputs[n][row] = value
        for mine, wanted in zip(train(case, CRITIC), clean, strict=True):
            assert mine.metrics == wanted.metrics
            for n, gradient in wanted.gradients.items():
                assert torch.equal(mine.gradients[n], gradient)
