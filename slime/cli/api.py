"""Runs from Python, as ``slime train`` starts them: in a process of their own, with what they say shown here.

from slime import RunConfig, train

run = train(RunConfig("run.yaml", lr=1e-4))
rewards = [row["rollout/raw_reward"] for row in run.metrics()["rollout"].values()]
"""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_FLAGS = "flags.yaml"
_END_S = 60.0
"""A run that is told to end does so within ten seconds, by itself."""


class RunFailed(RuntimeError):
    """A run has ended with an error, which is the message.

    Attributes:
        status: the exit status; 2 for flags that cannot be used.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RunConfig:
    """Flags by name, and files of flags; what is given by name wins.

    Args:
        files: as for ``--config``; later ones win.
        flags: any flag, as ``lr=4e-4`` or ``eval_prompt_data=["held_out", "eval.jsonl"]``.
    """

    def __init__(self, *files: str | Path, **flags: Any) -> None:
        self.files = tuple(map(str, files))
        self.flags = {name: _plain(value) for name, value in flags.items()}

    def __repr__(self) -> str:
        return f"RunConfig({', '.join(map(repr, self.files))}; {', '.join(self.flags)})"


def _plain(value: Any) -> Any:
    """A value that YAML can hold: paths become text, tuples lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value


@dataclass(frozen=True)
class Run:
    """A run that has ended well.

    Attributes:
        directory: the run's, if it has one.
    """

    directory: Path | None

    def metrics(self) -> dict[str, dict[int, dict[str, Any]]]:
        """The metrics of each step of each axis: "rollout", "train" and "eval".

        Raises:
            ValueError: the run had no directory.
        """
        from slime.cli.run_dir import metrics_file, read_record
        from slime.observability.jsonl import read_metrics

        if self.directory is None:
            raise ValueError("the run had no directory (wanted: run_dir or save)")
        place = str(self.directory)
        return read_metrics(metrics_file(place, read_record(place)))


def train(config: RunConfig) -> Run:
    """Runs to the end; an interruption ends the run too.

    Raises:
        RunFailed: with the run's last line.
    """
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / _FLAGS  # in a file, since others see a command line, and flags may be secrets
        path.write_text(yaml.safe_dump(config.flags, sort_keys=False), encoding="utf-8")
        words = [f"--config={file}" for file in (*config.files, path)]
        _run([sys.executable, "-m", "slime.cli", "train", *words])
        return Run(_directory(words))


def _directory(words: list[str]) -> Path | None:
    from slime.arguments.core.config_files import expand

    given = dict(word.split("=", 1) for word in expand(words).words if "=" in word)
    directory = given.get("--run-dir") or given.get("--save")
    return Path(directory) if directory else None


def _run(command: list[str]) -> None:
    last = ""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if status := process.wait():
        raise RunFailed(last.removeprefix("error: ") or f"exit status {status}", status)
