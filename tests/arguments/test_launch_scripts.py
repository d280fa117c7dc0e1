"""Command lines in the manner of the original's launch scripts start, or a page of the docs says why not."""

import pytest

from slime.arguments.registry import declared_groups
from tests.arguments import launch_table
from tests.arguments.launch_reasons import reasons
from tests.arguments.launch_table import PAGE, starting, table
from tests.arguments.original_scripts import SCRIPTS, words_of, write_data, write_model
from tests.arguments.sglang_options import as_installed
from tests.page_runs import printed

pytestmark = pytest.mark.slow

# The beginnings of what a script is told that is about no single flag of its own.
OF_THE_RUN = ("fully async rollouts: tokens are older",)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture
def command(tmp_path, monkeypatch, checkpoint, weights):
    """``command(name)``: the words of a script, whose model and data are there."""
    as_installed(monkeypatch)
    write_data(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def prepare(name):
        words = words_of(name, tmp_path)
        write_model(name, words, checkpoint, weights)
        return [*words, "--rollout-engine", "sglang"]

    return prepare


def test_the_page_names_each_of_the_44():
    assert len(SCRIPTS) == 44
    assert table().keys() == SCRIPTS.keys()
    for ending in (".sh", ".py"):
        named = [name for name, messages in table(ending).items() if not messages]
        assert f"\n{starting(named)}\n" in PAGE.read_text()


@pytest.mark.nightly
def test_the_page_is_written_as_printed(tmp_path, monkeypatch):
    (command,) = printed("python -m tests.arguments.launch_table")
    assert command.words[2] == launch_table.__name__ and len(command.words) == 3
    page = tmp_path / PAGE.name
    written = PAGE.read_text(encoding="utf-8").replace(
        " start: all but these", " start: nobody knows which", 1
    )
    page.write_text(written, encoding="utf-8")
    monkeypatch.setattr(launch_table, "PAGE", page)
    launch_table.main()
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8") != written


def test_flags_that_the_page_calls_not_supported_are_refused():
    """Of the launchers in Python, whose command lines only the original has."""
    rows = [message for messages in table(".py").values() for message in messages]
    named = {message.split()[0].strip(":") for message in rows if message.endswith(": not supported")}
    specs = [spec for group in declared_groups() for spec in group.flags]
    refused = {name for spec in specs if spec.supported == (spec.default,) for name in spec.names}
    assert len(table(".py")) == 30 and named and named <= refused


@pytest.mark.parametrize("name", [name for name, messages in table().items() if not messages])
def test_a_script_starts(name, command, notes):
    words = command(name)
    for note in notes(words):
        flag = note.split()[0].strip(":,")
        assert flag in words or "not given" in note or note.startswith(OF_THE_RUN), note


@pytest.mark.parametrize("name", [name for name, messages in table().items() if messages])
def test_what_refuses_a_script_is_on_the_page(name, command):
    assert reasons(command(name)) == table()[name]
