"""The original's launch scripts start here with the flags that they pass, or the docs say what refuses them.

Run by ``ORIGINAL=DIR bash scripts/test-original.sh``.
"""

import pytest

from tests.arguments.launch_table import table
from tests.original.checks import Workplace, wrong_with_launcher
from tests.original.repository import ORIGINAL, bash_launchers, python_launchers

pytestmark = pytest.mark.skipif(ORIGINAL is None, reason="ORIGINAL does not name the original's repository")
SCRIPTS = [*bash_launchers(ORIGINAL), *python_launchers(ORIGINAL)] if ORIGINAL else [""]
# The docs say that their tokenizers want it.
OWN_TOKENIZERS = ("kimi", "moonlight")


@pytest.fixture(scope="module")
def place(checkpoint, tmp_path_factory):
    return Workplace(ORIGINAL, checkpoint, tmp_path_factory.mktemp("original"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_launcher_is_answered_as_the_docs_say(script, place):
    documented = {
        name.rpartition("/")[2] if name.endswith(".py") else name: messages
        for name, messages in (table() | table(".py")).items()
    }
    name = script.rpartition("/")[2] if script.endswith(".py") else script
    expected = {message.split()[0].rstrip(":,") for message in documented.get(name, [])}
    given = ["--trust-remote-code"] if any(each in script.lower() for each in OWN_TOKENIZERS) else []
    assert (wrong := wrong_with_launcher(place, script, expected, given)) is None, wrong


def test_the_docs_name_no_script_that_is_not_there():
    there = {script.rpartition("/")[2] if script.endswith(".py") else script for script in SCRIPTS}
    assert {*table(), *table(".py")} - there == set()
