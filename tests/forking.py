"""Processes that start in a fraction of a second: forked from one that has imported what they need.

That one starts at the first call in a test process and serves it to its end. It imports this module too,
which therefore imports little.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

# What ranks, engines and scripts import sooner or later, some of it late: each would spend seconds on it.
_PRELOAD = [
    "tests.forking",
    "tests.megatron_harness",
    "tests.golden.trainer",
    "slime.arguments.registry",
    "slime.backends.embedded_engine.build",
    "slime.backends.embedded_engine.http.app",
    "slime.backends.embedded_engine.row_executor",
    "slime.backends.megatron_utils.worker",
    "slime.ray.train_worker",
    "slime.rollout.data_source",
    "slime.rollout.sglang_rollout",
    "slime.weight_sync.update",
    "torch._dynamo",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.glm4.modeling_glm4",
]


def forking() -> ForkServerContext:
    """The context whose processes are forked from the one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


class ForkedScript:
    """``python SCRIPT WORD...`` or ``python -m MODULE WORD...`` without the imports; used as a ``Popen``.

    Args:
        script: a file, or the name of a module.
        log: gets standard output and, unless ``errors`` does, standard error.
        env: changes of this process's environment.
    """

    def __init__(
        self,
        script: Path | str,
        words: list[str],
        log: Path | str,
        errors: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
    ) -> None:
        environment = {**os.environ, **(env or {})}
        arguments = (script, words, str(log), str(errors or log), environment, cwd)
        self._name = str(script)
        self._process: BaseProcess = forking().Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(self._name, timeout or 0)
        return status

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(
    script: Path | str, words: list[str], log: str, errors: str, env: dict[str, str], cwd: str | None
) -> None:
    for number, path in ((1, log), (2, errors)):
        stream = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # what was preloaded, else each collection goes through all of it
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd or os.getcwd())
    sys.argv = [str(script), *words]
    if isinstance(script, Path):
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
