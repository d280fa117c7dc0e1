"""Answers over updates of the weights, by mode of the pause: what engines say of tokens, and what it cost.

    python benchmarks/in_flight.py [--seconds 1] [--turns 100] [--answers 4] [--tokens 2000]

One embedded engine with a random float32 model gives an agent's turns, one after the other in one growing
conversation, and long answers beside them, all through the adapter of OpenAI's API. Every so many seconds its
weights change by ``--step`` of their standard deviation, the way a trainer changes them. Afterwards
``transformers`` computes each token's log-prob with the weights that are told to have made it, the whole
prefix read by these.

Writes for each mode of ``--pause-generation-mode`` the absolute error of the engine's log-probs (mean and
largest, in nats) of tokens whose answer an update met and of those before any, tokens that were lost, tokens
that were computed again as the metric has it, and the mean length of a pause in milliseconds.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from slime.agent.adapters import OpenAIAdapter  # noqa: E402
from slime.agent.adapters.session import TurnRequest  # noqa: E402
from slime.backends.sglang_utils.client import EngineClient  # noqa: E402
from slime.utils.tensor_bucket import serialize_tensors  # noqa: E402
from slime.utils.types import EngineEndpoint, Sample  # noqa: E402
from slime.utils.weight_clock import clock  # noqa: E402
from tests.engines.embedded import Server, make_checkpoint, token_logprobs  # noqa: E402
from tools.make_tiny_model import make_tokenizer  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "in_flight.json"
MODES = ("abort", "retract", "in_place")
TURN_TOKENS = 8
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


async def take_turns(adapter: OpenAIAdapter, sid: str, turns: int, tokens: int) -> list[Sample]:
    """The samples of a conversation of so many turns."""
    adapter.open_session(sid, sampling_defaults={**ENDLESS, "max_new_tokens": tokens})
    messages: list[dict[str, Any]] = [{"role": "user", "content": sid}]
    for _ in range(turns):
        turn = await adapter.turn(TurnRequest(sid, messages, None, {}))
        messages += [adapter.reply_message(turn.output), {"role": "user", "content": "?"}]
    return await adapter.finish_session(sid, base_sample=Sample())


async def generate(url: str, trainer: Trainer, options: argparse.Namespace) -> list[Sample]:
    """Samples of the agent and of the long answers, between which the weights change."""
    adapter = OpenAIAdapter(tokenizer=make_tokenizer(), sglang_url=f"{url}/generate")
    work = [take_turns(adapter, "agent", options.turns, TURN_TOKENS)]
    work += [take_turns(adapter, f"answer {n}", 1, options.tokens) for n in range(options.answers)]
    working = asyncio.gather(*work)
    while not working.done():
        await asyncio.wait([working], timeout=options.seconds)
        if not working.done():
            await asyncio.to_thread(trainer.update)
    return [sample for samples in await working for sample in samples]


def errors(trainer: Trainer, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Computes those of the engine's log-probs: of tokens before any update of a sample, and behind one."""
    before, behind = list[float](), list[float]()
    for sample in samples:
        start, versions = len(sample.tokens) - sample.response_length, sample.token_versions
        known = [v for v in versions if v is not None]
        for version in dict.fromkeys(known):
            end = start + len(versions) - versions[::-1].index(version)
            expected = token_logprobs(trainer.at(int(version)), sample.tokens[:end])
            for number, found in enumerate(versions):
                if found == version and sample.loss_mask and sample.loss_mask[number]:
                    assert sample.rollout_log_probs is not None
                    error = abs(sample.rollout_log_probs[number] - expected[start + number - 1])
                    (before if version == known[0] else behind).append(error)
    return before, behind


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
        samples = asyncio.run(generate(server.url, trainer, options))
    finally:
        client.close()
        server.stop()
    before, behind = errors(trainer, samples)
    wanted = options.turns * TURN_TOKENS + options.answers * options.tokens
    return {
        "updates": len(trainer.pauses),
        "pause_ms": 1000 * statistics.fmean(trainer.pauses or [0.0]),
        "tokens": len(before) + len(behind),
        "tokens_lost": wanted - len(before) - len(behind),
        "recomputed_tokens": sum(sample.prefix_cache_info.recomputed_tokens for sample in samples),
        "error_before": {"mean": statistics.fmean(before or [0.0]), "max": max(before, default=0.0)},
        "error_behind": {"mean": statistics.fmean(behind or [0.0]), "max": max(behind, default=0.0)},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="between two updates")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2000, help="of a long answer")
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
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
