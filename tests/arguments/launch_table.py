"""The table of docs/launch-scripts.md: what refuses each of the original's launch scripts.

python -m tests.arguments.launch_table     # writes its rows anew
"""

import re
import sys
import tempfile
from pathlib import Path

import pytest

from slime.arguments import UsageError, validated_args
from tests.arguments.conftest import write_empty_weights
from tests.arguments.original_scripts import SCRIPTS, words_of, write_data, write_model
from tests.arguments.sglang_options import as_installed
from tools.make_tiny_model import make_config, make_tokenizer

PAGE = Path(__file__).parents[2] / "docs/launch-scripts.md"
_ROW = re.compile(r"^\| `(?P<name>[^`]+)` \| (?:starts|refused) \|(?P<why>.*)\|$")
_COUNT = re.compile(r"^\d+ start\.", re.MULTILINE)


def table() -> dict[str, list[str]]:
    """By script: what the page says refuses it, nothing if it starts."""
    rows = filter(None, map(_ROW.match, PAGE.read_text(encoding="utf-8").splitlines()))
    return {row["name"]: re.findall(r"`([^`]+)`", row["why"]) for row in rows}


def reasons(words: list[str]) -> list[str]:
    """What refuses a command line; a flag that is refused by name is left out of the next try."""
    found = []
    while True:
        try:
            validated_args(words)
        except UsageError as error:
            message = str(error)
            found.append(_short(message))
            flag = message.split()[0].strip(":")
            if not flag.startswith("--") or flag not in words or "config.json" in message:
                return found
            words = _without(words, flag)
        else:
            return found


def _short(message: str) -> str:
    """The message without the place of the checkpoint and without what is wanted."""
    message = re.sub(r"^--hf-checkpoint \S+: \S+/config.json: ", "", message)
    message = re.sub(r"^/\S+: ", "", re.sub(r" /\S+:", ":", message))
    return message.partition(" (wanted")[0]


def _without(words: list[str], flag: str) -> list[str]:
    start = words.index(flag)
    rest = range(start + 1, len(words))
    end = next((place for place in rest if words[place].startswith("--")), len(words))
    return words[:start] + words[end:]


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
        place.mkdir()
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
    rows = [place for place, line in enumerate(lines) if _ROW.match(line)]
    lines[rows[0] : rows[-1] + 1] = [_row(name, messages) for name, messages in found.items()]
    started = sum(not messages for messages in found.values())
    text = _COUNT.sub(f"{started} start.", "\n".join(lines) + "\n")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
