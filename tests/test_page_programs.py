"""Commands of pages that start others' programs, as printed, where no network is needed."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.each import hold_each
from tests.page_commands import Command
from tests.page_runs import printed
from tests.wheel import Source

pytestmark = pytest.mark.slow
HANGS = 600
PIP = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_CONFIG_FILE": os.devnull}


def start(command: Command, cwd: Path, **environment: str) -> str:
    """Standard output of it, by the interpreter that this runs in."""
    program, *words = command.words
    path = [sys.executable, *([] if program == "python" else ["-m", program]), *words]
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PIP_"))}
    done = subprocess.run(
        path, cwd=cwd, env=ours | environment, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_what_pages_install_beside_us_is_what_we_are_tested_with(tmp_path: Path) -> None:
    def check(command: Command) -> None:
        said = start(command, tmp_path, **PIP)
        lines = said.splitlines()
        assert lines and all(line.startswith("Requirement already satisfied: ") for line in lines), said

    others = printed("pip install pytest"), printed("pip install openai>=3,<4")
    hold_each([*chain(*others), *printed("pip install --no-deps xgrammar")], check, least=3)


def test_the_repository_can_be_installed_as_printed(tmp_path: Path) -> None:
    """From a copy and into a directory of its own, without the packages of others."""
    command = min(printed("pip install ."), key=lambda command: len(command.words))
    source = Source.copied_to(tmp_path / "copy").directory
    ours = {"PIP_NO_DEPS": "1", "PIP_NO_COMPILE": "1", "PIP_TARGET": str(tmp_path / "site")}
    start(command, source, **PIP, **ours, PIP_NO_BUILD_ISOLATION="0")  # which is how pip says: none
    code = Command("", ("python", "-c", "import slime.cli; print(slime.__file__)"))
    place = start(code, tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert place.startswith(str(tmp_path / "site")) and (tmp_path / "site/bin/slime").is_file()


def test_an_environment_is_made_as_printed(tmp_path: Path) -> None:
    (command,) = printed("python -m venv")
    start(command, tmp_path)
    script = f". {command.words[-1]}/bin/activate && command -v pip"
    found = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS
    )
    assert found.stdout.strip() == str(tmp_path / command.words[-1] / "bin/pip")


def test_downloads_are_words_that_the_hub_takes(tmp_path: Path) -> None:
    """Offline it returns what is in the directory."""
    from click.testing import CliRunner
    from huggingface_hub.cli.hf import app

    def check(command: Command) -> None:
        words = list(command.words[1:])
        place = tmp_path / words[words.index("--local-dir") + 1].removeprefix("/")
        words[words.index("--local-dir") + 1] = str(place)
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
        with patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and str(place) in done.output, done.output

    hold_each(printed("hf download"), check, least=4)


def test_a_test_is_delayed_as_printed(tmp_path: Path) -> None:
    (command,) = printed("python -m pytest -p tests.plugins.delays")
    test = tmp_path / "test_it.py"
    test.write_text("def test_one_and_one():\n    assert 1 + 1 == 2\n")
    here = {"SEED": "1", "TEST": str(test)}
    words = tuple(here.get(word, word) for word in command.words)
    root = Path(__file__).parents[1]
    said = start(Command("", words), tmp_path, PYTHONPATH=str(root))
    assert "1 passed" in said
