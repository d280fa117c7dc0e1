"""From a dataclass field to an option of a parser."""

import argparse
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from slime.arguments.core.flag import add_flags, flag, flags_of, without_none
from slime.arguments.groups.embedded_engine import EmbeddedServerArgs


@dataclass(frozen=True)
class Example:
    count: int = flag(1, help="a number, 50% of them odd")
    fast: bool = flag(False, help="a switch")
    safe: bool = flag(True, names=("--unsafe",), help="a switch that is on")
    lazy: bool | None = flag(help="a pair")
    names: list[str] = flag([], help="several")  # noqa: RUF009
    hooks: list[str] = flag([], append=True, help="one at a time")  # noqa: RUF009
    level: Literal[1, "high"] = flag(1, help="choices")
    extra: dict[str, Any] = flag({}, help="JSON")  # noqa: RUF009
    forced: bool | None = flag(const=True, help="only its presence says something")


def parse(*words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, list(flags_of(Example)))
    parser.format_help()
    return parser.parse_args(words)


def test_defaults():
    args = parse()
    assert vars(args) == {
        **{"count": 1, "fast": False, "safe": True, "lazy": None, "names": [], "hooks": []},
        **{"level": 1, "extra": {}, "forced": None},
    }


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        (["--count", "3"], "count", 3),
        (["--fast"], "fast", True),
        (["--unsafe"], "safe", False),
        (["--no-lazy"], "lazy", False),
        (["--names", "a", "b"], "names", ["a", "b"]),
        (["--hooks", "a", "--hooks", "b"], "hooks", ["a", "b"]),
        (["--level", "1"], "level", 1),
        (["--extra", '{"a": 1}'], "extra", {"a": 1}),
        (["--forced"], "forced", True),
    ],
)
def test_values(words, dest, value):
    assert getattr(parse(*words), dest) == value


def test_a_repeated_option_does_not_change_the_default():
    parse("--hooks", "a")
    assert parse().hooks == []


def test_a_prefix_goes_before_name_and_dest():
    specs = {spec.dest: spec.names for spec in flags_of(Example, "sglang")}
    assert specs["sglang_count"] == ("--sglang-count",)
    assert specs["sglang_safe"] == ("--sglang-unsafe",)


def test_a_union_of_types_is_no_flag():
    assert without_none(int | None) == (int, True)
    with pytest.raises(TypeError, match="several types"):
        without_none(int | str)


def test_the_embedded_engine_parses_its_own_command_line():
    args = EmbeddedServerArgs.from_cli(["--model-path", "m", "--port", "1234", "--dtype", "float32"])
    assert (args.model_path, args.port, args.dtype, args.host) == ("m", 1234, "float32", "127.0.0.1")


@pytest.mark.parametrize("words", [["--port", "70000"], ["--context-length", "0"], ["--random-seed=-1"]])
def test_the_embedded_engine_has_ranges(words, capsys):
    with pytest.raises(SystemExit) as stop:
        EmbeddedServerArgs.from_cli(["--model-path", "m", *words])
    assert stop.value.code == 2
    assert ": wanted " in capsys.readouterr().err
