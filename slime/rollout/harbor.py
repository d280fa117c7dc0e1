"""Generate functions for tasks in the format of Harbor; their tests say what an answer is worth.

generate = harbor_shell(max_turns=30)                                   # the model has a shell
generate = HarborAgents(CommandHarness(...), network="agents", adapter_host="172.18.0.1")    # an agent works
"""

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.common import BaseAdapter
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.agent.harbor import HarborTask, TaskError, VerifierError, grade, load_task, open_sandbox, reward_of
from slime.agent.harbor.grading import Make, container, workdir_of
from slime.agent.harbor.prepared import PreparedImages
from slime.agent.harbor.task import METADATA
from slime.agent.harness import BaseHarness
from slime.agent.parsing import check_parsers
from slime.agent.sandbox import SandboxError, by_line
from slime.agent.sandbox.engine import NoEngine
from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.environments import Answer, Step
from slime.rollout.base_types import RolloutError, name_samples
from slime.rollout.conversation import without_answer
from slime.rollout.episodes import Episodes
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import get_model_url
from slime.rollout.ungraded import mark_ungraded
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_LIMIT_S = 7200.0
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command of shell in the container of the task.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def task_of(metadata: Mapping[str, Any]) -> HarborTask:
    """The task of a row.

    Raises:
        RolloutError: the row is of something else, or its task cannot be used.
    """
    folder = metadata.get(METADATA)
    if not isinstance(folder, str):
        raise RolloutError(
            f"metadata {metadata!r:.200}: no task of Harbor (wanted: --prompt-data of python -m "
            "slime.agent.harbor TASKS --rows FILE, without --apply-chat-template)"
        )
    try:
        return load_task(Path(folder))
    except TaskError as error:
        raise RolloutError(str(error)) from error


class HarborShell:
    """An episode is a task in a container, until a turn without a call, the last turn or its time is up."""

    tools = (SHELL,)

    def __init__(
        self,
        *,
        max_turns: int,
        network: str | None = None,
        make: Make = container,
        command_s: float = 180.0,
        longest_output: int = 8000,
        prepare: str | None = None,
        prepare_network: str = "none",
    ) -> None:
        """
        Args:
            prepare: a line of shell, run as root once for each image in a snapshot of it, from which all
                containers in which the model works start.
            prepare_network: the engine's, which is there meanwhile.
        """
        self._prepared = None if prepare is None else _prepared_by(prepare, prepare_network, make)
        self._max_turns, self._network, self._make = max_turns, network, make
        self._command_s, self._longest = command_s, longest_output
        self._stack = AsyncExitStack()

    async def reset(self, task: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        """Opens the container of a row's task."""
        self._task, self._turns = task_of(task["metadata"]), 0
        try:
            opened = open_sandbox(self._task, self._network, make=self._make, prepared=self._prepared)
            self._sandbox = await self._stack.enter_async_context(opened)
        except (TaskError, NoEngine) as error:  # whatever the row
            raise RolloutError(str(error)) from error
        self._folder = await workdir_of(self._task, self._sandbox)
        self._deadline = time.monotonic() + self._task.agent_s
        return list(task["prompt"])

    async def step(self, answer: Answer) -> Step:
        """Runs a command, or grades what there is now."""
        self._turns += 1
        left = self._deadline - time.monotonic()
        said = await self._run(answer, left) if answer.calls and left > 0 else ""
        if not answer.calls or self._turns == self._max_turns or self._deadline <= time.monotonic():
            rewards = await grade(self._task, self._sandbox, self._folder, self._network, make=self._make)
            return Step(reward=reward_of(rewards), done=True)
        return Step(said)

    async def _run(self, answer: Answer, left: float) -> str:
        command = answer.calls[0].arguments.get("command")
        if not isinstance(command, str):
            return "error: no command"
        code, output = await self._sandbox.exec(
            command,
            user=self._task.agent_user,
            env=self._task.env,
            workdir=self._folder,
            timeout=min(self._command_s, left),
        )
        return f"{output[-self._longest :]}(exit code {code})"

    async def close(self) -> None:
        """Ends the container."""
        await self._stack.aclose()


def harbor_shell(*, max_turns: int = 30, tool_parser: str | None = "hermes", **options: Any) -> Episodes:
    """Returns a generate function: the model works on a task by calls of a shell in its container.

    Args:
        options: of `HarborShell`.
    """
    options = {"max_turns": max_turns, **options}
    return Episodes(HarborShell, options, max_turns=max_turns, limit_s=_LIMIT_S, tool_parser=tool_parser)


class HarborAgents:
    """A generate function: a command-line agent works on a task in its container.

    It asks an adapter, so that what is trained on are the tokens that were sampled. A task whose tests come
    to no reward, and a container that fails, are of unknown worth: the samples are FAILED and out of the loss
    (`slime.rollout.ungraded`), or ABORTED where the model said nothing. An agent that fails, or whose time is
    up, is graded by what it did.

    Args:
        harness: of the agent.
        network: the engine's, on which agents reach ``adapter_host``: one without a way to elsewhere, for
            tasks that want none.
        adapter_host: the address of this machine on that network; the adapter listens there.
        adapter: its kind, as the agent needs it.
        grading_network: of sandboxes that grade tasks which want a network.
        install_network: the engine's, on which the agent is installed once for each image, in a snapshot of
            it from which the others start; without it each sandbox installs the agent on ``network``.
    """

    def __init__(
        self,
        harness: BaseHarness,
        *,
        network: str,
        adapter_host: str,
        adapter: type[BaseAdapter] = OpenAIAdapter,
        grading_network: str | None = None,
        install_network: str | None = None,
        tool_parser: str | None = "hermes",
        reasoning_parser: str | None = None,
        make: Make = container,
    ) -> None:
        check_parsers(tool_parser, reasoning_parser)
        if network == "none":
            raise ValueError("network none (wanted: one of the engine's, on which agents reach the adapter)")
        self._harness, self._network, self._grading, self._make = harness, network, grading_network, make
        self._prepared: PreparedImages | None = None
        if install_network is not None:
            self._prepared = PreparedImages(harness.install, install_network, make)
        self._provider: Any = (adapter, adapter_host, tool_parser, reasoning_parser)

    async def __call__(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Sample | list[Sample]:
        """Lets the agent work; an earlier attempt is forgotten."""
        config = filled(GenerationConfig, args)
        without_answer(sample)
        task = task_of(sample.metadata)
        own, training = config.evaluation.eval_max_context_len, config.rollout.rollout_max_context_len
        key, longest = uuid.uuid4().hex, (own if evaluation else training) or 0
        adapter, server = _provider(
            get_model_url(config.router), GenerateState(config.flat).tokenizer, *self._provider
        )
        adapter.open_session(key, sampling_defaults=sampling_params, max_context_tokens=longest)
        rewards, failure, code = dict[str, float](), "", None
        try:
            try:
                code, rewards = await self._work(task, key, server.url)
            except (TaskError, NoEngine) as error:
                raise RolloutError(str(error)) from error
            except (SandboxError, VerifierError) as error:
                failure = str(error)
            more = {"harbor_rewards": rewards, "agent_exit_code": code}
            samples = await adapter.finish_session(
                key, base_sample=sample, reward=reward_of(rewards) if rewards else 0.0, extra_metadata=more
            )
        finally:
            adapter.drop_session(key)
        return _told(sample, samples, failure)

    async def _work(self, task: HarborTask, key: str, url: str) -> tuple[int, dict[str, float]]:
        def on_network(task: HarborTask, image: str, network: str) -> Any:
            return self._make(task, image, self._network)

        opened = open_sandbox(task, self._network, make=on_network, prepared=self._prepared)
        async with opened as sandbox:
            folder = await workdir_of(task, sandbox)
            code = await self._harness.run(
                sandbox,
                workdir=folder,
                session_id=key,
                adapter_url=url,
                time_budget_sec=task.agent_s,
                prompt=task.instruction,
            )
            return code, await grade(task, sandbox, folder, self._grading, make=self._make)


def _told(sample: Sample, samples: list[Sample], failure: str) -> Sample | list[Sample]:
    if failure:
        logger.warning("%s: %s", name_samples(sample), failure)
    if not samples:
        sample.status = Sample.Status.ABORTED
        return sample
    for one in samples:
        if failure and one.status is not Sample.Status.ABORTED:
            mark_ungraded(one, failure)
    return samples if len(samples) > 1 else samples[0]


@cache
def _prepared_by(line: str, network: str, make: Make) -> PreparedImages:
    """For all episodes of this process."""
    return PreparedImages(by_line(line), network, make)


@cache
def _provider(
    url: str,
    tokenizer: Any,
    kind: type[BaseAdapter],
    host: str,
    tool_parser: str | None,
    reasoning_parser: str | None,
) -> tuple[BaseAdapter, AppHandle]:
    """The adapter of this process, and the address at which agents find it."""
    adapter = kind(
        tokenizer=tokenizer, sglang_url=url, tool_parser=tool_parser, reasoning_parser=reasoning_parser
    )
    return adapter, run_app_in_thread(adapter.app, host=host, runner_kwargs={"handler_cancellation": True})
