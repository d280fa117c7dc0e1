"""Shells complete what ``slime completion`` tells them."""

import shutil
import subprocess

import pytest

from slime.cli.completion import script
from slime.cli.main import COMMANDS


@pytest.fixture(scope="module")
def bash() -> str:
    return script("bash")


def completed(bash: str, *words: str) -> set[str]:
    line = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _slime; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash"], input=f"{bash}\n{ask}\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_flags_and_forms(bash) -> None:
    assert completed(bash, "slime", "") == set(COMMANDS)
    assert completed(bash, "slime", "do") == {"doctor"}
    assert completed(bash, "slime", "train", "--rollout-batch-s") == {"--rollout-batch-size"}
    assert completed(bash, "slime", "resume", "outputs/run", "--num-rol") == {"--num-rollout"}
    assert completed(bash, "slime", "new-task", "t", "--form", "s") == {"single-turn", "sft"}
    assert completed(bash, "slime", "chat", "--rollout-batch-s") == set(), "not a command that takes them"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_theirs(shell) -> None:
    text = script(shell)
    assert "rollout-batch-size" in text and "new-task" in text
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=text, text=True, timeout=60).returncode == 0
