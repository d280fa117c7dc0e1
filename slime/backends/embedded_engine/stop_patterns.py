"""Which patterns ``stop_regex`` takes: those that can be compiled without much time and memory."""

import regex

from slime.backends.embedded_engine.errors import BadRequest

MAX_STOP_REGEX_BYTES = 256
MAX_STOP_REGEX_ITEMS = 4096
"""Compiling ``(?:a{1000}){1000}``, a million items, takes 270 MB and half a second."""
_TOKENS = regex.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,\d*)?\}|.", regex.DOTALL)


def check_pattern(pattern: str) -> None:
    """Raises BadRequest for a pattern that is too long, too large or none."""
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_STOP_REGEX_BYTES:
        raise BadRequest(f"stop_regex: a pattern is longer than {MAX_STOP_REGEX_BYTES} bytes")
    if _items(pattern) > MAX_STOP_REGEX_ITEMS:
        raise BadRequest(
            f"stop_regex {pattern!r}: its repeats, written out, make more than {MAX_STOP_REGEX_ITEMS} items"
        )
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise BadRequest(f"stop_regex {pattern!r}: {error}") from error


def _items(pattern: str) -> int:
    """Length of the pattern once ``{n}`` and ``{n,}`` are written out n times, as the compiler does."""
    open_groups, last = [0], 0
    for token in _TOKENS.finditer(pattern):
        if token[0] == "(":
            open_groups.append(0)
        elif token[0] == ")" and len(open_groups) > 1:
            last = max(open_groups.pop(), 1)
            open_groups[-1] += last
        elif token[1] is not None:
            added = last * (max(int(token[1]), 1) - 1)
            open_groups[-1] += added
            last += added
        else:
            last = 1
            open_groups[-1] += 1
    return sum(open_groups)
