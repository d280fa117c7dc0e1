"""The command line: flags, what follows from them, and whether a run with them can start.

    args = parse_args()

Each module of a config group declares its flags as a dataclass, with what follows from them, which of them
contradict each other, and what they point to; ``registry`` lists the config groups. ``args`` is flat, since
users' hooks receive it.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from slime.arguments.core.errors import UsageError
from slime.utils.terminal import escaped

if TYPE_CHECKING:
    from slime.arguments.core.group import Rule
    from slime.arguments.core.mistakes import Mistakes
    from slime.arguments.core.parser import AddArguments

_LONGEST_LINE = 1000
__all__ = ["UsageError", "parse_args", "validated_args"]


def parse_args(
    add_custom_arguments: "AddArguments | None" = None,
    argv: Sequence[str] | None = None,
    show: Callable[[Namespace], None] = lambda args: None,
    refuse: "Rule" = lambda args: iter(()),
) -> Namespace:
    """The run's flags, checked; on bad input prints one line for each mistake and exits with status 2.

    What is accepted but will have no effect, or perhaps not the one that was meant, gets a line ``note: ...``
    each, also on standard error.

    Args:
        add_custom_arguments: fn(parser) that registers options of the user's own and returns the parser.
        argv: words of the command line; default ``sys.argv``.
        show: called with flags that do not contradict each other, before what they point to is looked at; of
            several policies with those of each.
        refuse: yields what else is wrong with them.
    """
    try:
        args, notes = _checked(argv, add_custom_arguments, show, refuse)
    except UsageError as error:
        for message in error.messages:
            print(f"error: {_one_line(message)}", file=sys.stderr)
        raise SystemExit(2) from None
    for note in notes:
        print(f"note: {_one_line(note)}", file=sys.stderr)
    return args


def validated_args(
    argv: Sequence[str] | None = None, add_custom_arguments: "AddArguments | None" = None
) -> Namespace:
    """Parses like ``parse_args``, but bad input raises, and there are no notes.

    Raises:
        UsageError: with all that is wrong.
    """
    return _checked(argv, add_custom_arguments, lambda args: None, lambda args: iter(()))[0]


def _checked(
    argv: Sequence[str] | None,
    add_custom_arguments: "AddArguments | None",
    show: Callable[[Namespace], None],
    refuse: "Rule",
) -> tuple[Namespace, list[str]]:
    from slime.arguments.core.config_files import expand, required_flags
    from slime.arguments.core.mistakes import Mistakes
    from slime.arguments.core.parser import read_words
    from slime.arguments.core.run_args import forget
    from slime.arguments.groups.policies import take_first_policy
    from slime.arguments.policies import further_policies, join_policies

    mistakes, told = Mistakes(), list[str]()
    words = expand(sys.argv[1:] if argv is None else argv)
    mistakes.add(*words.mistakes)
    if words.unread:
        mistakes.excuse(required_flags())
    try:
        args = read_words(words.words, add_custom_arguments, mistakes, told)
        forget(args, words.unknown)
        if words.unread:  # what else is missing may stand there
            mistakes.end()
        command_line = take_first_policy(args)
        others = {} if mistakes.messages else further_policies(args, command_line, told)
        _derive_and_look(args, mistakes, told, show, refuse)
        for name, own in others.items():
            _look_at_policy(name, own, show)
        join_policies(args, others)
    except UsageError as error:
        raise UsageError(*map(words.placed, error.messages), unknown=error.unknown) from None
    return args, [words.placed(note) for note in told]


def _look_at_policy(name: str, args: Namespace, show: Callable[[Namespace], None]) -> None:
    from slime.arguments.core.mistakes import Mistakes

    try:
        _derive_and_look(args, Mistakes(), [], show, lambda args: iter(()))
    except UsageError as error:
        raise UsageError(*(f"policy {name}: {message}" for message in error.messages)) from None


def _derive_and_look(
    args: Namespace,
    mistakes: "Mistakes",
    told: list[str],
    show: Callable[[Namespace], None],
    refuse: "Rule",
) -> None:
    from slime.arguments.core.run_args import is_known
    from slime.arguments.core.working_directory import make_absolute
    from slime.arguments.registry import declared_groups, is_idle, notes
    from slime.arguments.validate.tokenizer_process import tokenizer_process

    if not mistakes.messages:
        told += notes(args)
    specs = (spec for group in declared_groups() for spec in group.flags if not is_idle(args, spec))
    mistakes.try_to(lambda: make_absolute(args, (spec for spec in specs if is_known(args, spec.dest))))
    # Started early: it takes as long as all that comes before its first answer is needed.
    with nullcontext() if mistakes.messages else tokenizer_process():
        _look(args, mistakes, show, refuse)


def _look(args: Namespace, mistakes: "Mistakes", show: Callable[[Namespace], None], refuse: "Rule") -> None:
    """Derives and looks, at what takes long if all else is right; raises UsageError with all mistakes."""
    from slime.arguments.registry import CONFIG_GROUPS, unusable

    for group in CONFIG_GROUPS:
        mistakes.of_derivation(group, args)
    for group in CONFIG_GROUPS:
        mistakes.of_rule(group.contradictions, args)
    mistakes.of_rule(refuse, args)
    if not mistakes.messages:
        show(args)
    for group in CONFIG_GROUPS:
        mistakes.of_rule(group.missing, args)
    mistakes.end()
    for rule in unusable():
        mistakes.of_contents(rule, args)
    mistakes.end()


def _one_line(text: str) -> str:
    """Text that fits a line and cannot control the terminal."""
    text = " ".join(line.strip() for line in text.splitlines())
    text = escaped(text)
    if len(text) <= _LONGEST_LINE:
        return text
    return f"{text[: _LONGEST_LINE // 2]} ... {text[-_LONGEST_LINE // 2 :]}"
