"""``slime``: which command is meant, and how little it imports to say so."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from slime.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "megatron", "sglang", "transformers", "numpy", "yaml")


def loaded_by(*words: str) -> tuple[str, str]:
    """What ``slime WORD ...`` prints on standard error, and which heavy packages it has imported."""
    code = f"""
import sys
from slime.cli.main import main
try:
    status = main({list(words)!r})
except SystemExit as ending:
    status = ending.code
print(status, [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    return done.stderr, done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), (["--version"], 0), (["trian"], 2)])
def test_it_answers_without_the_libraries_of_a_run(words, status) -> None:
    assert loaded_by(*words)[1] == f"{status} []"


def test_a_wrong_flag_and_a_wrong_file_are_answered_without_them_too(tmp_path) -> None:
    """Within a second on an idle machine; half of it is Python's start and this package's flags."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "optimizer:\n  lr: fast\n  rollout_batch_sise: 4\nfp32: 3\noptimiser:\n  lr: 1\nseed: 1\nseed: 2\n"
    )
    lines = [f"{path}:{line}: " for line in (2, 3, 4, 5, 8)]
    for words, told in (
        (["train", "--rollout-batch-sise", "4"], ["--rollout-batch-sise: unknown flag"]),
        (["train", "--config", str(path)], lines),
    ):
        before = os.times()
        shown, loaded = loaded_by(*words)
        after = os.times()
        assert [part for part in told if part not in shown] == []
        assert loaded.startswith("2 ")
        assert [name for name in ("torch", "ray", "sglang", "transformers") if f"'{name}'" in loaded] == []
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        assert spent < 3, "seconds of a processor, of which a busy machine takes more"


def test_the_page_names_every_command(capsys) -> None:
    assert main([]) == 0
    page = capsys.readouterr().out
    assert all(f"slime {name} " in page and command.about in page for name, command in COMMANDS.items())


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("trian", "error: 'trian' is not a command (did you mean train?)"),
        ("xyzzy", "error: 'xyzzy' is not a command (wanted: train, "),
        ("--lr", "error: --lr: flags come after a command (wanted: slime train --lr ...)"),
    ],
)
def test_another_word_is_refused_by_name(word, answer, capsys) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err.startswith(answer)


def test_every_command_can_be_run() -> None:
    assert [
        name for name, command in COMMANDS.items() if not callable(import_module(command.module).run)
    ] == []


def test_the_package_installs_the_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["slime"].partition(":")
    assert getattr(import_module(module), function) is main
