"""Algorithms raise held-out accuracy on the quickstart's task from one SFT start: a short learning.sh."""

import pytest
from rich.console import Console

from tools.quickstart.algorithms import ALGORITHMS
from tools.quickstart.layout import Layout
from tools.quickstart.learning import branch, curves, practise, prepare_start

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

ROLLOUTS = 10
GAIN = 0.3


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    layout = Layout(tmp_path_factory.mktemp("learning") / "start")
    prepare_start(layout, 0, Console())
    return layout


# One that differs in its advantages, one that differs in its loss, one with a second model, and adapters.
RUNS = {name: ALGORITHMS[name] for name in ("reinforce_plus_plus", "gspo", "ppo")}
RUNS["adapters"] = (*ALGORITHMS["grpo"], "--lora-rank", "8", "--lora-alpha", "16", "--lr", "4e-3")
RUNS["adapters beside the base"] = (*RUNS["adapters"], "--no-lora-merge")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", RUNS)
def test_practice_raises_held_out_accuracy(start, name) -> None:
    layout = branch(start, start.root.with_name(name))
    practise(layout, 0, ROLLOUTS, name, RUNS[name], Console())
    accuracy = curves(layout)["eval_sampled"]
    assert accuracy[str(ROLLOUTS)] >= accuracy["0"] + GAIN, accuracy
