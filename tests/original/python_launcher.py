"""``python -m tests.original.python_launcher FILE``: a launcher in Python that launches nothing.

Writes the trainings that it would start to the file that SLIME_RECORD names.
"""

import json
import os
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slime.utils.external_utils import command_utils

_noted: list[dict[str, Any]] = []


def _note_training(
    train_args: str, num_gpus_per_node: int, megatron_model_type: str | None, *_: Any, **__: Any
) -> None:
    words = shlex.split(train_args)
    if not any(word.split("=")[0] == "--num-gpus-per-node" for word in words):
        words += ["--num-gpus-per-node", str(num_gpus_per_node)]
    _noted.append({"words": words, "model": megatron_model_type})
    Path(os.environ["SLIME_RECORD"]).write_text(json.dumps(_noted))


def _nothing(*_: Any, **__: Any) -> str:
    return ""


def _success(*_: Any, **__: Any) -> int:
    return 0


class _NoProcess:
    """Stands for a process that has ended well."""

    pid, returncode, stdout, stderr = 0, 0, "", ""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def main() -> None:
    launcher = sys.argv[1]
    for name in (
        "exec_command",
        "convert_checkpoint",
        "hf_download_dataset",
        "rsync_simple",
        "fp8_cast_bf16",
    ):
        setattr(command_utils, name, _nothing)
    vars(command_utils)["execute_train"] = _note_training
    vars(subprocess)["Popen"] = _NoProcess
    vars(subprocess).update(run=_NoProcess, call=_success, check_call=_success, check_output=_nothing)
    vars(os)["system"] = _success
    vars(time)["sleep"] = _nothing
    sys.argv = [launcher]
    sys.path.insert(0, str(Path(launcher).parent))
    runpy.run_path(launcher, run_name="__main__")


if __name__ == "__main__":
    main()
