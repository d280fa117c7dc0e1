"""``slime diff``: the flags in which two runs, or two files of flags, differ."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from slime.arguments.core.errors import UsageError
from slime.cli.run_dir import Record, read_record


def run(words: Sequence[str]) -> int:
    """Prints both values of each; exit status 1 if there are any, as that of diff."""
    parser = argparse.ArgumentParser("slime diff", description=__doc__, allow_abbrev=False)
    parser.add_argument("first", help="a run's directory, or a file of flags")
    parser.add_argument("second", help="another one")
    args = parser.parse_args(words)
    try:
        lines = list(differences(read_record(args.first), read_record(args.second)))
    except UsageError as error:
        for message in error.messages:
            print(f"error: {message}", file=sys.stderr)
        return 2
    print("\n".join([f"--- {args.first}", f"+++ {args.second}", *lines]) if lines else "no difference")
    return int(bool(lines))


def differences(first: Record, second: Record) -> Iterator[str]:
    """Lines for people: a heading, then ``-`` with the first value and ``+`` with the second."""
    names = [name for name in first.flags | second.flags if first.flags.get(name) != second.flags.get(name)]
    headings = {name: first.headings.get(name) or second.headings.get(name, "") for name in names}
    for heading in dict.fromkeys(headings.values()):
        yield f"{heading}:" if heading else "(no heading):"
        for name in (name for name in names if headings[name] == heading):
            for sign, record in (("-", first), ("+", second)):
                if name in record.flags:
                    yield f"{sign} {name}: {record.flags[name]}"
                else:
                    yield f"{sign} {name}: (default)"
