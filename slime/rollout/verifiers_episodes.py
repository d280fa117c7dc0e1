"""Generate functions that train in an environment of the library ``verifiers``.

generate = VerifiersEpisodes("gsm8k")     # --custom-generate-function-path my_task.generate
"""

import asyncio
import itertools
import json
import logging
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.agent.parsing import check_parsers
from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.environments.verifiers_host import INPUT
from slime.rollout.base_types import GradingFailed, RolloutError, name_samples
from slime.rollout.conversation import without_answer
from slime.rollout.environment_hosts import SerialThread
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import get_model_url
from slime.rollout.ungraded import mark_ungraded
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

LIMIT_S = 1800.0
_CANCEL_S = 10.0


class EpisodeFailed(GradingFailed):
    """An episode came to no end that says what it is worth."""


class VerifiersEpisodes:
    """A generate function: the environment plays by itself, and the run's engines are its model.

    It runs in a process of its own and asks an `OpenAIAdapter`, so that what is trained on are the tokens
    that were sampled, in as many samples as the conversation has branches. The rubric's reward is theirs, its
    metrics are in their metadata. ``max_new_tokens`` holds for a turn, ``--rollout-max-context-len`` (in an
    evaluation ``--eval-max-context-len``) for the whole episode.

    An episode that fails is of unknown worth: its samples are FAILED and out of the loss
    (`slime.rollout.ungraded`), or ABORTED where the model said nothing.

    Args:
        environment: its id, as ``load_environment`` of verifiers takes it.
        options: given to it by name, as JSON.
        limit_s: seconds for an episode.
        tool_parser, reasoning_parser: see `slime.agent.parsing.parse_model_output`.
    """

    def __init__(
        self,
        environment: str,
        options: Mapping[str, Any] | None = None,
        *,
        limit_s: float = LIMIT_S,
        tool_parser: str | None = "hermes",
        reasoning_parser: str | None = None,
    ) -> None:
        check_parsers(tool_parser, reasoning_parser)
        self.host = _Host(environment, dict(options or {}))
        self._limit_s = limit_s
        self._parsers = (tool_parser, reasoning_parser)

    async def __call__(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Sample | list[Sample]:
        """Plays an episode; an earlier attempt at it is forgotten."""
        config = filled(GenerationConfig, args)
        without_answer(sample)
        tokenizer = GenerateState(config.flat).tokenizer
        adapter, server = _provider(get_model_url(config.router), tokenizer, *self._parsers)
        own, training = config.evaluation.eval_max_context_len, config.rollout.rollout_max_context_len
        key, longest = uuid.uuid4().hex, (own if evaluation else training) or 0
        adapter.open_session(key, sampling_defaults=sampling_params, max_context_tokens=longest)
        try:
            ended = await self.host.play(_input_of(sample), server.url, key, self._limit_s)
            reward, failure = ended.get("reward"), ended["error"]
            more = {name: ended.get(name) for name in ("metrics", "stop_condition")}
            samples = await adapter.finish_session(
                key, base_sample=sample, reward=reward or 0.0, extra_metadata=more
            )
        except EpisodeFailed as error:
            failure = str(error)
            samples = await adapter.finish_session(key, base_sample=sample)
        finally:
            adapter.drop_session(key)
        return _told(sample, samples, failure)


def _told(sample: Sample, samples: list[Sample], failure: str | None) -> Sample | list[Sample]:
    if failure is not None:
        logger.warning("%s: %s", name_samples(sample), failure)
    if not samples:
        sample.status = Sample.Status.ABORTED
        return sample
    for one in samples:
        if failure is not None and one.status is not Sample.Status.ABORTED:
            mark_ungraded(one, failure)
    return samples if len(samples) > 1 else samples[0]


def _input_of(sample: Sample) -> dict[str, Any]:
    """The environment's row.

    Raises:
        RolloutError: the data are of something else.
    """
    if INPUT not in sample.metadata or not isinstance(sample.prompt, list):
        raise RolloutError(
            f"{name_samples(sample)}: no row of an environment (wanted: --prompt-data of python -m "
            "slime.environments.verifiers_host ENVIRONMENT --rows FILE, without --apply-chat-template)"
        )
    return {**sample.metadata[INPUT], "prompt": sample.prompt}


@cache
def _provider(
    url: str, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None
) -> tuple[OpenAIAdapter, AppHandle]:
    """The adapter of this process, and the address at which environments find it."""
    adapter = OpenAIAdapter(
        tokenizer=tokenizer, sglang_url=url, tool_parser=tool_parser, reasoning_parser=reasoning_parser
    )
    return adapter, run_app_in_thread(adapter.app, runner_kwargs={"handler_cancellation": True})


class _Host:
    """Plays episodes in a process, which starts with the first one, and again after its end."""

    def __init__(self, environment: str, options: Mapping[str, Any]) -> None:
        self._name = f"environment {environment}"
        module = "slime.environments.verifiers_host"
        self._command = [sys.executable, "-m", module, environment, "--options", json.dumps(options)]
        self._process: _Process | None = None
        self._lock, self._numbers = threading.Lock(), itertools.count()

    async def play(self, asked: Mapping[str, Any], url: str, key: str, limit_s: float) -> dict[str, Any]:
        """How an episode ended.

        Raises:
            EpisodeFailed: its process ended, or it took too long.
            RolloutError: there is no such environment.
        """
        number, process = next(self._numbers), self._running()
        done = process.ask(number, {"id": number, "input": asked, "url": url, "key": key})
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(done)), limit_s)
        except TimeoutError as error:
            raise EpisodeFailed(f"{self._name}: no end within {limit_s:g} s") from error
        finally:
            if not done.done():
                await asyncio.shield(self._cancel(process, number, done))

    def _running(self) -> "_Process":
        with self._lock:
            if self._process is None or self._process.has_ended:
                self._process = _Process(self._name, self._command)
            return self._process

    async def _cancel(self, process: "_Process", number: int, done: "Future[dict[str, Any]]") -> None:
        """Ends an episode; with its process, if that does not heed."""
        process.write({"cancel": number})
        await asyncio.wait([asyncio.wrap_future(done)], timeout=_CANCEL_S)
        if not done.done():
            process.kill()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()


class _Process:
    """A process of an environment, and a thread that hears what it says."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name, self._is_ready, self._is_over = name, False, False
        self._lock, self._waiting = threading.Lock(), dict[int, Future[dict[str, Any]]]()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._writing = SerialThread("slime-verifiers-writing")  # what does not read keeps it alone waiting
        threading.Thread(target=self._listen, name="slime-verifiers", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kills it; those who wait are told."""
        self._process.kill()
        self._process.wait()

    def ask(self, number: int, asked: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        """Has an episode played."""
        done: Future[dict[str, Any]] = Future()
        with self._lock:
            self._waiting[number] = done
            is_over = self._is_over
        self.write(asked)
        if is_over:
            self._fail_all()
        return done

    def write(self, asked: Mapping[str, Any]) -> None:
        """Tells it something, once it reads; nothing if it has ended, which the listener sees."""
        self._writing.submit(self._write_now, json.dumps(asked).encode() + b"\n")

    def _write_now(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                break  # it was killed within a line
            told = json.loads(line)
            if "id" not in told:
                self._is_ready = True
                continue
            with self._lock:
                done = self._waiting.pop(told.pop("id"))
            if done.set_running_or_notify_cancel():
                done.set_result(told)
        self.kill()  # whoever has closed its output answers nothing more
        self._writing.close()
        with self._lock:
            self._is_over = True
        self._fail_all()

    def _fail_all(self) -> None:
        with self._lock:
            left, self._waiting = list(self._waiting.values()), {}
        when, kind = ("", EpisodeFailed) if self._is_ready else (" before it was ready", RolloutError)
        told = f"{self._name}: its process ended{when} with exit status {self._process.returncode}"
        for done in left:
            if done.set_running_or_notify_cancel():
                done.set_exception(kind(told))
