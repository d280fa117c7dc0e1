"""Runs launchers with fakes of what they launch, and records the command lines of their trainings.

A script of bash finds nothing on PATH but fakes and a few programs that only read. What it calls beyond that
is noted and does nothing, ``pkill``, ``rm`` and ``pip`` among it.
"""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from slime.utils.external_utils.command_utils import model_args
from tests.forking import ForkedScript
from tests.original.repository import model_of_script

TIMEOUT_S = 120
_REAL = (
    *("awk", "basename", "bash", "cat", "cut", "date", "dirname", "env", "false", "grep", "head", "id", "ls"),
    *("mkdir", "mktemp", "nproc", "printf", "pwd", "readlink", "realpath", "sed", "seq", "sort", "tee", "tr"),
    *("true", "uname", "uniq", "wc", "xargs"),
)
# Which exec, nohup, xargs and the like find; anything else is found by the shell itself, see _PRELUDE.
_FAKE = (
    *(
        "curl",
        "docker",
        "git",
        "hf",
        "hostname",
        "huggingface-cli",
        "ip",
        "kill",
        "nohup",
        "nvidia-smi",
        "pip",
    ),
    *(
        "pkill",
        "python",
        "python3",
        "ray",
        "rm",
        "rsync",
        "sleep",
        "ssh",
        "tail",
        "timeout",
        "torchrun",
        "wget",
    ),
)
_NOTE = """#!/bin/bash
{ printf '%s\\0' "$(($# + 1))" "${0##*/}" "$@"; } >>"$SLIME_RECORD"
[[ "${0##*/}" != hostname ]] || echo 127.0.0.1
"""
_PRELUDE = """command_not_found_handle() { printf '%s\\0' "$#" "$@" >>"$SLIME_RECORD"; }
kill() { :; }
cd() { builtin cd "$@" 2>/dev/null || true; }
"""


@dataclass(frozen=True)
class Launch:
    """A training that a launcher starts.

    Attributes:
        words: the flags after ``train.py`` or ``train_async.py``.
        model: what ``scripts/models`` calls the model whose flags are among them.
        import_path: the directories that the launcher puts on PYTHONPATH.
    """

    words: list[str]
    model: str | None
    import_path: list[str]


class LauncherFailed(Exception):
    """A launcher ended without starting a training; the text has its last lines."""


def of_bash(repository: Path, script: str, scratch: Path) -> list[Launch]:
    """The trainings that a script starts.

    Args:
        scratch: an empty directory for its fakes, its home and its record.

    Raises:
        LauncherFailed: it starts none.
    """
    record, fakes = scratch / "record", scratch / "bin"
    _write_fakes(fakes)
    (scratch / "prelude.sh").write_text(_PRELUDE)
    record.touch()
    env = {"PATH": str(fakes), "BASH_ENV": str(scratch / "prelude.sh"), "SLIME_RECORD": str(record)}
    env |= {"HOME": str(scratch), "MASTER_ADDR": "127.0.0.1"}
    env |= dict.fromkeys(("BASE_DIR", "BASE_FOLDER"), "/root")
    path = repository / script
    done = subprocess.run(
        ["bash", str(path)],
        **{"cwd": repository, "env": env, "timeout": TIMEOUT_S, "stdin": subprocess.DEVNULL},
        **{"capture_output": True, "text": True, "errors": "replace"},
    )
    model = model_of_script(repository, script)
    calls = [_training(call) for call in _calls(record)]
    launches = [Launch(words, model, [*paths, str(path.parent)]) for words, paths in filter(None, calls)]
    if not launches:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise LauncherFailed(f"{script}: status {done.returncode}, starts no training:\n{last}")
    return launches


def _write_fakes(fakes: Path) -> None:
    fakes.mkdir(parents=True)
    for name in _REAL:
        if real := shutil.which(name):
            (fakes / name).symlink_to(real)
    for name in _FAKE:
        (fakes / name).write_text(_NOTE)
        (fakes / name).chmod(0o755)


def _calls(record: Path) -> list[list[str]]:
    """The words of each call, in order: a number in the record says how many words follow."""
    words = record.read_text(encoding="utf-8", errors="replace").split("\0")
    calls, place = [], 0
    while place < len(words) - 1:
        count = int(words[place])
        calls.append(words[place + 1 : place + 1 + count])
        place += 1 + count
    return calls


def _training(call: list[str]) -> tuple[list[str], list[str]] | None:
    """The flags of a training and its PYTHONPATH, if this is a call that starts one."""
    for place, word in enumerate(call):
        if re.search(r"(^|/)train(_async)?\.py$", word):
            return call[place + 1 :], _import_path(call[:place])
    return None


def _import_path(before: list[str]) -> list[str]:
    """The PYTHONPATH that ``ray job submit --runtime-env-json {...}`` or ``env`` sets."""
    text = " ".join(before)
    found = re.search(r'"PYTHONPATH"\s*:\s*"([^"]*)"', text) or re.search(r"PYTHONPATH=(\S+)", text)
    return [path for path in found[1].split(":") if path] if found else []


def of_python(repository: Path, script: str, scratch: Path) -> list[Launch]:
    """The trainings that a launcher in Python starts, run as a script in a process of its own.

    Raises:
        LauncherFailed: it starts none.
    """
    record, log = scratch / "launches.json", scratch / "log"
    env = {"SLIME_RECORD": str(record), "HOME": str(scratch)}
    words = [str(repository / script)]
    process = ForkedScript("tests.original.python_launcher", words, log, env=env, cwd=repository)
    try:
        status = process.wait(TIMEOUT_S)
    finally:
        process.kill()
    noted = json.loads(record.read_text()) if record.exists() else []
    if status or not noted:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        raise LauncherFailed(f"{script}: status {status}, {len(noted)} trainings:\n{last}")
    folder = str((repository / script).parent)
    return [Launch([*model_args(each["model"]), *each["words"]], each["model"], [folder]) for each in noted]
