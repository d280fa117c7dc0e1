"""``slime check``: whether a run would start and what it would need, without starting it."""

import sys
from collections.abc import Sequence

from slime.cli import train

WRITE_CONFIG = "--write-config"


def run(words: Sequence[str]) -> int:
    """Prints the page of ``--check``, with which the process ends, or a file that ``--config`` reads."""
    if WRITE_CONFIG in words:
        return write_config([word for word in words if word != WRITE_CONFIG])
    return train.run([*words, "--check"])


def write_config(words: Sequence[str]) -> int:
    """Prints the configuration of a command line."""
    from slime.arguments import UsageError
    from slime.arguments.config_record import record

    try:
        print(record(words), end="")
    except UsageError as error:
        for message in error.messages:
            print(f"error: {message}", file=sys.stderr)
        return 2
    return 0
