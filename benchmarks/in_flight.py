"""Answers over updates of the weights, by mode of the pause: what engines say of tokens, and what it cost.

    python benchmarks/in_flight.py [--seconds 1] [--turns 300] [--answers 1] [--tokens 1000]

One embedded engine with a random float32 model gives an agent's turns, one after the other in one growing
conversation, by OpenAI's client and the adapter, and beside them the long answers of a fully asynchronous
worker, so many at once by each of its two generate functions: asked for whole, and as a stream. Every so many
seconds the weights change by ``--step`` of their standard deviation, the way a trainer changes them.
Afterwards ``transformers`` computes each token's log-prob with the weights that are told to have made it, the
whole prefix read by these.

Writes for each mode of ``--pause-generation-mode``, and for each of the three who ask, the absolute error of
the engine's log-probs (mean and largest, in nats) of tokens of an answer behind an update that met it and of
all others; how many answers an update met; tokens that were lost; tokens that were computed again, as the
metric has it, and how many more the versions of the tokens tell of. A pause's mean length is in milliseconds.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from slime.agent.adapters import OpenAIAdapter  # noqa: E402
from slime.agent.aiohttp_threaded import run_app_in_thread  # noqa: E402
from slime.backends.sglang_utils.client import EngineClient  # noqa: E402
from slime.rollout.async_worker import AsyncRolloutWorker  # noqa: E402
from slime.rollout.generate_state import GenerateState  # noqa: E402
from slime.utils.async_utils import get_async_loop, run  # noqa: E402
from slime.utils.http_utils import init_http_client  # noqa: E402
from slime.utils.tensor_bucket import serialize_tensors  # noqa: E402
from slime.utils.types import EngineEndpoint, Sample  # noqa: E402
from slime.utils.weight_clock import clock  # noqa: E402
from tests.engines.embedded import SHAPE, Server, make_checkpoint, token_logprobs  # noqa: E402
from tests.run_args import run_args  # noqa: E402
from tools.make_tiny_model import make_tokenizer  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "in_flight.json"
MODES = ("abort", "retract", "in_place")
AGENT, STREAMING = "agent", "slime.rollout.sglang_streaming_rollout.generate_streaming"
TURN_TOKENS = 8
_COUNTS = ("tokens", "answers_met", "tokens_lost", "recomputed_tokens", "recomputed_beyond_metric")
_ERRORS = ("error_before", "error_behind")
SHORT = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""A template with so few tokens of its own that it is the agent's turns that a context is made of."""
ENDLESS = {"temperature": 1.0, "ignore_eos": True}


class Trainer:
    """Weights that go on, and an engine that gets them.

    Attributes:
        model: with the version that was asked for last.
        pauses: seconds, one per update.
    """

    def __init__(self, model: torch.nn.Module, client: EngineClient, mode: str, step: float) -> None:
        self.model, self._client, self._mode, self._step = model, client, mode, step
        self._first = {name: weight.clone() for name, weight in model.state_dict().items()}
        self.version, self.pauses = 1, list[float]()

    def at(self, version: int) -> torch.nn.Module:
        """The model with the weights of a version, which adds noise of its own to the one before it."""
        weights = {name: weight.clone() for name, weight in self._first.items()}
        for number in range(2, version + 1):
            generator = torch.Generator().manual_seed(number)
            for name, weight in weights.items():
                noise = torch.randn(weight.shape, generator=generator)
                weight += self._step * self._first[name].std() * noise
        self.model.load_state_dict(weights)
        return self.model

    def update(self) -> None:
        self.version += 1
        tensors = serialize_tensors([*self.at(self.version).state_dict().items()], share=False)
        clock.begin_update()
        started = time.monotonic()
        self._client.pause_generation(self._mode)
        self._client.flush_idle_cache()
        with self._client.weight_update():
            self._client.update_weights_from_tensor([tensors], weight_version=str(self.version))
        self._client.continue_generation()
        self.pauses.append(time.monotonic() - started)
        clock.end_update(self.version)


class Prompts:
    """A data source: groups of two answers to one prompt, asked for at once and as a stream.

    Attributes:
        given: groups that were taken, less those that came back.
    """

    def __init__(self) -> None:
        self.given, self._index = 0, itertools.count()

    def get_samples(self, count: int) -> list[list[Sample]]:
        self.given += count
        ways = (None, STREAMING)
        return [
            [Sample(prompt="hi", index=next(self._index), generate_function_path=way) for way in ways]
            for _ in range(count)
        ]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.given -= len(groups)


def make_worker(url: str, checkpoint: Path, options: argparse.Namespace) -> AsyncRolloutWorker:
    host, port = url.removeprefix("http://").split(":")
    args = run_args(
        hf_checkpoint=str(checkpoint),
        vocab_size=SHAPE["vocab_size"],
        n_samples_per_prompt=2,
        rollout_batch_size=options.answers,
        rollout_max_response_len=options.tokens,
        sglang_router_ip=host,
        sglang_router_port=int(port),
        sglang_server_concurrency=64,
        custom_rm_path="tests.rollout.plugins.length_rm",
    )
    init_http_client(args)
    GenerateState.clear()
    GenerateState(args).sampling_params |= ENDLESS
    return AsyncRolloutWorker(args, Prompts(), concurrency=options.answers)


async def converse(url: str, turns: int) -> None:
    """An agent of so many turns, which knows OpenAI's API and nothing of weights, and never asks twice."""
    http_client = openai.DefaultAsyncHttpxClient(trust_env=False)
    client = openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=AGENT, max_retries=0, timeout=600, http_client=http_client
    )
    messages: list[Any] = [{"role": "user", "content": "?"}]
    async with client:
        for _ in range(turns):
            answer = await client.chat.completions.create(model="any", messages=messages)
            said = answer.choices[0].message.model_dump(exclude_none=True)
            messages += [said, {"role": "user", "content": "?"}]


def generate(
    url: str, checkpoint: Path, trainer: Trainer, options: argparse.Namespace
) -> dict[str, list[Sample]]:
    """Samples of the agent and of the answers beside it, by who asked, between which the weights change."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SHORT
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=f"{url}/generate")
    server = run_app_in_thread(adapter.app, runner_kwargs={"handler_cancellation": True})
    adapter.open_session(AGENT, sampling_defaults={**ENDLESS, "max_new_tokens": TURN_TOKENS})
    worker, groups = make_worker(url, checkpoint, options), list[list[Sample]]()
    worker.start()
    try:
        agent = asyncio.run_coroutine_threadsafe(converse(server.url, options.turns), get_async_loop())
        while not agent.done() or not groups:
            time.sleep(options.seconds)
            trainer.update()
            groups += worker.get_completed_groups()
        agent.result()
        turns = run(adapter.finish_session(AGENT, base_sample=Sample()))
    finally:
        worker.stop()
        server.stop()
        GenerateState.clear()
    if lost := worker.data_buffer.given - len(groups):
        raise AssertionError(f"{lost} groups are neither finished nor back")
    return {
        AGENT: turns,
        "fully async": [group[0] for group in groups],
        "streaming": [group[1] for group in groups],
    }


def answers_of(sample: Sample) -> Iterator[range]:
    """The tokens of each answer in a sample; an agent's has several."""
    mask, begin = sample.loss_mask or [1] * sample.response_length, 0
    for is_answer, tokens in itertools.groupby(mask):
        end = begin + len(list(tokens))
        if is_answer:
            yield range(begin, end)
        begin = end


class Row:
    """What is known of the samples that one of those who ask has got.

    Attributes:
        met: answers that an update came upon.
        told: tokens that were computed again, by the metric.
        known: the same by the versions of tokens: each change within an answer costs all before it.
    """

    def __init__(self, samples: Sequence[Sample], keeps_prefixes: bool) -> None:
        self.samples, self.before, self.behind = samples, list[float](), list[float]()
        self.met, self.known = 0, 0
        self.told = sum(sample.prefix_cache_info.recomputed_tokens for sample in samples)
        for sample in samples:
            start, versions = len(sample.tokens) - sample.response_length, sample.token_versions
            for answer in answers_of(sample):
                changes = [n for n in answer[1:] if versions[n] != versions[n - 1]]
                self.met += bool(changes)
                self.known += 0 if keeps_prefixes else sum(start + n - 1 for n in changes)

    def compare(self, model: torch.nn.Module, version: str) -> None:
        """Notes the errors of tokens that are told to be of a model's version."""
        for sample in self.samples:
            start, versions = len(sample.tokens) - sample.response_length, sample.token_versions
            if version not in versions:
                continue
            end = start + len(versions) - versions[::-1].index(version)
            expected, found = token_logprobs(model, sample.tokens[:end]), sample.rollout_log_probs
            assert found is not None
            for answer in answers_of(sample):
                for number in (n for n in answer if versions[n] == version):
                    error = abs(found[number] - expected[start + number - 1])
                    (self.before if version == versions[answer[0]] else self.behind).append(error)

    def result(self, wanted: int) -> dict[str, Any]:
        tokens = len(self.before) + len(self.behind)
        return {
            "tokens": tokens,
            "tokens_lost": wanted - tokens,
            "answers_met": self.met,
            "recomputed_tokens": self.told,
            "recomputed_beyond_metric": max(self.known - self.told, 0),
            "error_before": _summary(self.before),
            "error_behind": _summary(self.behind),
        }


def _summary(errors: Sequence[float]) -> dict[str, float] | None:
    return {"mean": statistics.fmean(errors), "max": max(errors)} if errors else None


def measure(
    mode: str, checkpoint: Path, model: torch.nn.Module, options: argparse.Namespace
) -> dict[str, Any]:
    clock.__init__()  # type: ignore[misc]
    clock.keeps_prefixes = mode == "in_place"
    clock.end_update(1)
    server = Server(checkpoint)
    client = EngineClient(EngineEndpoint(server.wait_ready().url, None, 1, None))
    try:
        client.update_weight_version("1")
        trainer = Trainer(model, client, mode, options.step)
        samples = generate(server.url, checkpoint, trainer, options)
    finally:
        client.close()
        server.stop()
    updates = trainer.version - 1
    rows = {name: Row(own, clock.keeps_prefixes) for name, own in samples.items()}
    for version in range(1, updates + 2):
        known = trainer.at(version)
        for row in rows.values():
            row.compare(known, str(version))
    wanted = {name: len(own) * options.tokens for name, own in samples.items()}
    wanted[AGENT] = options.turns * TURN_TOKENS
    found = {name: row.result(wanted[name]) for name, row in rows.items()}
    return {"updates": updates, "pause_ms": 1000 * statistics.fmean(trainer.pauses), **found}


def table(found: Mapping[str, Any]) -> str:
    """Returns what was measured, as the page on rollout functions has it."""
    head = "| mode | who asks | tokens | answers met | lost | computed again | not told of | error | behind |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for mode, told in found["modes"].items():
        for name, row in told.items():
            if isinstance(row, dict):
                counts = [f"{row[key]:,}" for key in _COUNTS]
                errors = [f"{row[key]['mean']:.1e}" if row[key] else "" for key in _ERRORS]
                lines.append(f"| {' | '.join([f'`{mode}`', name, *counts, *errors])} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="between two updates")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--answers", type=int, default=1, help="at once, by each way to ask")
    parser.add_argument("--tokens", type=int, default=1000, help="of a long answer")
    parser.add_argument("--step", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model = make_checkpoint(Path(scratch))
        first = {name: weight.clone() for name, weight in model.state_dict().items()}
        found: dict[str, Any] = {}
        for mode in options.modes:
            model.load_state_dict(first)
            found[mode] = measure(mode, Path(scratch), model, options)
    own = {name: getattr(options, name) for name in ("seconds", "turns", "answers", "tokens", "step")}
    results = {**own, "load": os.getloadavg()[2], "modes": found}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
