"""The command line: flags, what follows from them, and whether a run with them can start.

    args = parse_args()

Each module of a concern declares its flags as a dataclass, with what follows from them, which of them
contradict each other, and what they point to; ``registry`` lists the concerns. ``args`` is flat, since
users' hooks receive it.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
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
    from slime.arguments.parser import parse
    from slime.arguments.registry import derive, findings

    args = parse(argv, add_custom_arguments)
    derive(args)
    for message in findings(args):
        raise UsageError(message)
    return args
