"""The table of ``docs/metrics.md``: which metrics it describes."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_ROW_KEYS = {"axis", "step", "time"}


def table() -> list[re.Pattern[str]]:
    """A pattern for each row: ``<word>`` is any text, ``{a,b}`` one of the words."""
    names = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [re.compile("".join(map(_part, re.split(r"(<[^>]*>|\{[^}]*\})", name)))) for name in names]


def _part(part: str) -> str:
    if part.startswith("<"):
        return ".+"
    if part.startswith("{"):
        return f"(?:{'|'.join(map(re.escape, part[1:-1].split(',')))})"
    return re.escape(part)


def undescribed(names: Iterable[str]) -> set[str]:
    """Names that no row describes."""
    rows = table()
    return {name for name in set(names) - _ROW_KEYS if not any(pattern.fullmatch(name) for pattern in rows)}
