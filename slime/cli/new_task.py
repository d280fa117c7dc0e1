"""``slime new-task``: writes a task that learns on this machine at once, to be changed into another one."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class Form:
    """A kind of task.

    Attributes:
        folders: of ``TASKS``; a file of a later one takes the place of an earlier one's.
        words: what stands in the place of ``@NAME@`` in its files.
        first: a command to give before its script.
    """

    about: str
    folders: tuple[str, ...]
    words: Mapping[str, str] = field(default_factory=dict)
    first: str = ""


_REWARD = "custom_rm_path: task.reward"
_GENERATE = "custom_generate_function_path: task.generate"
_PRACTICE = {"TEMPLATE": "true", "LENGTH": "16"}
FORMS = {
    "multi-turn": Form(
        "an environment of several turns with a tool, and a reward with partial credit",
        ("shared", "multi_turn"),
        {**_PRACTICE, "FUNCTIONS": f"{_GENERATE}\n  {_REWARD}"},
    ),
    "single-turn": Form(
        "one answer, and a verifier with partial credit",
        ("shared", "single_turn"),
        {**_PRACTICE, "FUNCTIONS": _REWARD},
    ),
    "environment": Form(
        "an environment that the model plays, and its rewards",
        ("shared", "environment"),
        {"TEMPLATE": "false", "LENGTH": "16", "FUNCTIONS": _GENERATE},
    ),
    "agent": Form(
        "an agent with a tool that knows only OpenAI's client",
        ("shared", "agent"),
        {"TEMPLATE": "false", "LENGTH": "64", "FUNCTIONS": _GENERATE},
        first="pip install 'openai>=3,<4' && ",
    ),
    "distillation": Form(
        "a student learns from a teacher's log-probs of its own answers",
        ("shared", "single_turn", "distillation"),
        {**_PRACTICE, "FUNCTIONS": f"{_REWARD}\n  custom_reward_post_process_path: task.measured_only"},
    ),
    "sft": Form("imitation of conversations, judged by a verifier", ("single_turn", "sft")),
}
_EXECUTABLE = 0o755


def run(words: Sequence[str]) -> int:
    """Writes the files, and says what to do next."""
    parser = argparse.ArgumentParser("slime new-task", description=__doc__, allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="a new directory, or an empty one")
    forms = "; ".join(f"{name}: {form.about}" for name, form in FORMS.items())
    parser.add_argument("--form", choices=FORMS, default="multi-turn", help=forms)
    args = parser.parse_args(words)
    try:
        write_task(args.directory, args.form)
    except OSError as error:
        print(f"error: {error.filename or args.directory}: {error.strerror or error}", file=sys.stderr)
        return 2
    where = shlex.quote(str(args.directory))
    form = FORMS[args.form]
    print(f"{args.directory}: {form.about}\n\n  cd {where} && {form.first}bash run.sh\n")
    print("README.md goes on from it.")
    return 0


def write_task(directory: Path, form: str) -> None:
    """Writes all files of a form.

    Raises:
        OSError: the directory holds something, or cannot be written to.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(None, "is not empty (wanted: a new directory)", str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files_of(FORMS[form]).items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(_EXECUTABLE)


def files_of(form: Form) -> dict[str, str]:
    """Content of each file of a form, by its name."""
    sources = {file.name: file for folder in form.folders for file in sorted((TASKS / folder).iterdir())}
    return {name: _filled(file, form) for name, file in sources.items() if file.is_file()}


def _filled(source: Path, form: Form) -> str:
    text = source.read_text(encoding="utf-8")
    for name, word in form.words.items():
        text = text.replace(f"@{name}@", word)
    return text
