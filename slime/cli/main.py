"""``slime COMMAND ...``: finds the command, and imports nothing that another one needs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Command:
    """A word after ``slime``.

    Attributes:
        module: has ``run(words)``, which returns the exit status.
        operands: what stands behind the command, for the page of ``--help``.
    """

    module: str
    operands: str
    about: str


COMMANDS = {
    "train": Command("slime.cli.train", "[--async] FLAG ...", "start a run, as train.py does"),
    "check": Command("slime.cli.check", "[--async] FLAG ...", "what a run would need, without starting it"),
    "new-task": Command("slime.cli.new_task", "DIR [--form FORM]", "write a task that learns here at once"),
    "report": Command("slime.cli.report", "RUN_DIR", "curves of a run in the terminal"),
    "dashboard": Command(
        "slime.cli.dashboard", "RUN_DIR ... [--port N]", "what runs do and did, in a browser"
    ),
    "engines": Command(
        "slime.cli.engines", "list | drain | add RUN_DIR ...", "engines of a run that goes on"
    ),
    "weights": Command(
        "slime.cli.weights", "follow DIR | URL --engine URL ...", "bring versions to an engine of others"
    ),
    "resume": Command("slime.cli.resume", "RUN_DIR [FLAG ...]", "go on from a run's latest checkpoint"),
    "chaos": Command(
        "slime.cli.chaos", "DIR [--faults N] -- FLAG ...", "disturb a run, and see whether it heals"
    ),
    "diff": Command("slime.cli.diff", "RUN_DIR RUN_DIR", "the flags in which two runs differ"),
    "chat": Command("slime.cli.chat", "URL | MODEL_DIR", "talk to a model in the terminal"),
    "completion": Command(
        "slime.cli.completion", "bash | zsh | fish", "the script by which a shell completes"
    ),
    "doctor": Command("slime.cli.doctor", "[--json]", "this machine, and what it lacks for a run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status is the process's."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(page())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"slime {_version()}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        print(f"error: {_why_unknown(name)}", file=sys.stderr)
        return 2
    try:
        status: int = import_module(COMMANDS[name].module).run(rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read it has seen enough, as `head` has
        sys.stderr.close()
        return 141
    return status


def page() -> str:
    """The page of ``slime --help``."""
    calls = {f"{name} {command.operands}".strip(): command.about for name, command in COMMANDS.items()}
    width = max(map(len, calls))
    lines = [f"  slime {call:<{width}}  {about}" for call, about in calls.items()]
    return "\n".join(
        [
            "RL post-training of language models: Ray places, Megatron-core trains, SGLang generates.",
            "",
            *lines,
            "",
            "slime train --help lists every flag; slime COMMAND --help says more of the others.",
        ]
    )


def _version() -> str:
    try:
        return version("slime")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return "(not installed)"


def _why_unknown(name: str) -> str:
    meant = get_close_matches(name, COMMANDS, n=1)
    if name.startswith("--"):
        return f"{name}: flags come after a command (wanted: slime train {name} ...)"
    if meant:
        return f"{name!r} is not a command (did you mean {meant[0]}?)"
    return f"{name!r} is not a command (wanted: {', '.join(COMMANDS)})"
