"""The parser: every flag of every group, by its full name only."""

import argparse
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from slime.arguments.absent_sglang import take_server_options
from slime.arguments.custom_config import apply_custom_config
from slime.arguments.engines import (
    choose_engine,
    has_sglang,
    sglang_server_args,
)
from slime.arguments.errors import UsageError
from slime.arguments.flags import Flag, add_flags, without_none
from slime.arguments.foreign import add_foreign_flags, foreign_flags, judge
from slime.arguments.gpu_only import without_gpu_only
from slime.arguments.registry import declared_groups, derived_names, documented_groups
from slime.arguments.role_config import apply_role_config
from slime.arguments.router import add_router_flags
from slime.arguments.run_args import RunArgs
from slime.arguments.sglang_flags import add_sglang_server_flags
from slime.arguments.sglang_names import refuse_gone, with_current_names
from slime.arguments.spelling import nearest
from slime.arguments.values import bad_options, bad_values

_OTHER_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""What word processors make of one or two hyphens."""

AddArguments = Callable[[argparse.ArgumentParser], Any]


def build_parser(
    engine: str, add_custom_arguments: AddArguments | None = None
) -> tuple[argparse.ArgumentParser, dict[str, Flag]]:
    """The parser, and our flags by dest (those of SGLang's and the router's own parsers are not in it).

    Args:
        engine: "sglang" or "embedded": whose server options ``--sglang-*`` are.
        add_custom_arguments: registers a user's own options first.
    """
    parser = _Parser(description="RL post-training of language models", allow_abbrev=False)
    if add_custom_arguments is not None:
        add_custom_arguments(parser)
    groups = documented_groups() if engine == "embedded" else declared_groups()
    for group in groups:
        add_flags(parser.add_argument_group(group.title, group.about), group.flags)
    if engine == "sglang":
        add_sglang_server_flags(parser.add_argument_group("sglang", "Server options of SGLang."))
    add_router_flags(parser, parser.add_argument_group("router", "Options of sglang-router."))
    add_foreign_flags(parser)
    return parser, {spec.dest: spec for group in groups for spec in group.flags}


@dataclass(frozen=True)
class _Options:
    """A parser that asks for nothing: a misspelt flag is named before the one that it leaves missing.

    Attributes:
        specs: our flags by dest.
        required: what it would have asked for.
    """

    parser: argparse.ArgumentParser
    specs: dict[str, Flag]
    required: tuple[argparse.Action, ...]


def _build_options(engine: str, add_custom_arguments: AddArguments | None = None) -> _Options:
    parser, specs = build_parser(engine, add_custom_arguments)
    required = tuple(action for action in parser._actions if action.required)
    for action in required:
        action.required = False
    return _Options(parser, specs, required)


@cache
def shared_options(engine: str, server: type | None) -> _Options:
    """Without options of a user's own they are the same each time; building them takes longer than parsing.

    Args:
        server: the class that declares ``--sglang-*``, None for the embedded engine's.
    """
    return _build_options(engine)


def _options(engine: str, add_custom_arguments: AddArguments | None) -> _Options:
    if add_custom_arguments is not None:
        return _build_options(engine, add_custom_arguments)
    return shared_options(engine, sglang_server_args() if engine == "sglang" else None)


def parse(
    argv: Sequence[str] | None, add_custom_arguments: AddArguments | None, notes: list[str] | None = None
) -> Namespace:
    """Flags as given, nothing derived yet.

    Args:
        notes: what a user should be told of them is added.

    Raises:
        UsageError: an unknown flag, or a value that is unreadable, unsupported or out of range.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    engine = _engine_of(words)
    options = _options(engine if has_sglang() else "embedded", add_custom_arguments)
    parser, specs = options.parser, options.specs
    words, told = with_current_names(words, parser._option_string_actions)
    args, unknown = parser.parse_known_args(words, RunArgs())
    _own_defaults(args)
    if engine == "sglang" and not has_sglang():
        unknown, not_read = take_server_options(args, unknown)
        told += not_read
    if engine == "embedded":
        unknown, idle = without_gpu_only(unknown)
        told += idle
    if unknown:
        raise UsageError(_unknown(unknown[0], parser, specs, engine))
    told += judge(args)
    told += apply_custom_config(args, specs, parser._actions, derived_names())
    told += apply_role_config(args, specs, parser._actions)
    if notes is not None:
        notes += told
    for action in options.required:
        if getattr(args, action.dest) is None:
            raise UsageError(f"{action.option_strings[0]}: missing (wanted: {action.help})")
    for message in _bad(args, parser, specs):
        raise UsageError(message)
    _forget_what_changes_nothing(args, specs)
    if choose_engine(args.rollout_engine, args.check) != engine:
        raise UsageError(
            f"--custom-config-path {args.custom_config_path}: rollout_engine is {args.rollout_engine!r}, but "
            f"flags were read for {engine!r} (wanted: --rollout-engine {args.rollout_engine})"
        )
    args.rollout_engine = engine
    return args


def _own_defaults(args: Namespace) -> None:
    """Who changes a list of ``args`` does not change the default that the next one gets."""
    for name, value in vars(args).items():
        if isinstance(value, list | dict):
            setattr(args, name, copy(value))


def _engine_of(words: list[str]) -> str:
    """Which server's options to offer has to be known before the rest can be parsed."""
    try:
        found = _early_parser().parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise UsageError(str(error).removeprefix("argument ")) from error
    requested = found.rollout_engine
    known = requested in ("auto", "sglang", "embedded")
    return choose_engine(requested, found.check) if known else "embedded"


@cache
def _early_parser() -> argparse.ArgumentParser:
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--rollout-engine", default="auto")
    early.add_argument("--check", action="store_true")
    return early


def _bad(args: Namespace, parser: argparse.ArgumentParser, specs: dict[str, Flag]) -> Iterator[str]:
    yield from _unsupported(args, specs)
    yield from bad_values(args, specs.values())
    yield from bad_options(args, [action for action in parser._actions if action.dest not in specs])


def _unknown(word: str, parser: argparse.ArgumentParser, specs: dict[str, Flag], engine: str) -> str:
    if word[:1] in _OTHER_DASHES:
        return f"{word!r}: begins with another sign than - (wanted: --{word.lstrip(_OTHER_DASHES + '-')})"
    if not word.startswith("-"):
        return f"{word!r}: not expected here (wanted: a flag)"
    name = word.split("=")[0]
    if name.startswith("--sglang-") and engine == "embedded":
        return f"{name}: not an option of the embedded engine (wanted: SGLang, pip install -e '.[sglang]')"
    refuse_gone(name)
    if "lora" in name.lower().replace("_", "-").split("-"):
        return f"{name}: not supported, weights are trained whole (wanted: without)"
    refused = {name for spec in specs.values() if spec.supported == (spec.default,) for name in spec.names}
    refused |= {name for entry in foreign_flags() for name in entry.names}
    options = {option for action in parser._actions for option in action.option_strings}
    close = nearest(name, options - refused)
    return f"{name}: unknown flag" + (f" (did you mean {close}?)" if close else "")


def _unsupported(args: Namespace, specs: dict[str, Flag]) -> Iterator[str]:
    for spec in specs.values():
        value = getattr(args, spec.dest)
        if spec.supported is None or value in spec.supported or value == spec.default:
            continue
        if spec.idle_without or value in spec.same_as_default:
            continue
        wanted = spec.wanted or " or ".join(map(str, spec.supported))
        shown = "" if isinstance(value, bool) else f" {value}"
        name = spec.names[0]
        if value is False and without_none(spec.type)[1]:
            name = f"--no-{name.removeprefix('--')}"
        yield f"{name}{shown}: not supported (wanted: {wanted})"


def _forget_what_changes_nothing(args: Namespace, specs: dict[str, Flag]) -> None:
    """Nobody has to know that an expert parallel size of 1 means the same as none."""
    for spec in specs.values():
        if getattr(args, spec.dest) in spec.same_as_default:
            setattr(args, spec.dest, spec.default)


_SWITCH_WITH_VALUE = re.compile(r"(\S+): ignored explicit argument '(.*)'")


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing a page of usage: the error is one line."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if switch := _SWITCH_WITH_VALUE.fullmatch(message):
            message = (
                f"{switch[1]}={switch[2]}: takes no value (wanted: {switch[1].split('/')[-1]}, or without)"
            )
        raise UsageError(message)
