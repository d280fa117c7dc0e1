"""The run scripts of the examples are bash, and train.py knows the flags that they pass."""

import os
import subprocess
from pathlib import Path

import pytest

from slime.arguments.core.parser import build_parser
from tests.page_runs import printed

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*/run*.sh"))
PAGES = {command.words[1:]: command for command in printed("bash examples/")}
"""Scripts with their flags, as pages give them."""
# Stands for python: notes train.py's flags, has no sglang, and runs nothing else unless it is told by what.
# A program has to be where it is looked for.
FAKE = """#!/bin/sh
case "$1" in
    */train*.py) shift; printf '%s\\0' "$@" >"$NOTE"; exit ;;
esac
case "$1" in
    *.py) [ -f "$1" ] || { echo "$1: not there, in $PWD" >&2; exit 1; } ;;
esac
if [ -n "$SLIME_TEST_PYTHON" ]; then exec "$SLIME_TEST_PYTHON" "$@"; fi
case "$1" in
    -c) case "$2" in *sglang*) exit 1 ;; esac ;;
    -m) case "$2" in *engine*) exec sleep 60 ;; esac ;;
esac
"""


def name(path):
    return path.parent.name


def with_flags(script):
    """The flags that a page gives behind it; others where none does."""
    path = str(script.relative_to(ROOT))
    return next((list(flags) for found, *flags in PAGES if found == path and flags), ["--seed", "7"])


def flags_of(script, tmp_path, *flags, cwd=ROOT, **variables):
    fake, note = tmp_path / "bin/python", tmp_path / "note"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(FAKE)
    fake.chmod(0o755)
    places = {
        "OUTPUT": str(tmp_path / "out"),
        "NOTE": str(note),
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
    }
    env = {key: value for key, value in os.environ.items() if key not in ("MODEL", "DATASETS")}
    command = ["bash", str(script), *flags]
    subprocess.run(command, env=env | places | variables, cwd=cwd, check=True, timeout=600)
    return note.read_text().rstrip("\0").split("\0")


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_without_a_model_a_tiny_one_is_trained(script, tmp_path):
    assert (str(script.relative_to(ROOT)),) in PAGES
    words = flags_of(script, tmp_path, cwd=tmp_path)
    assert words[words.index("--hf-checkpoint") + 1] == str(tmp_path / "out/model")
    assert "--fp32" in words


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_real_model_is_trained_as_it_is(script, tmp_path):
    flags = with_flags(script)
    words = flags_of(
        script,
        tmp_path,
        *flags,
        **dict(MODEL="/models/m", QUESTIONS="/data/q.jsonl", CORPUS="/data/c.jsonl", DATASETS="/data"),
        TEACHER_URL="http://teacher/generate",
    )
    assert words[words.index("--hf-checkpoint") + 1] == "/models/m" and "--fp32" not in words
    assert words[-len(flags) :] == flags
    parser, _ = build_parser("embedded")
    known = {option for action in parser._actions for option in action.option_strings}
    assert [word for word in words if word.startswith("--") and word not in known] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_relative_variables_are_the_callers(script, tmp_path):
    given = {"MODEL": "m", "QUESTIONS": "q.jsonl", "CORPUS": "c.jsonl", "OUTPUT": "results"}
    words = flags_of(script, tmp_path, cwd=tmp_path, **given, TEACHER_URL="http://teacher/generate")
    assert words[words.index("--hf-checkpoint") + 1] == f"{tmp_path}/m"
    assert words[words.index("--save") + 1] == f"{tmp_path}/results/checkpoints"
    if "--prompt-data" in words:
        assert words[words.index("--prompt-data") + 1] == f"{tmp_path}/q.jsonl"
    assert all(Path(word).exists() for word in words if word.startswith(str(ROOT)))


def test_there_are_scripts_and_pages_name_no_others():
    assert len(SCRIPTS) >= 5
    assert {ROOT / path for path, *_ in PAGES} == {*SCRIPTS}
