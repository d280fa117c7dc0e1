"""The table of docs/launch-scripts.md: what refuses each of the original's launch scripts.

python -m tests.arguments.launch_table     # writes its names and rows anew
"""

import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.arguments.conftest import write_empty_weights
from tests.arguments.launch_reasons import reasons
from tests.arguments.original_scripts import SCRIPTS, words_of, write_data, write_model
from tests.arguments.sglang_options import as_installed
from tools.make_tiny_model import make_config, make_tokenizer

PAGE = Path(__file__).parents[2] / "docs/launch-scripts.md"
_ROW = re.compile(r"^\| `(?P<name>[^`]+\.(?:sh|py))` \|(?P<why>.*)\|$", re.MULTILINE)
_STARTING = re.compile(r"^\d+ start: (.*?)\n$", re.MULTILINE | re.DOTALL)


def table(ending: str = ".sh") -> dict[str, list[str]]:
    """By script: what the page says refuses it, nothing if it starts; ``.py`` for the launchers in Python."""
    page = PAGE.read_text(encoding="utf-8")
    found: dict[str, list[str]] = {name: [] for name in SCRIPTS}
    found |= {name: [] for names in _STARTING.findall(page) for name in _quoted(names)}
    found |= {row["name"]: _quoted(row["why"]) for row in _ROW.finditer(page)}
    return {name: messages for name, messages in found.items() if name.endswith(ending)}


def starting(names: Iterable[str]) -> str:
    """The paragraph of those that start; by name if only the original has a list of them."""
    known = list(names)
    named = ", ".join(f"`{name}`" for name in known)
    text = f"{len(known)} start: {'all but these' if SCRIPTS.keys() >= {*known} else named}."
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def _quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _measured(root: Path) -> dict[str, list[str]]:
    checkpoint, weights, places = root / "checkpoint", root / "weights", root / "scripts"
    for path in (checkpoint, weights, places):
        path.mkdir()
    tokenizer = make_tokenizer()
    make_config(tokenizer).save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    write_empty_weights(checkpoint)
    found = {}
    for name in SCRIPTS:
        place = places / name
        place.mkdir(parents=True)
        write_data(place)
        words = words_of(name, place)
        write_model(name, words, checkpoint, weights)
        sys.path.insert(0, str(place))
        found[name] = reasons([*words, "--rollout-engine", "sglang"])
        sys.path.remove(str(place))
    return found


def _row(name: str, messages: list[str]) -> str:
    return f"| `{name}` | {', '.join(f'`{message}`' for message in messages)} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        as_installed(patch)
        found = _measured(Path(folder))
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [place for place, line in enumerate(lines) if (row := _ROW.match(line)) and row["name"] in found]
    lines[rows[0] : rows[-1] + 1] = [_row(name, messages) for name, messages in found.items() if messages]
    paragraph = starting(name for name, messages in found.items() if not messages)
    text = _STARTING.sub(lambda _: f"{paragraph}\n", "\n".join(lines) + "\n", count=1)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
