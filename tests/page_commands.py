"""The commands that pages print: their words, and whether a program would take them."""

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from runpy import run_module, run_path
from unittest.mock import patch

from slime.arguments.core.config_files import required_flags
from slime.arguments.core.errors import UsageError
from slime.arguments.core.mistakes import Mistakes
from slime.arguments.core.parser import read_words
from slime.cli.main import COMMANDS
from slime_plugins.training_service.__main__ import own_parser

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "scripts/README.md"),
    *(page for page in sorted(ROOT.glob("docs/**/*.md")) if page.name != "flags.md"),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("slime/cli/tasks/*/README.md")),
]
PROGRAMS = (
    "slime",
    "python",
    "bash",
    "docker",
    "kubectl",
    "sbatch",
    "sky",
    "ray",
    "hf",
    "pip",
    "jupyter",
    "git",
    "torchrun",
)
SERVICE = "slime_plugins.training_service"
"""A program that takes the flags of a run beside its own."""
SHELL = ("cd", "mkdir", "export", ".", "source")
"""Words of the shell alone."""
NOT_HERE = {
    ("docker",): "there is no Docker here; tests/test_page_stand_ins.py reads what it gets",
    ("git", "tag"): "changes the repository; tests/test_packaging.py tags another",
    ("hf", "download"): "downloads models and data",
    ("jupyter",): "opens a browser; tests/test_page_stand_ins.py, and tests/examples runs the notebook",
    ("kubectl",): "a cluster; tests/test_page_stand_ins.py reads what it gets",
    ("pip", "install"): "installs; tests/test_packaging.py installs the wheel",
    ("python", "-m", "pytest"): "a test run of its own; tests/plugins/test_delays.py tries the plug-in",
    ("python", "-m", "sglang.launch_server"): "SGLang on GPUs; tests/test_page_stand_ins.py reads its flags",
    (
        "python",
        "-m",
        "tests.golden.curves",
    ): "imports both trainers for its --help; tests/golden runs what it does",
    ("python", "-m", "venv"): "makes an environment",
    ("ray",): "executed as printed by tests/ray/test_cluster.py, on two nodes",
    (
        "sbatch",
    ): "a cluster; tests/scripts/test_cluster_files.py runs its file with programs in SLURM's place",
    ("sky",): "clouds; tests/test_page_stand_ins.py reads what it gets",
}
"""Beginnings of commands that cannot be tried on a machine with two cores and no network, and why."""
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(rf"`((?:{'|'.join(PROGRAMS)}) [^`\n]+)`")
_PLACEHOLDERS = ("...", "FLAG")


@dataclass(frozen=True)
class Command:
    """One command of a page, without variables before it.

    Attributes:
        page: below the repository's root.
    """

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"

    def begins(self, *words: str) -> bool:
        return self.words[: len(words)] == words


def blocks(page: Path, language: str = "bash") -> list[str]:
    """The code blocks of a language, without the indentation of a list."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [
        re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        for indent, name, code in found
        if name == language
    ]


def commands_of(page: Path) -> Iterator[Command]:
    """Yields those of its blocks, and those in the text that begin with the name of a program."""
    name = str(page.relative_to(ROOT))
    for code in blocks(page):
        whole = code.replace("\\\n", " ")
        lines = [line.split(" #")[0].rstrip() for line in whole.splitlines()]
        for line in re.sub(r"(?m)(^--.*)\n(?=--)", r"\1 ", "\n".join(lines)).splitlines():
            yield from _commands(name, line)
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for text in _INLINE.findall(prose):
        yield from _commands(name, text)


def _commands(page: str, line: str) -> Iterator[Command]:
    """What a line starts: several commands with && between them, or flags alone, those of ``slime train``."""
    line = re.sub(r"^\((.*)\)", r"\1", line.split(" #")[0].strip()).replace("; ", " && ")
    for part in re.split(r"&&|\|\|?|&$", line):
        words = shlex.split(part, comments=True)
        while words and re.match(r"^[A-Z_]+=", words[0]):
            words.pop(0)
        words = [word for word in words if word not in _PLACEHOLDERS]
        if words and words[0].startswith("--"):
            words = ["slime", "train", *words]
        if words and words[0] != "umask":
            yield Command(page, tuple(words))


def fault(command: Command) -> str | None:
    """What is wrong with it: a program, file or flag that is not there, a value that a flag does not take."""
    program, *rest = command.words
    if program in SHELL or any(command.begins(*words) for words in NOT_HERE):
        return None
    if program == "slime":
        return _fault_of_slime(rest)
    if program == "python":
        return _fault_of_python(rest)
    if program == "torchrun":
        return _fault_of_python(rest[rest.index("-m") :])
    if program == "bash":
        return _fault_of_script(command.page, rest)
    return f"{program}: nobody knows how to try it"


_WITH_PARTS = ("engines", "weights")
"""Commands of ``slime`` whose first word says which part of it is meant, with options of its own."""


def _fault_of_slime(words: list[str]) -> str | None:
    name, *rest = words
    if name in ("train", "check"):
        return _fault_of_flags([word for word in rest if word != "--write-config"])
    if name in ("--help", "--version"):
        return None
    if name not in COMMANDS:
        return f"{name}: no command"
    own, flags = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, [])
    part = own[:1] if name in _WITH_PARTS else []
    return _fault_of_options(own, lambda: _help_of_command(name, *part)) or _fault_of_flags(flags)


def _fault_of_python(words: list[str]) -> str | None:
    path, *rest = words
    if path == "-m":
        module, *rest = rest
        if module == SERVICE:
            return _fault_of_flags(own_parser().parse_known_args(rest)[1])
        found = find_spec(module) is not None
        return _fault_of_options(rest, lambda: _help("-m", module)) if found else f"{module}: no module"
    if not (ROOT / path).is_file():
        return f"{path}: not there"
    if path in ("train.py", "train_async.py"):
        return _fault_of_flags(rest)
    return _fault_of_options(rest, lambda: _help(path))


def _fault_of_script(page: str, words: list[str]) -> str | None:
    path, *rest = words
    if path.startswith("-"):  # bash's own
        return None
    if path == "run.sh" or page.startswith("slime/cli/tasks/"):
        return _fault_of_flags(rest)
    script = ROOT / path
    if not script.is_file():
        return f"{path}: not there"
    if script.name == "ray-cluster.sh":
        return fault(Command(page, tuple(rest[rest.index("--") + 1 :])))
    if script.name == "quickstart.sh":
        return _fault_of_options(rest, lambda: _help("-m", "tools.quickstart"))
    if script.name.startswith("run") and script.suffix == ".sh":
        return _fault_of_flags(rest)
    return _fault_of_options(rest, script.read_text)


def _fault_of_flags(words: list[str]) -> str | None:
    """By the parser of runs itself; a page need not give what every run must have."""
    mistakes = Mistakes()
    mistakes.excuse(required_flags())
    with suppress(UsageError):
        read_words(words, None, mistakes, [])
    return "; ".join(mistakes.messages) or None


def _fault_of_options(words: list[str], known: Callable[[], str]) -> str | None:
    options = [word.partition("=")[0] for word in words if re.match(r"--\w", word)]
    text = known() if options else ""
    unknown = [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)]
    return f"{', '.join(unknown)}: not among its options" if unknown else None


@cache
def _help(*program: str) -> str:
    """What a program of ours says to ``--help``; runs nothing else of it."""
    shown = StringIO()
    with patch("sys.argv", [program[-1], "--help"]), redirect_stdout(shown), redirect_stderr(shown):
        try:
            if program[0] == "-m":
                run_module(program[1], run_name="__main__", alter_sys=False)
            else:
                run_path(str(ROOT / program[0]), run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{program}: {shown.getvalue()}"
        else:
            raise AssertionError(f"{program}: takes no --help")
    return shown.getvalue()


@cache
def _help_of_command(name: str, *part: str) -> str:
    shown = StringIO()
    with redirect_stdout(shown), suppress(SystemExit):
        import_module(COMMANDS[name].module).run([*part, "--help"])
    return shown.getvalue()
