"""The trainer's numbers are those that were written down."""

import pytest

from tests.golden.curves import CASES, compute, differences, recorded
from tests.golden.model import save_golden_model

# Metrics that are differences of nearly equal numbers are compared by their absolute size.
RELATIVE, ABSOLUTE = 1e-5, 2e-6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_golden_model(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("case", CASES)
def test_three_recorded_rollouts_give_the_recorded_curve(case: str, model: str) -> None:
    found, wanted = compute(model, case), dict(recorded()[case])
    del found["sha256"], wanted["sha256"]
    assert differences(found, wanted, relative=RELATIVE, absolute=ABSOLUTE) == []
