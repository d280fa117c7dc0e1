"""SGLang's parser without SGLang: every option of sglang_options.txt, none of its checks."""

import argparse
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_KEYWORDS: dict[str, dict[str, Any]] = {
    "switch": {"action": "store_true"},
    "pair": {"action": argparse.BooleanOptionalAction},
    "value": {},
    "values": {"nargs": "+"},
    "maybe": {"nargs": "?"},
}


def server_options() -> dict[str, str]:
    """By names that are joined by commas, how many values follow."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if line.startswith("--"))


class ServerArgs:
    """Stands for ``sglang.srt.server_args.ServerArgs``."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for names, kind in server_options().items():
            parser.add_argument(*names.split(","), **_KEYWORDS[kind])


def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``import sglang.srt.server_args`` find it."""
    for name in ("sglang", "sglang.srt", "sglang.srt.server_args"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module)["ServerArgs"] = ServerArgs
        monkeypatch.setitem(sys.modules, name, module)
