"""Losses, their metrics and their gradients are those of the formulas, whatever the flags."""

from itertools import count, islice

import pytest
import torch

from tests.training.cases import random_case, train
from tests.training.reference import Solution, solve

CHUNKS, PER_CHUNK = 25, 40
# Chunks of the fast tier, and of the suite: 520 cases, among which any two values of flags meet.
FAST, SUITE = 4, 13
# Where a decision is nearer than this, float32 and float64 may decide otherwise.
MARGIN = 2e-5


def compare(case, solution: Solution) -> list[str]:
    """One line for each number that is not within 1e-5 of the reference."""
    found = train(case)
    assert len(found) == len(solution.steps)
    wrong = []
    for i, (mine, wanted) in enumerate(zip(found, solution.steps, strict=True)):
        assert mine.metrics.keys() == wanted.metrics.keys()
        assert sorted(mine.gradients) == sorted(wanted.gradients)
        pairs = {"the loss": (mine.loss, wanted.loss)}
        pairs |= {name: (mine.metrics[name], value) for name, value in wanted.metrics.items()}
        pairs |= {f"gradient {n}": (mine.gradients[n], g) for n, g in wanted.gradients.items()}
        for name, (a, b) in pairs.items():
            a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
            if not torch.allclose(a, b, rtol=1e-5, atol=1e-5):
                wrong.append(f"step {i}, {name}: {a} instead of {b}")
    return wrong


def decided_cases(start):
    """Cases in which no decision hangs on rounding."""
    for seed in count(start):
        case = random_case(seed)
        solution = solve(case)
        if solution.margin > MARGIN:
            yield seed, case, solution


@pytest.mark.parametrize(
    "chunk",
    [
        *range(FAST),
        *(pytest.param(i, marks=pytest.mark.slow) for i in range(FAST, SUITE)),
        *(pytest.param(i, marks=pytest.mark.nightly) for i in range(SUITE, CHUNKS)),
    ],
)
def test_every_combination_of_flags_has_the_loss_and_the_gradient_of_the_formulas(chunk):
    for seed, case, solution in islice(decided_cases(chunk * 1000), PER_CHUNK):
        assert compare(case, solution) == [], f"seed {seed}: {case.args}"
