"""The original's examples make samples that can be trained on, in process, with an embedded engine.

Run by ``ORIGINAL=DIR bash scripts/test-original.sh``.
"""

import pytest

from tests.original.checks import (
    Workplace,
    has_code_of_its_own,
    run_launch,
    temperature_of,
    wrong_with_outcome,
)
from tests.original.recording import LauncherFailed
from tests.original.repository import ORIGINAL, bash_launchers, python_launchers

pytestmark = pytest.mark.skipif(ORIGINAL is None, reason="ORIGINAL does not name the original's repository")
SCRIPTS = [*bash_launchers(ORIGINAL), *python_launchers(ORIGINAL)] if ORIGINAL else [""]


@pytest.fixture(scope="module")
def place(engine, tmp_path_factory):
    return Workplace(ORIGINAL, engine.path, tmp_path_factory.mktemp("original"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_makes_samples(script, place, engine):
    try:
        launches = [launch for launch in place.launches(script) if has_code_of_its_own(launch)]
    except LauncherFailed as error:
        pytest.skip(f"{error}")  # which test_launchers.py says is wrong
    if not launches:
        pytest.skip("names no code that makes or judges samples")
    outcome = run_launch(place, launches[0], engine.url)
    if outcome.missing:
        pytest.skip(f"imports {outcome.missing}, which is not installed")
    assert (wrong := wrong_with_outcome(outcome, engine.model, temperature_of(launches[0]))) is None, wrong
