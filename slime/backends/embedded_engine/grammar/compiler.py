"""Compiled grammars for requests: from the cache, or from the process that compiles."""

import asyncio
import importlib.util
import json
import logging
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.grammar.wanted import Wanted, not_compiled

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)
_KEPT = 256
_SECONDS = 20
_WORKER = "slime.backends.embedded_engine.grammar.worker"


class GrammarCompiler:
    """One grammar after the other, beside the event loop.

    Args:
        tokenizer: the Hugging Face tokenizer.
        vocab_size: number of logits.
        stop_ids: tokens that end a response, allowed where the grammar is complete.
        seconds: of processor time that one grammar may take; SGLang gives up after some 50.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, stop_ids: Iterable[int], seconds: int = _SECONDS
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = sorted(stop_ids)
        self._seconds = seconds
        self._info: xgrammar.TokenizerInfo | None = None
        self._worker: subprocess.Popen[str] | None = None
        self._compiled: OrderedDict[Wanted, xgrammar.CompiledGrammar | str] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def compiled(self, wanted: Wanted) -> "xgrammar.CompiledGrammar":
        """Raises BadRequest if it is no grammar, or takes too long to compile."""
        if wanted not in self._compiled:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, wanted)
        found = self._compiled[wanted]
        self._compiled.move_to_end(wanted)
        if isinstance(found, str):
            raise not_compiled(wanted, found)
        return found

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()

    def _compile(self, wanted: Wanted) -> None:
        if wanted in self._compiled:  # by a request before this one
            return
        if importlib.util.find_spec("xgrammar") is None:
            raise BadRequest(
                "grammars, response_format and forced tool calls need the package xgrammar on the server "
                "(pip install xgrammar)"
            )
        import xgrammar

        if self._info is None:
            self._info = self._read_vocabulary()
        answer = self._ask(wanted)
        found: Any = answer.get("error") or ""
        if "compiled" in answer:
            found = xgrammar.CompiledGrammar.deserialize_json(answer["compiled"], self._info)
        self._compiled[wanted] = found
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)

    def _read_vocabulary(self) -> "xgrammar.TokenizerInfo":
        import xgrammar

        try:
            return xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._stop_ids or None
            )
        except Exception as error:  # it looks into the tokenizer's insides, and raises what it meets there
            raise BadRequest(f"grammars: xgrammar cannot read the tokenizer: {error}") from error

    def _ask(self, wanted: Wanted) -> dict[str, str]:
        assert self._info is not None
        if self._worker is None:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", _WORKER, str(self._seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._send(self._worker, self._info.serialize_json())
        self._send(self._worker, json.dumps([wanted.kind, wanted.text]))
        assert self._worker.stdout is not None
        line = self._worker.stdout.readline()
        if line:
            return json.loads(line)
        status = self._worker.wait()
        self._worker = None
        logger.warning("a %s grammar ended the compiler with status %d", wanted.kind, status)
        return {"error": "it takes too long or too much memory, or is nested too deeply"}

    @staticmethod
    def _send(worker: "subprocess.Popen[str]", line: str) -> None:
        assert worker.stdin is not None
        worker.stdin.write(line + "\n")
        worker.stdin.flush()
