"""The trainer's numbers are those that were written down."""

import json

import pytest

from tests.golden import curves
from tests.golden.curves import CASES, compute, differences, recorded
from tests.golden.model import save_golden_model
from tests.page_runs import printed

pytestmark = pytest.mark.slow

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


def test_curves_are_written_and_compared_as_printed(tmp_path, monkeypatch, capsys) -> None:
    """With one curve and other files, in the order of CONTRIBUTING.md."""
    monkeypatch.setattr(curves, "CASES", {"grpo": CASES["grpo"]})
    monkeypatch.setattr(curves, "CURVES", tmp_path / "curves.json")
    computed = curves.compute_all()
    monkeypatch.setattr(curves, "compute_all", lambda progress: computed)
    for command in printed("python -m tests.golden.curves"):
        words = [word.replace("/tmp", str(tmp_path)) for word in command.words[3:]]
        if "--exact" not in words:
            curves.main(words)
            continue
        with pytest.raises(SystemExit) as equal:
            curves.main(words)
        assert equal.value.code == 0 and capsys.readouterr().out == "equal to the last bit\n"
    written = json.loads((tmp_path / "curves.json").read_text())
    assert written == json.loads((tmp_path / "before.json").read_text()) and set(written) == {"grpo"}
