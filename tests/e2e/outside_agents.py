"""What a run needs whose model is asked by agents of another process while its engines are killed.

The directory in the environment variable ``DIRECTORY`` has ``plan.json`` (a `Plan`) and gets what happened:
``turns.jsonl`` from the agents, ``engines.jsonl`` with what passed the router, ``updates.jsonl`` and
``kills.jsonl``. What is to be made of them is in ``agents_proof.py``.
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from safetensors.torch import load_file, save_file
from starlette.requests import Request

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from slime.utils.weight_clock import clock
from tests.e2e.test_recovery import _engines

DIRECTORY = "SLIME_TEST_AGENTS"
PROGRAM = Path(__file__).parent / "agent_program.py"
TURN_TOKENS = 16
CONVERSATIONS = 8
"""How many a step is made of, all in one group."""


@dataclass(frozen=True)
class Plan:
    """What shall happen.

    Attributes:
        turns: of a conversation.
        kills_in_turns: an engine dies when so many streamed turns have begun to be told.
        kills_in_updates: an engine dies in the middle of the updates of these numbers.
    """

    turns: int
    kills_in_turns: tuple[int, ...]
    kills_in_updates: tuple[int, ...]

    @staticmethod
    def over(steps: int) -> "Plan":
        """Kills all over a run of so many steps: an engine dies in every second or third of them."""
        streamed = 2 * CONVERSATIONS * steps
        return Plan(3, tuple(range(20, streamed - 30, 56)), tuple(range(4, steps, 5)))

    def write(self, directory: Path) -> None:
        (directory / "plan.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def here() -> "Plan":
        return Plan(**json.loads((_directory() / "plan.json").read_text()))


def _directory() -> Path:
    return Path(os.environ[DIRECTORY])


def note(file: str, **told: Any) -> None:
    """Adds a line to a file of the directory, whole, whoever else writes."""
    line = orjson.dumps({"time": time.time(), **told}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    with (_directory() / file).open("ab", buffering=0) as stream:
        stream.write(line)


def kill_an_engine(where: str) -> None:
    """Kills one with SIGKILL, whatever it works on."""
    engines = _engines()
    victim = max(engines) if "turn" in where else min(engines)
    note("kills.jsonl", where=where, pid=victim, engines=len(engines))
    os.kill(victim, signal.SIGKILL)


class Recorder:
    """Middleware of the router that keeps what engines have been asked, and what they said to it."""

    def __init__(self, app: Any, *, router: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self.app(scope, receive, send)
            return
        body, parts, status = await Request(scope, receive).body(), list[bytes](), 0

        async def again() -> Any:
            if not passed:
                passed.append(True)
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        async def recording(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))
            await send(message)

        passed, begun = list[bool](), time.time()
        try:
            await self.app(scope, again, recording)
        finally:
            ids = orjson.loads(body)["input_ids"]
            note("engines.jsonl", begun=begun, prompt=ids, status=status, said=_said(b"".join(parts), status))


def _said(answer: bytes, status: int) -> Any:
    """``meta_info`` of an answer, of a stream that of its last event; None if there is none."""
    if status != 200:
        return None
    if not answer.startswith(b"data:"):
        return orjson.loads(answer)["meta_info"] if answer.endswith(b"}") else None
    events = [part[5:].strip() for part in answer.split(b"\n\n")[:-1] if part.startswith(b"data:")]
    whole = [orjson.loads(event) for event in events if event != b"[DONE]"]
    return next((event["meta_info"] for event in reversed(whole) if "meta_info" in event), None)


class Agents:
    """The process of the agents. One that ends is an error of the conversations that it has."""

    def __init__(self) -> None:
        self._over: dict[str, asyncio.Future[list[str]]] = {}
        self._said: dict[str, list[str]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._told, self._killed_at = 0, -2
        self._kills = iter(Plan.here().kills_in_turns)
        self._next_kill = next(self._kills, None)
        self._starting = asyncio.Lock()

    async def converse(self, url: str, key: str, turns: int) -> list[str]:
        """Has a conversation; returns what the model said."""
        async with self._starting:
            if self._process is None:
                pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
                self._process = await asyncio.create_subprocess_exec(sys.executable, str(PROGRAM), **pipes)
                self._reader = asyncio.create_task(self._read(self._process))
        self._over[key] = asyncio.get_running_loop().create_future()
        self._said[key] = []
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps({"url": url, "key": key, "turns": turns}) + b"\n")
        return await self._over[key]

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            told = orjson.loads(line)
            note("turns.jsonl", **told)
            key, event = told["key"], told["event"]
            if event == "answered":
                self._said[key].append(told["text"])
            elif event == "told":
                self._may_kill()
            elif event in ("over", "refused") and not self._over[key].done():
                self._over.pop(key).set_result(self._said.pop(key))

    def _may_kill(self) -> None:
        """One engine at a time: a fleet is whole again after the next update."""
        self._told += 1
        whole = not clock.updating and clock.updates > self._killed_at + 1
        if self._next_kill is not None and self._told >= self._next_kill and whole:
            self._next_kill, self._killed_at = next(self._kills, None), clock.updates
            kill_an_engine("in a turn")


class Provider(metaclass=SingletonMeta):
    """The adapter of this process, and the agents that know its address."""

    def __init__(self, args: Namespace) -> None:
        self.adapter = OpenAIAdapter(tokenizer=GenerateState(args).tokenizer, sglang_url=get_model_url(args))
        self.server = run_app_in_thread(self.adapter.app, runner_kwargs={"handler_cancellation": True})
        self.agents, self.plan = Agents(), Plan.here()


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """Has one of the agents have a conversation. What it is worth is how many of its tokens are ASCII."""
    provider, key = Provider(args), uuid.uuid4().hex
    sampling = {**sampling_params, "ignore_eos": True, "max_new_tokens": TURN_TOKENS}
    provider.adapter.open_session(key, sampling_defaults=sampling)
    try:
        said = "".join(await provider.agents.converse(provider.server.url, key, provider.plan.turns))
        worth = min(sum(map(str.isascii, said)) / (provider.plan.turns * TURN_TOKENS), 1.0)
        samples = await provider.adapter.finish_session(key, base_sample=sample, reward=worth)
    finally:
        provider.adapter.drop_session(key)
    for one in samples:
        one.metadata["key"] = key
    return samples


def deadly_updates(args: Namespace) -> None:
    """Has a trainer kill engines between two buckets of some updates, and note when each update begins."""
    # Late: other processes import this module too.
    from slime.backends.megatron_utils.hf_weights import HfWeights

    buckets, tries, plan = HfWeights.buckets, itertools.count(), Plan.here()
    left = set(plan.kills_in_updates)

    def killing(self: HfWeights, size: int) -> Iterator[Any]:
        number = next(tries)
        note("updates.jsonl", number=number)
        for index, bucket in enumerate(buckets(self, size)):
            due = {wanted for wanted in left if wanted <= number}
            if args.rank == 0 and index == 1 and due and len(_engines()) > 1:
                left.difference_update(due)
                kill_an_engine("in an update")
            yield bucket

    HfWeights.buckets = killing  # type: ignore[method-assign]


def flags(model: Path, data: Path, steps: int, directory: Path) -> list[object]:
    """The flags of a run of ``train_async.py``, which leaves in the directory what the proof needs."""
    Plan.over(steps).write(directory)
    return [
        *("--hf-checkpoint", model, "--fp32", "--num-gpus-per-node", 8, "--seed", 7),
        *("--prompt-data", data, "--input-key", "prompt", "--label-key", "label", "--use-slime-router"),
        *("--slime-router-middleware-paths", f"{__name__}.Recorder"),
        *("--custom-generate-function-path", f"{__name__}.generate"),
        *(
            "--custom-megatron-init-path",
            f"{__name__}.deadly_updates",
            "--update-weight-buffer-size",
            100_000,
        ),
        *("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
        *("--use-fault-tolerance", "--rollout-num-gpus", 2, "--actor-num-gpus-per-node", 1),
        *("--num-rollout", steps, "--rollout-batch-size", 1, "--n-samples-per-prompt", CONVERSATIONS),
        *("--global-batch-size", CONVERSATIONS, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096),
        *("--rollout-max-response-len", 2048, "--sglang-server-concurrency", CONVERSATIONS),
        *("--advantage-estimator", "grpo", "--lr", 4e-4, "--weight-decay", 0.0, "--use-rollout-logprobs"),
        *("--save", directory / "save", "--save-interval", steps, "--no-save-optim"),
        *("--save-debug-rollout-data", directory / "rollouts" / "{rollout_id}.pt"),
    ]


def decided_model(tiny: Path, path: Path) -> Path:
    """A copy of a random model whose layers decide what it says: a random one has next to no logits."""
    shutil.copytree(tiny, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] *= 8
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
