"""The command line: flags, what follows from them, and whether a run with them can start.

    args = parse_args()

Each module of a config group declares its flags as a dataclass, with what follows from them, which of them
contradict each other, and what they point to; ``registry`` lists the config groups. ``args`` is flat, since
users' hooks receive it.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slime.arguments.errors import UsageError

if TYPE_CHECKING:
    from slime.arguments.parser import AddArguments

_LONGEST_LINE = 1000
__all__ = ["UsageError", "parse_args", "validated_args"]


def parse_args(
    add_custom_arguments: "AddArguments | None" = None,
    argv: Sequence[str] | None = None,
    show: Callable[[Namespace], None] = lambda args: None,
) -> Namespace:
    """The run's flags, checked; on bad input prints one line and exits with status 2.

    What is accepted but will have no effect, or perhaps not the one that was meant, gets a line ``note: ...``
    each, also on standard error.

    Args:
        add_custom_arguments: fn(parser) that registers options of the user's own and returns the parser.
        argv: words of the command line; default ``sys.argv``.
        show: called with flags that do not contradict each other, before what they point to is looked at.
    """
    try:
        args, notes = _checked(argv, add_custom_arguments, show)
    except UsageError as error:
        print(f"error: {_one_line(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    for note in notes:
        print(f"note: {_one_line(note)}", file=sys.stderr)
    return args


def validated_args(
    argv: Sequence[str] | None = None, add_custom_arguments: "AddArguments | None" = None
) -> Namespace:
    """Parses like ``parse_args``, but bad input raises, and there are no notes.

    Raises:
        UsageError: with the first thing that is wrong.
    """
    return _checked(argv, add_custom_arguments, lambda args: None)[0]


def _checked(
    argv: Sequence[str] | None,
    add_custom_arguments: "AddArguments | None",
    show: Callable[[Namespace], None],
) -> tuple[Namespace, list[str]]:
    from slime.arguments.parser import parse
    from slime.arguments.registry import contradictions, declared_groups, derive, findings, notes
    from slime.arguments.tokenizer_process import tokenizer_process
    from slime.arguments.working_directory import make_absolute

    try:
        told: list[str] = []
        args = parse(argv, add_custom_arguments, told)
        told += notes(args)
        make_absolute(args, (spec for group in declared_groups() for spec in group.flags))
        # Started early: it takes as long as all that comes before its first answer is needed.
        with tokenizer_process():
            derive(args)
            for message in contradictions(args):
                raise UsageError(message)
            show(args)
            for message in findings(args):
                raise UsageError(message)
    except OSError as error:  # a place that cannot be looked at: no permission, a broken file system
        raise UsageError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error
    return args, told


def _one_line(text: str) -> str:
    """Text that fits a line and cannot control the terminal."""
    text = " ".join(line.strip() for line in text.splitlines())
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    if len(text) <= _LONGEST_LINE:
        return text
    return f"{text[: _LONGEST_LINE // 2]} ... {text[-_LONGEST_LINE // 2 :]}"
