"""Every variant of the quickstart that README and docs name comes to its report: few steps of each."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.page_runs import printed
from tools.quickstart import __main__ as quickstart
from tools.quickstart import learning
from tools.quickstart.algorithms import ALGORITHMS
from tools.quickstart.layout import Layout
from tools.quickstart.phases import Phase, plan, rl_phase

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

IMITATION, ROLLOUTS = 4, 2
VARIANTS = [["--advantage-estimator", name] for name in ALGORITHMS]
VARIANTS += [["--train-backend", "fsdp", "--advantage-estimator", "ppo"]]
VARIANTS += [[*c.words[2:]] for c in printed("bash scripts/quickstart.sh") if c.words[2:]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """A model after a few rounds of imitation."""
    layout = Layout(tmp_path_factory.mktemp("quickstart") / "start")

    def short(layout: Layout, seed: int) -> list[Phase]:
        return [replace(phase, total=phase.total and IMITATION) for phase in plan(layout, seed)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "plan", short)
        learning.prepare_start(layout, 0, Console())
    return layout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", VARIANTS, ids=lambda flags: "-".join(flags[1::2]))
def test_a_variant_comes_to_its_report(
    start: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    def practice(layout: Layout, seed: int, algorithm: str) -> list[Phase]:
        for link, target in ((layout.sft_model, start.sft_model), (layout.data, start.data)):
            link.symlink_to(target)
        own = (*ALGORITHMS[algorithm], "--eval-interval", str(ROLLOUTS))
        return [rl_phase(layout, algorithm, own, ROLLOUTS)]

    monkeypatch.setattr(quickstart, "plan", practice)
    monkeypatch.chdir(tmp_path)
    assert quickstart.main([*flags, "--output", str(tmp_path / "mine")]) == 0
    layout = Layout(tmp_path / "mine")
    summary = json.loads(layout.summary.read_text())
    assert summary["first_logprob_abs_diff"] < 1e-5 and summary["num_rollouts"] == ROLLOUTS
    assert summary["seed"] == (1 if "--seed" in flags else 0)
    assert "<svg" in layout.report.read_text()
