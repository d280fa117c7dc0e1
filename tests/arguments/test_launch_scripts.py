"""Command lines in the manner of the original's launch scripts start, or a page of the docs says why not."""

import re
from pathlib import Path

import pytest

from tests.arguments.original_scripts import SCRIPTS, words_of, write_data, write_model
from tests.arguments.sglang_options import as_installed

PAGE = Path(__file__).parents[2] / "docs/launch-scripts.md"
# The beginnings of what a script is told that is about no single flag of its own.
OF_THE_RUN = ("groups finished beyond a batch", "fully async rollouts: tokens are older")


def table():
    """By script: the messages that refuse it, none if it starts."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    rows = [row for row in rows if row[1:] and row[1].rstrip(" |") in ("starts", "refused")]
    return {name.strip("`"): re.findall(r"`([^`]+)`", " ".join(rest[1:])) for name, *rest in rows}


@pytest.fixture
def sglang(monkeypatch):
    as_installed(monkeypatch)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture
def command(tmp_path, monkeypatch, checkpoint, weights, sglang):
    """``command(name)``: the words of a script, whose model and data are there."""
    write_data(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def prepare(name):
        words = words_of(name, tmp_path)
        write_model(name, words, checkpoint, weights)
        return [*words, "--rollout-engine", "sglang"]

    return prepare


def without(words, flag):
    """The words without a flag and its values."""
    start = words.index(flag)
    end = next((place for place in range(start + 1, len(words)) if words[place].startswith("--")), len(words))
    return words[:start] + words[end:]


def test_the_page_has_a_row_for_each_of_the_44():
    assert len(SCRIPTS) == 44
    assert table().keys() == SCRIPTS.keys()


@pytest.mark.parametrize("name", [name for name, messages in table().items() if not messages])
def test_a_script_starts(name, command, notes):
    words = command(name)
    told = notes(words)
    for note in told:
        flag = note.split()[0].strip(":,")
        assert flag in words or note.startswith(OF_THE_RUN), note


@pytest.mark.parametrize("name", [name for name, messages in table().items() if messages])
def test_what_refuses_a_script_is_on_the_page(name, command, refusal, notes):
    """One thing after the other: a flag that was refused is left out of the next try."""
    words = command(name)
    *flags, last = table()[name]
    for message in flags:
        assert message in refusal(words)
        words = without(words, message.split()[0].strip(":"))
    assert last in refusal(words)
