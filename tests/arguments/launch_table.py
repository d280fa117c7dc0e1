"""The table of docs/launch-scripts.md: what refuses each of the original's launch scripts.

python -m tests.arguments.launch_table     # writes its rows anew
"""

import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests.arguments.conftest import write_empty_weights
from tests.arguments.launch_reasons import reasons
from tests.arguments.original_scripts import SCRIPTS, words_of, write_data, write_model
from tests.arguments.sglang_options import as_installed
from tools.make_tiny_model import make_config, make_tokenizer

PAGE = Path(__file__).parents[2] / "docs/launch-scripts.md"
_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?:starts|refused) \|(?P<why>.*)\|$")
_COUNT = re.compile(r"^\d+ start\.", re.MULTILINE)


def table(ending: str = ".sh") -> dict[str, list[str]]:
    """By script: what the page says refuses it, nothing if it starts; ``.py`` for the launchers in Python."""
    rows = filter(None, map(_ROW.match, PAGE.read_text(encoding="utf-8").splitlines()))
    found = {row["name"]: re.findall(r"`([^`]+)`", row["why"]) for row in rows}
    return {name: messages for name, messages in found.items() if name.endswith(ending)}


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
    why = "".join(f" `{message}`," for message in messages).rstrip(",")
    return f"| `{name}` | {'refused' if messages else 'starts'} |{why} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        as_installed(patch)
        found = _measured(Path(folder))
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [place for place, line in enumerate(lines) if (row := _ROW.match(line)) and row["name"] in found]
    lines[rows[0] : rows[-1] + 1] = [_row(name, messages) for name, messages in found.items()]
    started = sum(not messages for messages in found.values())
    text = _COUNT.sub(f"{started} start.", "\n".join(lines) + "\n")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
