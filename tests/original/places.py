"""What the paths of a recorded command line point to: models without values, a few rows of data, markers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.arguments.original_scripts import CHAT, CONVERSATION, ROLLOUT, value_of, write_model_of
from tests.original.recording import Launch


def placed(launch: Launch, root: Path, repository: Path) -> list[str]:
    """The words with every path below ``root`` that is not in the repository."""

    def place(word: str) -> str:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        outside = value.startswith("/") and not value.startswith((str(root), str(repository)))
        return f"{flag}{equals}{root}{value}" if outside else word

    return [place(word) for word in launch.words]


def write_places(
    launch: Launch, words: list[str], root: Path, tokenizer_of: Path, weights: Path
) -> list[str]:
    """Writes what the words point to; returns them with copies in place of the script's YAML files."""
    write_model_of(launch.model, launch.model or "spelt-out", words, tokenizer_of, weights)
    for path in _data_paths(words):
        write_rows(path, row_of(words))
    for flag in ("--eval-config", "--sglang-config"):
        if flag in words:
            place = words.index(flag) + 1
            words = [*words[:place], _placed_yaml(words, Path(words[place]), root), *words[place + 1 :]]
    return words


def _data_paths(words: list[str]) -> Iterator[Path]:
    if "--prompt-data" in words:
        yield _without_slice(value_of(words, "--prompt-data"))
    if "--eval-prompt-data" in words:
        place = words.index("--eval-prompt-data") + 1
        while place + 1 < len(words) and not words[place].startswith("--"):
            yield _without_slice(words[place + 1])
            place += 2


def _without_slice(value: str) -> Path:
    return Path(value.partition("@[")[0])


def row_of(words: list[str]) -> dict[str, Any]:
    """A row with the fields that the words ask for."""
    value = lambda flag, default: value_of(words, flag) if flag in words else default
    supervised = "sft_loss" in words
    content: Any = CONVERSATION if supervised else CHAT if "--apply-chat-template" in words else "1+1"
    key = value("--input-key", "input")
    row: dict[str, Any] = {key: 0 if key == "index" else content}
    if "--label-key" in words:
        key = value_of(words, "--label-key")
        row[key] = {"ground_truth": {"target": ["2"]}, "style": "rule"} if key == "reward_model" else "2"
    if "ifbench" in words:
        row["metadata"] = {"instruction_id_list": ["x"]}
    return row


def write_rows(path: Path, row: dict[str, Any]) -> None:
    """A file of JSON lines or Parquet, by its name, with one row again and again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row] * ROLLOUT), path)
    else:
        path.write_text((json.dumps(row) + "\n") * ROLLOUT)


def _placed_yaml(words: list[str], file: Path, root: Path) -> str:
    """A copy of a YAML file whose paths are below ``root``, with data where it wants some."""
    if not file.exists():
        return str(file)

    def place(entry: Any) -> Any:
        if isinstance(entry, dict):
            made = {key: place(value) for key, value in entry.items()}
            if isinstance(made.get("path"), str):
                write_rows(_without_slice(made["path"]), _row_of_entry(row_of(words), made))
            return made
        if isinstance(entry, list):
            return [place(each) for each in entry]
        return f"{root}{entry}" if isinstance(entry, str) and entry.startswith("/") else entry

    target = root / f"placed-{file.name}"
    target.write_text(yaml.safe_dump(place(yaml.safe_load(file.read_text(encoding="utf-8")))))
    return str(target)


def _row_of_entry(row: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The row that a data set of an evaluation wants, which may have keys of its own."""
    row = dict(row)
    row.setdefault(entry.get("input_key") or "prompt", next(iter(row.values())))
    row.setdefault(entry.get("label_key") or "label", "2")
    return row | {"metadata": {"instruction_id_list": ["x"]}}
