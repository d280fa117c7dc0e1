"""Losses of whole answers have the same numbers in every layout and in micro-batches of any size."""

import pytest

from tests.golden import curves
from tests.golden.model import save_golden_model

pytestmark = pytest.mark.slow

_MIS = (
    *("--use-tis", "--tis-type", "mis", "--tis-level", "sequence", "--tis-mode", "clip", "--use-opsm"),
    *("--tis-batch-normalize", "--use-rs", "--rs-level", "geometric", "--rs-upper-bound", 1.0001),
)
LOSSES = {
    "MIS": ("--advantage-estimator", "rloo", *_MIS),
    "GSPO": (
        *("--advantage-estimator", "gspo", "--eps-clip", 3e-4, "--eps-clip-high", 4e-4),
        *("--disable-grpo-std-normalization", "--pg-loss-denominator", 12),
    ),
}
LAYOUTS = {
    "TP 2": (2, curves._TP2),
    "PP 2": (2, curves._PP2),
    "DP 2": (2, curves._DP2),
    "CP 2": (2, (*curves._DP2, "--context-parallel-size", 2)),
    "micro-batches of 2": (1, ("--micro-batch-size", 2)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_golden_model(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def alone(model):
    """By one process, in dynamic micro-batches."""
    return {name: _compute(model, 1, flags) for name, flags in LOSSES.items()}


def _compute(model, world_size, flags):
    curves.CASES["of this test"] = (world_size, flags)
    try:
        return curves.compute(model, "of this test")
    finally:
        del curves.CASES["of this test"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_whole_answers_is_the_same_in_every_layout(model, alone, loss, layout):
    world_size, flags = LAYOUTS[layout]
    found = _compute(model, world_size, (*LOSSES[loss], *flags))
    assert found["steps"][0].keys() == alone[loss]["steps"][0].keys()
    for part in ("steps", "rollouts"):  # later steps are of weights that earlier ones have trained
        assert curves.differences(found[part], alone[loss][part], relative=1e-5, absolute=2e-6) == []
    if loss == "MIS":
        assert found["steps"][-1]["train/mis_masked_fraction"] > 0
