"""``slime new-task``: writes a task that learns on this machine at once, to be changed into another one."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
FORMS = {
    "multi-turn": "an environment of several turns with a tool, and a reward with partial credit",
    "single-turn": "one answer, and a verifier with partial credit",
}
_GENERATE = {"multi-turn": "custom_generate_function_path: task.generate", "single-turn": ""}
_EXECUTABLE = 0o755


def run(words: Sequence[str]) -> int:
    """Writes the files, and says what to do next."""
    parser = argparse.ArgumentParser("slime new-task", description=__doc__, allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="a new directory, or an empty one")
    forms = "; ".join(f"{form}: {about}" for form, about in FORMS.items())
    parser.add_argument("--form", choices=FORMS, default="multi-turn", help=forms)
    args = parser.parse_args(words)
    try:
        write_task(args.directory, args.form)
    except OSError as error:
        print(f"error: {error.filename or args.directory}: {error.strerror or error}", file=sys.stderr)
        return 2
    where = shlex.quote(str(args.directory))
    print(
        f"{args.directory}: {FORMS[args.form]}\n\n  cd {where} && bash run.sh\n\nREADME.md goes on from it."
    )
    return 0


def write_task(directory: Path, form: str) -> None:
    """Writes all files of a form.

    Raises:
        OSError: the directory holds something, or cannot be written to.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(None, "is not empty (wanted: a new directory)", str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files_of(form):
        path = directory / name
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(_EXECUTABLE)


def files_of(form: str) -> Iterator[tuple[str, str]]:
    """Name and content of each file of a form: those of all forms, then its own."""
    for folder in ("shared", form.replace("-", "_")):
        for source in sorted((TASKS / folder).iterdir()):
            if source.is_file():
                yield source.name, _filled(source.read_text(encoding="utf-8"), form)


def _filled(text: str, form: str) -> str:
    """The text of a file of all forms, with what differs; a line that a form needs not is left out."""
    if not (value := _GENERATE[form]):
        return "\n".join(line for line in text.split("\n") if "@GENERATE@" not in line)
    return text.replace("@GENERATE@", value)
