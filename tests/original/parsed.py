"""``python -m tests.original.parsed FILE``: what refuses a command line, in a process of its own.

The command line and what can be imported come as JSON from a file (`Question`). The original's examples stand
before ours on the import path, and what they import that is not installed is a stand-in.
"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.arguments.launch_reasons import reasons
from tests.arguments.sglang_options import as_installed
from tests.forking import ForkedScript

TIMEOUT_S = 300


@dataclass(frozen=True)
class Question:
    """What is asked about a command line.

    Attributes:
        import_path: directories before ours.
        stand_ins: packages that are there by name alone.
        helpers: by module, the files that the original has in its package for its tests.
    """

    words: list[str]
    import_path: list[str]
    stand_ins: list[str] = field(default_factory=list)
    helpers: dict[str, str] = field(default_factory=dict)


class Helpers(MetaPathFinder):
    """Modules of these names, each from its file."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return spec_from_file_location(fullname, file) if file else None


class StandIns(MetaPathFinder, Loader):
    """Packages of these names and all below them, whose every attribute is a class that takes anything."""

    def __init__(self, names: list[str]) -> None:
        self._names = set(names)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        mine = fullname.partition(".")[0] in self._names
        return ModuleSpec(fullname, self, is_package=True) if mine else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = lambda name: _stand_in(name)
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def _stand_in(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def answer(module: str, question: Question, words: list[str], directory: Path) -> Any:
    """What a module of this folder tells about a question, in a forked process with this directory."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "question.json", Path(folder) / "log"
        file.write_text(json.dumps(asdict(question)))
        process = ForkedScript(module, [str(file), *words], log, cwd=directory)
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        told = log.read_text(errors="replace")
    if status:
        raise RuntimeError(f"{module} ended with status {status}:\n{told[-3000:]}")
    return json.loads(told.splitlines()[-1])


def refusals(question: Question, directory: Path) -> list[str]:
    """What refuses it, with SGLang's options of the recorded version."""
    found: list[str] = answer("tests.original.parsed", question, [], directory)
    return found


def asked() -> Question:
    """The question of this process."""
    return Question(**json.loads(Path(sys.argv[1]).read_text()))


def prepare(question: Question) -> None:
    """Lets the original's modules be found, from here on."""
    sys.path[:0] = question.import_path
    sys.meta_path += [Helpers(question.helpers), StandIns(question.stand_ins)]
    for name, module in sys.modules.items():
        if name.partition(".")[0] in question.stand_ins and not hasattr(module, "__path__"):
            module.__path__ = []  # of what as_installed put there, so that parts of it are looked for


def main() -> None:
    question = asked()
    with pytest.MonkeyPatch.context() as patch:
        as_installed(patch)
        prepare(question)
        told = json.dumps(reasons([*question.words, "--rollout-engine", "sglang"]))
    print(f"\n{told}", flush=True)


if __name__ == "__main__":
    main()
