"""SGLang's parser without SGLang: every option of sglang_options.txt, none of its checks."""

import argparse
import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECORD = Path(__file__).with_suffix(".txt")
_TYPES: dict[str, Any] = {"int": int, "float": float, "json": json.loads}
_TYPE_NAMES = {
    **{"int": "int", "human_readable_int": "int", "float": "float"},
    **{"loads": "json", "json_list_type": "json"},
}


class Adapters(argparse.Action):
    """Paths, each as text or as a JSON object."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [json.loads(v) if v.startswith("{") else v for v in values])


class Constant(argparse.Action):
    """Stores the same, whatever the value."""

    def __init__(self, *args: Any, stored: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.const_value = stored

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, self.const_value)


_KEYWORDS: dict[str, dict[str, Any]] = {
    "switch": {"action": "store_true"},
    "pair": {"action": argparse.BooleanOptionalAction},
    "value": {},
    "values": {"nargs": "+"},
    "maybe": {"nargs": "?", "const": ""},
    "adapters": {"nargs": "*", "action": Adapters},
    "constant": {"action": Constant},
}


def recorded_lines() -> list[str]:
    return [line for line in RECORD.read_text(encoding="utf-8").splitlines() if line.startswith("--")]


def server_options() -> dict[str, str]:
    """By names that are joined by commas, how many values follow."""
    return dict(line.split(" ", 2)[:2] for line in recorded_lines())


def _keywords(line: str) -> tuple[list[str], dict[str, Any]]:
    names, kind, *more = line.split(" ", 2)
    keywords = {**_KEYWORDS[kind], **(json.loads(more[0]) if more else {})}
    if "type" in keywords:
        keywords["type"] = _TYPES[keywords["type"]]
    if kind == "constant":
        keywords["stored"] = keywords.pop("const")
    return names.split(","), keywords


class ServerArgs:
    """Stands for ``sglang.srt.server_args.ServerArgs``."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for line in recorded_lines():
            names, keywords = _keywords(line)
            parser.add_argument(*names, **keywords)


def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``import sglang.srt.server_args`` find it."""
    for name in ("sglang", "sglang.srt", "sglang.srt.server_args"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module)["ServerArgs"] = ServerArgs
        monkeypatch.setitem(sys.modules, name, module)


def record(parser: argparse.ArgumentParser) -> list[str]:
    """The lines of sglang_options.txt for the parser of an SGLang that is installed."""
    return sorted(_recorded(action) for action in parser._actions)


def _recorded(action: argparse.Action) -> str:
    names = [name for name in action.option_strings if name.startswith("--")]
    kind = _kind(action)
    if kind == "pair":
        names = [name for name in names if not name.startswith("--no-")]
    more = json.dumps(dict(_more(action, names[0], kind)))
    return " ".join([",".join(names), kind, *([more] if more != "{}" else [])])


def _kind(action: argparse.Action) -> str:
    kinds = {"BooleanOptionalAction": "pair", "LoRAPathAction": "adapters"}
    kinds["DeprecatedStoreConstAction"] = "constant"
    by_values = {0: "switch", "+": "values", "*": "values", "?": "maybe"}
    nargs: Any = action.nargs
    return kinds.get(type(action).__name__) or by_values.get(nargs, "value")


def _more(action: argparse.Action, name: str, kind: str) -> Iterator[tuple[str, Any]]:
    if action.dest != name.removeprefix("--").replace("-", "_"):
        yield "dest", action.dest
    if known := _TYPE_NAMES.get(getattr(action.type, "__name__", "")):
        yield "type", known
    if action.default is not None and not (kind == "switch" and action.default is False):
        yield "default", action.default
    if action.choices is not None:
        yield "choices", sorted(action.choices)  # some come from a set
    if kind == "constant":
        yield "const", vars(action)["const_value"]
