"""The command line: flags, what follows from them, and whether a run with them can start.

    args = parse_args()

Flags are declared as dataclasses, one per concern, in the modules of this package. ``args`` is flat,
since users' hooks receive it.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slime.arguments.errors import UsageError

if TYPE_CHECKING:
    from slime.arguments.parser import AddArguments

__all__ = ["UsageError", "parse_args", "validated_args"]


def parse_args(
    argv: Sequence[str] | None = None, add_custom_arguments: "AddArguments | None" = None
) -> Namespace:
    """The run's flags, checked; on bad input prints one line and exits with status 2.

    Args:
        argv: words of the command line; default ``sys.argv``.
        add_custom_arguments: registers options of the user's own on the parser.
    """
    try:
        return validated_args(argv, add_custom_arguments)
    except UsageError as error:
        message = " ".join(line.strip() for line in str(error).splitlines())
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def validated_args(
    argv: Sequence[str] | None = None, add_custom_arguments: "AddArguments | None" = None
) -> Namespace:
    """As ``parse_args``, but bad input raises.

    Raises:
        UsageError: with the first thing that is wrong.
    """
    from slime.arguments.parser import declared_groups, parse

    args = parse(argv, add_custom_arguments)
    # Imported in the order of their cost, which is seconds for the last: a bad flag is answered at once.
    from slime.arguments.checks import contradictions
    from slime.arguments.derive import derive

    derive(args)
    _raise_first(contradictions(args))
    from slime.arguments.preflight import missing_things

    specs = {spec.dest: spec for group in declared_groups() for spec in group.flags}
    _raise_first(missing_things(args, specs))
    return args


def _raise_first(findings: Iterator[str]) -> None:
    for message in findings:
        raise UsageError(message)
