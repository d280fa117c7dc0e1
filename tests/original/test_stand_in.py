"""The checks of launchers and examples find what is right and what is wrong in a repository made for them."""

import pytest

from tests.each import hold_each
from tests.original.checks import (
    Workplace,
    has_code_of_its_own,
    run_launch,
    wrong_with_launcher,
    wrong_with_outcome,
)
from tests.original.recording import LauncherFailed
from tests.original.repository import bash_launchers, python_launchers, third_parties
from tests.original.stand_in import EXAMPLES, EXPECTED, LACKING, STARTS_NOTHING, write_stand_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(engine, tmp_path_factory):
    root = tmp_path_factory.mktemp("stand_in")
    return Workplace(write_stand_in(root / "original"), engine.path, root)


def test_launchers_are_found(place):
    found = [*bash_launchers(place.copy), *python_launchers(place.copy)]
    assert {*found} == {*EXPECTED, STARTS_NOTHING}
    assert third_parties(place.copy) == ["tau_world"]


def test_what_refuses_a_launcher_is_told(place):
    def check(script):
        assert (wrong := wrong_with_launcher(place, script, EXPECTED[script])) is None, wrong

    hold_each(EXPECTED, check, least=9)


def test_another_answer_than_the_docs_is_told(place):
    script = "scripts/run-unknown-flag.sh"
    assert "refused for ['--no-such-flag'], the docs say []" in str(wrong_with_launcher(place, script, ()))
    script = "scripts/run-qwen3-0.6B.sh"
    assert "refused for [], the docs say ['--lr']" in str(wrong_with_launcher(place, script, {"--lr"}))


def test_a_script_that_starts_nothing_is_told(place):
    with pytest.raises(LauncherFailed, match="status 1, starts no training"):
        place.launches(STARTS_NOTHING)


def test_examples_run_in_process(place, engine):
    def check(script):
        (launch,) = place.launches(script)
        assert has_code_of_its_own(launch)
        found = wrong_with_outcome(run_launch(place, launch, engine.url), engine.model)
        assert found is None if EXAMPLES[script] is None else EXAMPLES[script] in str(found), found

    hold_each(EXAMPLES, check, least=5)


def test_an_example_whose_packages_are_not_installed_names_them(place, engine):
    for script, package in LACKING.items():
        (launch,) = place.launches(script)
        assert run_launch(place, launch, engine.url).missing == package
