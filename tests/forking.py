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
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

# What ranks, engines and scripts import sooner or later, some of it late: each would spend seconds on it.
_PRELOAD = [
    "tests.collector.off",  # looking for garbage takes a fifth of the time of imports, which make little
    "tests.forking",
    "tests.megatron_harness",
    "tests.golden.trainer",
    "megatron.core.dist_checkpointing.strategies.torch",
    "httpcore",
    "multiprocessing.managers",
    "pytest",  # by the modules whose functions are called
    "sglang_router.router_args",
    "slime.arguments.model_only",
    "slime.arguments.core.parser",
    "slime.arguments.registry",
    "slime.backends.embedded_engine.build",
    "slime.backends.embedded_engine.http.app",
    "slime.backends.embedded_engine.row_executor",
    "slime.backends.fsdp_utils.value_head",
    "slime.backends.fsdp_utils.worker",
    "slime.backends.megatron_utils.convert",
    "slime.backends.megatron_utils.latent_attention",
    "slime.backends.megatron_utils.layer_spec",
    "slime.backends.megatron_utils.worker",
    "slime.ray.train_worker",
    "slime.rollout.data_source",
    "slime.rollout.sglang_rollout",
    "slime.training.estimators.grpo",
    "slime.training.estimators.ppo",
    "slime.weight_sync.update",
    "tests.engines.forked",
    "tests.families",
    "tests.first_calls",
    "tests.trainer_batches",
    "torch._dynamo",
    "torch.utils.serialization.config",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.glm4.modeling_glm4",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "uvicorn.lifespan.on",
    "uvicorn.logging",
    "uvicorn.main",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
    "tests.collector.on",
]


@cache
def forking() -> ForkServerContext:
    """The context whose processes are forked from the one that has imported everything.

    Returns when that one can fork, so that a port which is chosen then is listened on at once, and not after
    seconds in which somebody else may take it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    first = context.Process(target=int)
    first.start()
    first.join()
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

    @property
    def returncode(self) -> int | None:
        return self.poll()

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


class ForkedPythons:
    """What a module uses of ``subprocess``, for its own Python processes: forked, and used as those.

    Args:
        log: gets what they print.
    """

    def __init__(self, log: Path | str) -> None:
        self._log = log

    def Popen(
        self,
        command: Sequence[Path | str],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ForkedScript:
        python, first, *words = map(str, command)
        assert python == sys.executable, command
        script = words.pop(0) if first == "-m" else Path(first)
        return ForkedScript(script, words, self._log, env=env, cwd=cwd)

    def run(
        self,
        command: Sequence[Path | str],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ForkedScript:
        process = self.Popen(command, cwd, env)
        process.wait()
        return process


def _run(
    script: Path | str, words: list[str], log: str, errors: str, env: dict[str, str], cwd: str | None
) -> None:
    for number, path in ((1, log), (2, errors)):
        stream = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # has its own
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
