"""What the tools that make pages of the docs share: tables, and writing or checking a page."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def cell(text: str) -> str:
    """Text that cannot break out of a table cell or start an HTML tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], marked: Callable[[str], str] = str) -> str:
    """A Markdown table.

    Args:
        marked: what becomes of the first cell of a row.
    """
    cells = [[cell(text) for text in row] for row in rows]
    cells = [[marked(first), *rest] for first, *rest in cells]
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def write_or_check(page: Path, text: str, tool: str) -> int:
    """Writes a page, or with ``--check`` on the command line says whether it is fresh.

    Args:
        tool: the file's name of the caller in ``tools``, as a message names it.

    Returns:
        The exit status: 1 for a page that is out of date.
    """
    parser = argparse.ArgumentParser(f"tools/{tool}", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="only compare")
    if not parser.parse_args().check:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page}: out of date (run python tools/{tool})", file=sys.stderr)
    return 1
