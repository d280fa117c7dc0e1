"""Sampling draws from the right distribution, with the right noise."""

import numpy as np
import pytest
import torch

from slime.backends.embedded_engine.sampler import SamplingBatch, cut_distribution, uniforms
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import LogprobOptions, Sequence
from slime.utils.model_inputs import SequenceInputs


def sequences(count: int, **params) -> list[Sequence]:
    made = SamplingParams(**params)
    return [
        Sequence(str(i), SequenceInputs([1]), made, LogprobOptions(), noise_seed=1000 + i)
        for i in range(count)
    ]


def sample(logits: torch.Tensor, rows: list[Sequence]):
    return SamplingBatch(rows, [frozenset()] * len(rows), logits.device).sample(logits.clone())


@pytest.mark.parametrize("vocab", [7, 320, 1024])
def test_frequencies_follow_the_distribution(vocab):
    torch.manual_seed(0)
    logits = torch.randn(vocab) * 2
    rows = sequences(20000, temperature=0.7)
    counts = torch.bincount(sample(logits.expand(20000, vocab), rows).tensor, minlength=vocab)
    expected = (logits / 0.7).softmax(-1) * 20000
    # a chi-square statistic has mean vocab - 1 and variance twice that
    statistic = ((counts - expected).square() / expected).sum()
    assert abs(statistic - (vocab - 1)) < 6 * (2 * vocab) ** 0.5


def test_logprobs_are_of_the_scaled_but_uncut_distribution():
    torch.manual_seed(1)
    logits = torch.randn(50, 256) * 3
    found = sample(logits, sequences(50, temperature=0.5, top_k=3))
    expected = (logits / 0.5).log_softmax(-1).gather(1, found.tensor[:, None])[:, 0]
    assert torch.allclose(torch.tensor(found.logprobs), expected, atol=1e-5)
    ranks = (logits > logits.gather(1, found.tensor[:, None])).sum(-1)
    assert ranks.max() == 2


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.full((4096, 256), float("-inf"))
    logits[:, [3, 130]] = 0.0
    assert set(sample(logits, sequences(4096)).ids) == {3, 130}


def test_garbage_logits_give_some_token():
    logits = torch.full((2, 256), float("nan"))
    assert all(0 <= token < 256 for token in sample(logits, sequences(2)).ids)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.6}, [0, 1]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.85, "min_p": 0.5}, [0, 1]),
        ({"top_p": 1e-9}, [0]),
    ],
)
def test_cuts_keep_what_sglang_keeps(params, kept):
    weights = torch.tensor([[0.55, 0.28, 0.17]])[:, [0, 1, 2]]
    cut = cut_distribution(weights, [SamplingParams(**params)])
    assert cut[0].nonzero()[:, 0].tolist() == kept
    assert torch.equal(cut[cut > 0], weights[cut > 0])


def test_a_cut_beyond_the_shortlist_is_exact():
    weights = torch.rand(2, 5000, generator=torch.Generator().manual_seed(0))
    cut = cut_distribution(weights, [SamplingParams(top_k=3000), SamplingParams(top_p=0.9)])
    assert int((cut[0] > 0).sum()) == 3000
    assert cut[0][cut[0] > 0].min() >= weights[0][cut[0] == 0].max()
    mass = cut[1].sum() / weights[1].sum()
    assert 0.9 <= mass < 0.9005


def test_noise_is_uniform_and_differs_by_seed_and_step():
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 100)
    steps = np.tile(np.arange(100, dtype=np.uint64), 300)
    drawn = uniforms(seeds, steps)
    assert len(np.unique(drawn)) == len(drawn) and drawn.min() >= 0 and drawn.max() < 1
    histogram, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert abs(histogram - 1500).max() < 6 * 1500**0.5
    grid = drawn.reshape(300, 100)
    assert abs(np.corrcoef(grid[:, 0], grid[:, 1])[0, 1]) < 0.2
    assert np.array_equal(uniforms(seeds[:3], steps[:3]), drawn[:3])


def splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return state ^ (state >> 31)


def test_noise_is_that_of_splitmix64():
    """A run that is resumed by another version goes on with the same tokens."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # as published
    pairs = [(0, 0), (1000, 1), (1000, 2), (2**64 - 1, 2**40)]
    expected = [(splitmix64((splitmix64(seed) + step) % 2**64) >> 11) * 2.0**-53 for seed, step in pairs]
    seeds, steps = np.array(pairs, dtype=np.uint64).T
    assert uniforms(seeds, steps).tolist() == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.5}])
def test_logits_that_are_no_numbers_break_their_row_alone(value, params):
    torch.manual_seed(2)
    logits = torch.randn(3, 256)
    logits[1, 7] = value
    found = sample(logits, sequences(3, **params))
    alone = sample(logits[[0, 2]], [sequences(3, **params)[row] for row in (0, 2)])
    assert found.broken == {1}
    assert [found.ids[0], found.ids[2]] == alone.ids
