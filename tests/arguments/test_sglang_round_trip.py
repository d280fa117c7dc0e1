"""Every option of SGLang's server, through our parser and our launcher, and back into SGLang's parser.

The options are those of the installed SGLang, else those that were recorded of one.
"""

import argparse
import importlib.util
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence

import pytest

from slime.arguments.core.parser import parse
from slime.arguments.groups.engines import LAUNCHER_OWNED
from slime.backends.sglang_utils.server_engine import EnginePlacement
from slime.backends.sglang_utils.servers import SGLangEngine
from tests.arguments.sglang_options import RECORD, as_installed, record, recorded_lines
from tests.run_args import config_with

pytestmark = pytest.mark.slow

RUN = ["--hf-checkpoint", "/models/tiny", "--rollout-batch-size", "1", "--rollout-engine", "sglang"]
PLACEMENT = EnginePlacement(rank=0, host="127.0.0.1", port=15000)
INSTALLED = importlib.util.find_spec("sglang") is not None
_CANDIDATES = (
    *("7", "0.25", "-3", "two words", '{"a": [1, "b"], "c": null}', '["x", "y"]', "true"),
    *('{"lora_name": "n", "lora_path": "/p"}', '{"decode": {"backend": "full"}}'),
)
_MOST = len(_CANDIDATES)


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    if not INSTALLED:
        as_installed(monkeypatch)


def server(add_help: bool = True) -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser("server", exit_on_error=False, allow_abbrev=False, add_help=add_help)
    ServerArgs.add_cli_args(parser)
    return parser


def values_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, object] | None:
    """What a server makes of a command line; None if it refuses."""
    try:
        return vars(parser.parse_args(words))
    except (argparse.ArgumentError, AssertionError, SystemExit, ValueError):
        return None


def written(action: argparse.Action, name: str) -> Iterator[list[str]]:
    """An option with everything that might follow it."""
    if action.nargs == 0:
        yield [name]
        return
    if action.nargs in ("?", "*"):
        yield [name]
    for value in map(str, list(action.choices or _CANDIDATES)[:_MOST]):
        yield [f"{name}={value}"]
    if action.nargs in ("+", "*"):
        yield from ([name, value, value] for value in ("7", "word"))


def accepted() -> list[tuple[str, list[str], object]]:
    """Returns, for every option of a run, each word list that the server takes, with dest and value."""
    taken = []
    for action in server()._actions:
        if action.dest in LAUNCHER_OWNED or action.dest in ("help", "api_key"):
            continue
        alone = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        alone._add_action(action)
        names = [name for name in action.option_strings if name.startswith("--")]
        ways = [words for name in names for words in written(action, name)]
        values = [(action.dest, words, values_of(alone, words)) for words in ways]
        fit = [(dest, words, value[dest]) for dest, words, value in values if value is not None]
        assert fit, f"no value found that {names[0]} takes"
        taken += fit
    return taken


def ours(word: str) -> str:
    """Returns an option as our command line has it."""
    return f"--sglang-{word.removeprefix('--')}"


def rounds() -> Iterator[tuple[list[str], dict[str, object]]]:
    """Command lines of ours with every option once, until each value has had its turn; the values wanted."""
    waiting = accepted()
    while waiting:
        line: list[str] = []
        wanted: dict[str, object] = {}
        left = []
        for dest, words, value in waiting:
            if dest in wanted:
                left.append((dest, words, value))
            else:
                wanted[dest] = value
                line += [ours(words[0]), *words[1:]]
        yield line, wanted
        waiting = left


def started(given: Namespace) -> dict[str, object]:
    """The options that a server would find, for the options that were given to a run."""
    config = config_with(**vars(given))
    found = values_of(server(), SGLangEngine(config, PLACEMENT, "/tmp").command()[3:])
    assert found is not None
    return found


def test_every_option_reaches_the_server_as_it_was_given() -> None:
    decided = set(SGLangEngine(config_with(**vars(parse(RUN, None))), PLACEMENT, "/tmp").settings())
    lines = 0
    for line, wanted in rounds():
        given = parse([*RUN, *line], None)
        asked = {dest: getattr(given, f"sglang_{dest}") for dest in wanted}
        assert asked == wanted
        found = started(given)
        # What the run itself prefers cannot be told from a default that was given.
        kept = {dest for dest in wanted if dest not in decided and dest not in ("dtype", "enable_metrics")}
        assert {dest: found[dest] for dest in kept} == {dest: wanted[dest] for dest in kept}
        lines += 1
    assert lines > 5


@pytest.mark.parametrize(
    ("form", "value"), [("--sglang-{}", True), ("--sglang-no-{}", False), ("--no-sglang-{}", False)]
)
def test_both_polarities_of_a_pair_are_told_apart(form: str, value: bool) -> None:
    pairs = [action for action in server()._actions if isinstance(action, argparse.BooleanOptionalAction)]
    assert len(pairs) >= 10
    names = {action.dest: action.option_strings[0].removeprefix("--") for action in pairs}
    found = started(parse([*RUN, *map(form.format, names.values())], None))
    assert {dest: found[dest] for dest in names} == dict.fromkeys(names, value)


@pytest.mark.skipif(not INSTALLED, reason="SGLang is not installed")
def test_the_record_is_that_of_the_installed_sglang() -> None:
    lines = record(server(add_help=False))
    if os.environ.get("SLIME_RECORD_SGLANG"):
        comment = [line for line in RECORD.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        RECORD.write_text("\n".join([*comment, *lines]) + "\n", encoding="utf-8")
    assert recorded_lines() == lines
