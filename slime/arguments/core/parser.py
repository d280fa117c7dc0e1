"""The parser: every flag of every group, by its full name only."""

import argparse
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, NoReturn

from slime.arguments.core.absent_sglang import split_options, take_server_options
from slime.arguments.core.errors import UsageError
from slime.arguments.core.flag import Flag, add_flags, without_none
from slime.arguments.core.foreign import add_foreign_flags, foreign_flags, judge
from slime.arguments.core.gpu_only import without_gpu_only
from slime.arguments.core.mistakes import Mistakes
from slime.arguments.core.run_args import RunArgs, forget, is_known
from slime.arguments.core.sglang_flags import add_sglang_server_flags
from slime.arguments.core.sglang_names import refuse_gone, with_current_names
from slime.arguments.core.spelling import nearest
from slime.arguments.core.values import bad_options, bad_values
from slime.arguments.groups.custom_config import apply_custom_config
from slime.arguments.groups.engines import choose_engine, has_sglang, sglang_server_args
from slime.arguments.groups.policies import apply_policies
from slime.arguments.groups.role_config import apply_role_config
from slime.arguments.groups.router import add_router_flags
from slime.arguments.registry import declared_groups, derived_names, documented_groups

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
    parser = _Parser(
        description="RL post-training of language models", allow_abbrev=False, exit_on_error=False
    )
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

    @cached_property
    def guesses(self) -> frozenset[str]:
        """Names that an unknown one may have been meant to be: of flags that are not refused."""
        specs = self.specs.values()
        refused = {name for spec in specs if spec.supported == (spec.default,) for name in spec.names}
        refused |= {name for entry in foreign_flags() for name in entry.names}
        return frozenset(self.parser._option_string_actions.keys() - refused)


def _build_options(engine: str, add_custom_arguments: AddArguments | None = None) -> _Options:
    parser, specs = build_parser(engine, add_custom_arguments)
    required = tuple(action for action in parser._actions if action.required)
    for action in required:
        action.required = False
    return _Options(parser, specs, required)


@cache
def shared_options(engine: str, server: type | None) -> _Options:
    """Builds the options once per process: they stay the same, and building takes longer than parsing.

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
        UsageError: unknown flags, or values that are unreadable, unsupported or out of range.
    """
    mistakes = Mistakes()
    args = read_words(argv, add_custom_arguments, mistakes, [] if notes is None else notes)
    mistakes.end()
    return args


def read_words(
    argv: Sequence[str] | None,
    add_custom_arguments: AddArguments | None,
    mistakes: Mistakes,
    notes: list[str],
) -> Namespace:
    """Flags as given, nothing derived yet; those that cannot be used are not known to whoever reads them.

    Args:
        mistakes: what is wrong with them is added.
        notes: what a user should be told of them is added.

    Raises:
        UsageError: an option of the user's own that nothing can be read after.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    engine = _engine_of(words, mistakes)
    options = _options(engine if has_sglang() else "embedded", add_custom_arguments)
    words, told = with_current_names(words, options.parser._option_string_actions)
    notes += told
    args, unknown = _read_options(options.parser, words, mistakes)
    _own_defaults(args)
    _read_rest(args, options, words, unknown, engine, mistakes, notes)

    specs, actions = options.specs, options.parser._actions
    for told_by in (
        lambda: judge(args),
        lambda: apply_custom_config(args, specs, actions, derived_names()),
        lambda: apply_role_config(args, specs, actions),
        lambda: apply_policies(args, specs, actions),
    ):
        forget(args, mistakes.try_to(lambda: notes.extend(told_by())) or ())  # noqa: B023 - called here
    _refuse_values(args, options, mistakes)
    _forget_what_changes_nothing(args, options.specs)
    mistakes.try_to(lambda: _keep_engine(args, engine))
    return args


def _read_options(
    parser: argparse.ArgumentParser, words: Sequence[str], mistakes: Mistakes
) -> tuple[Namespace, list[str]]:
    """What ``parse_known_args`` returns, without the options whose values cannot be read."""
    failed: set[str] = set()
    while True:
        try:
            read, unknown = parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            mistakes.add(_shown(error))
            names = {name for option in split_options(words) if _is_about(error, name := _name_of(option))}
            if not names:  # of the user's own parser
                mistakes.end()
            words = [word for o in split_options(words) if _name_of(o) not in names for word in o]
            failed |= {parser._option_string_actions[name].dest for name in names}
        else:
            args = RunArgs(**vars(read))
            forget(args, failed)
            return args, unknown


def _is_about(error: argparse.ArgumentError, name: str) -> bool:
    return name in (error.argument_name or "").split("/")


def _name_of(option: Sequence[str]) -> str:
    return option[0].partition("=")[0]


def _read_rest(
    args: Namespace,
    options: _Options,
    words: Sequence[str],
    unknown: Sequence[str],
    engine: str,
    mistakes: Mistakes,
    notes: list[str],
) -> None:
    """What the parser has no options for: those of a server that is not here, and mistakes."""
    told: list[str] = []
    if engine == "sglang" and not has_sglang():
        try:
            unknown, told = take_server_options(args, unknown)
        except UsageError as error:
            mistakes.add(*error.messages)
            unknown = [word for o in split_options(unknown) if "sglang-" not in o[0] for word in o]
    if engine == "embedded":
        unknown, told = without_gpu_only(unknown)
    notes += told
    known = options.parser._option_string_actions
    for word in _stray(words, unknown):
        mistakes.try_to(partial(_refuse_unknown, word, options, engine))
        meant = _meant(word.split("=")[0], options)
        forget(args, [known[meant].dest] if meant else [])


def _stray(words: Sequence[str], unknown: Sequence[str]) -> Iterator[str]:
    """Yields unknown words that are no values of an unknown flag, and those with another dash."""
    left = list(unknown)
    for option in split_options(words):
        found = [left.pop(0) for word in option if left and word == left[0]]
        yield from found[:1]
        yield from (word for word in found[1:] if word[:1] in _OTHER_DASHES)


def _refuse_values(args: Namespace, options: _Options, mistakes: Mistakes) -> None:
    """What is missing, unsupported or out of range."""
    for action in options.required:
        if is_known(args, action.dest) and getattr(args, action.dest) is None:
            mistakes.add(f"{action.option_strings[0]}: missing (wanted: {action.help})")
            forget(args, [action.dest])
    values = vars(args)
    for action in options.parser._actions:
        spec = options.specs.get(action.dest)
        default = spec.default if spec else action.default
        if values.get(action.dest, default) is default:  # or taken off, since it could not be read
            continue
        rules = (
            (_unsupported(args, spec), bad_values(args, [spec])) if spec else (bad_options(args, [action]),)
        )
        if wrong := next(chain.from_iterable(rules), None):
            mistakes.add(wrong)
            forget(args, [action.dest])


def _keep_engine(args: Namespace, engine: str) -> None:
    if choose_engine(args.rollout_engine, args.check) != engine:
        raise UsageError(
            f"--custom-config-path {args.custom_config_path}: rollout_engine is {args.rollout_engine!r}, but "
            f"flags were read for {engine!r} (wanted: --rollout-engine {args.rollout_engine})"
        )
    args.rollout_engine = engine


def _own_defaults(args: Namespace) -> None:
    """Who changes a list of ``args`` does not change the default that the next one gets."""
    for name, value in vars(args).items():
        if isinstance(value, list | dict):
            setattr(args, name, copy(value))


def _engine_of(words: list[str], mistakes: Mistakes) -> str:
    """Which server's options to offer has to be known before the rest can be parsed."""
    try:
        found = _early_parser().parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        mistakes.add(_shown(error))
        return "embedded"
    requested = found.rollout_engine
    if requested not in ("auto", "sglang", "embedded"):
        return "embedded"
    try:
        return choose_engine(requested, found.check)
    except UsageError as error:
        mistakes.add(*error.messages)
        return requested


@cache
def _early_parser() -> argparse.ArgumentParser:
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--rollout-engine", default="auto")
    early.add_argument("--check", action="store_true")
    return early


def _refuse_unknown(word: str, options: _Options, engine: str) -> None:
    name = word.split("=")[0]
    if name.startswith("--") and not (name.startswith("--sglang-") and engine == "embedded"):
        refuse_gone(name)
    raise UsageError(_unknown(word, options, engine))


def _unknown(word: str, options: _Options, engine: str) -> str:
    if word[:1] in _OTHER_DASHES:
        return f"{word!r}: begins with another sign than - (wanted: --{word.lstrip(_OTHER_DASHES + '-')})"
    if not word.startswith("-"):
        return f"{word!r}: not expected here (wanted: a flag)"
    name = word.split("=")[0]
    if name.startswith("--sglang-") and engine == "embedded":
        return f"{name}: not an option of the embedded engine (wanted: SGLang, pip install -e '.[sglang]')"
    meant = _meant(name, options)
    return f"{name}: unknown flag" + (f" (did you mean {meant}?)" if meant else "")


def _meant(name: str, options: _Options) -> str | None:
    """The flag that an unknown one is like."""
    return nearest(name, options.guesses)


def _unsupported(args: Namespace, spec: Flag) -> Iterator[str]:
    value = getattr(args, spec.dest)
    if spec.supported is None or value in spec.supported or value == spec.default:
        return
    if spec.idle_without or value in spec.same_as_default:
        return
    wanted = spec.wanted or " or ".join(map(str, spec.supported))
    shown = "" if isinstance(value, bool) else f" {value}"
    name = spec.names[0]
    if value is False and without_none(spec.type)[1]:
        name = f"--no-{name.removeprefix('--')}"
    yield f"{name}{shown}: not supported (wanted: {wanted})"


def _forget_what_changes_nothing(args: Namespace, specs: dict[str, Flag]) -> None:
    """Nobody has to know that an expert parallel size of 1 means the same as none."""
    for spec in specs.values():
        if spec.same_as_default and vars(args).get(spec.dest, spec.default) in spec.same_as_default:
            setattr(args, spec.dest, spec.default)


_SWITCH_WITH_VALUE = re.compile(r"(\S+): ignored explicit argument '(.*)'")


def _shown(error: argparse.ArgumentError) -> str:
    message = str(error).removeprefix("argument ")
    if switch := _SWITCH_WITH_VALUE.fullmatch(message):
        return f"{switch[1]}={switch[2]}: takes no value (wanted: {switch[1].split('/')[-1]}, or without)"
    return message


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing a page of usage: the error is one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)
