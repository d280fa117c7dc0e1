"""Tokens per second of the embedded engine over HTTP, beside two yardsticks with the same model.

    python benchmarks/engine_throughput.py                          # 0.5M, 11M and 108M parameters
    python benchmarks/engine_throughput.py --sizes 0.5M 11M --rounds 2
    python benchmarks/engine_throughput.py --sizes 108M --new-tokens 32

64 requests at once, prompts of 32 random tokens, float32, one thread. Compared with

- ``bare``: the same forward pass in a loop over one full batch: greedy, no log-probs, no scheduling;
- ``transformers``: ``generate`` on the same batch, sampling, with log-probs of the sampled tokens.

The three take turns within a round, so that other load on the machine meets all of them; a ratio is the
median over rounds. CPU seconds (user + system of the process that computes) stand beside the wall clock:
on a machine that is not idle they are the steadier figure.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import httpx
import psutil
import torch
import transformers

from slime.backends.embedded_engine.checkpoint import load_checkpoint
from slime.backends.embedded_engine.executor import Executor
from slime.backends.embedded_engine.kv_cache import KVCache
from slime.backends.embedded_engine.model import CausalLM
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.parameters import Parameters

REQUESTS = 64
PROMPT_TOKENS = 32
SHAPES = {
    "0.5M": {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "11M": {"vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
    "108M": {"vocab_size": 32768, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64},
}


@dataclass
class Measurement:
    """What was measured of one wave of requests."""

    tokens: int
    wall_s: float
    cpu_s: float


def make_prompts(vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (REQUESTS, PROMPT_TOKENS), generator=generator).tolist()


class Server:
    """The engine in a process of its own."""

    def __init__(self, path: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "slime.backends.embedded_engine", "--model-path", path]
        self.process = subprocess.Popen([*command, "--port", str(port), "--skip-tokenizer-init"])
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(f"the engine exited with {self.process.returncode}")
            try:
                httpx.get(self.url + "/health")
                return
            except httpx.TransportError:
                time.sleep(0.1)
        raise TimeoutError("the engine did not start within 60 s")

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def wave(self, prompts: list[list[int]], new_tokens: int) -> None:
        asyncio.run(self._wave(prompts, new_tokens))

    async def _wave(self, prompts: list[list[int]], new_tokens: int) -> None:
        sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
        limits = httpx.Limits(max_connections=REQUESTS)
        # Without certificates, whose loading would be measured as if the engine took that time.
        async with httpx.AsyncClient(timeout=3600, limits=limits, verify=False) as client:

            async def one(prompt: list[int]) -> None:
                body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
                answer = (await client.post(self.url + "/generate", json=body)).raise_for_status().json()
                assert len(answer["meta_info"]["output_token_logprobs"]) == new_tokens

            await asyncio.gather(*map(one, prompts))


def own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(tokens: int, cpu_seconds: Callable[[], float], run: Callable[[], None]) -> Measurement:
    cpu, wall = cpu_seconds(), time.perf_counter()
    run()
    return Measurement(tokens, time.perf_counter() - wall, cpu_seconds() - cpu)


@torch.inference_mode()
def bare_loop(executor: Executor, prompts: list[list[int]], new_tokens: int) -> None:
    executor.cache.clear()
    hidden = executor.prefill(prompts, 0)[:, -1]
    ids = executor.model.logits(hidden).argmax(-1)
    positions = torch.full((REQUESTS,), PROMPT_TOKENS)
    for step in range(new_tokens - 1):
        hidden = executor.decode(ids, positions, 0, PROMPT_TOKENS + step + 1)
        ids = executor.model.logits(hidden).argmax(-1)
        positions += 1


@torch.inference_mode()
def transformers_generate(model: Any, prompts: list[list[int]], new_tokens: int) -> None:
    out = model.generate(
        torch.tensor(prompts),
        do_sample=True,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    chosen = out.sequences[:, PROMPT_TOKENS:]
    for step, logits in enumerate(out.logits):
        logits.float().log_softmax(-1).gather(1, chosen[:, step, None])


def bare_executor(path: str) -> Executor:
    config = ModelConfig.from_directory(path)
    parameters = Parameters(config)
    load_checkpoint(parameters, path)
    context = config.shape.max_position_embeddings
    return Executor(CausalLM(config, parameters, context), KVCache(config, REQUESTS, context))


def measure_size(size: str, rounds: int, new_tokens: int) -> dict[str, Any]:
    """All three contestants at one model size."""
    config = transformers.Qwen3Config(
        **SHAPES[size], max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    found: dict[str, list[Measurement]] = {"engine": [], "bare": [], "transformers": []}
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        executor, server = bare_executor(path), Server(path)
        try:
            server.wave(make_prompts(config.vocab_size, 99), min(new_tokens, 4))
            for index in range(rounds):
                prompts = make_prompts(config.vocab_size, index)
                tokens = REQUESTS * new_tokens
                contestants = {
                    "engine": (server.cpu_seconds, lambda p=prompts: server.wave(p, new_tokens)),
                    "bare": (own_cpu_seconds, lambda p=prompts: bare_loop(executor, p, new_tokens)),
                    "transformers": (
                        own_cpu_seconds,
                        lambda p=prompts: transformers_generate(model, p, new_tokens),
                    ),
                }
                for name, (clock, run) in contestants.items():
                    found[name].append(measure(tokens, clock, run))
        finally:
            server.process.terminate()
            server.process.wait(30)
    parameters = sum(p.numel() for p in model.parameters())
    about = {"parameters": parameters, "new_tokens": new_tokens, "load_average": os.getloadavg()[0]}
    return {**about, **summarise(found)}


def summarise(
    found: dict[str, list[Measurement]], others: Sequence[str] = ("bare", "transformers")
) -> dict[str, Any]:
    """Medians of the rates and, round by round, of the engine's rate over the others'."""
    rates = {
        name: {
            "tokens_per_s": statistics.median(m.tokens / m.wall_s for m in rounds),
            "tokens_per_cpu_s": statistics.median(m.tokens / m.cpu_s for m in rounds),
        }
        for name, rounds in found.items()
    }
    ratios = {}
    for other in others:
        pairs = list(zip(found["engine"], found[other], strict=True))
        ratios[f"engine_over_{other}"] = {
            "wall": statistics.median(o.wall_s / e.wall_s for e, o in pairs),
            "cpu": statistics.median(o.cpu_s / e.cpu_s for e, o in pairs),
        }
    raw = {name: [asdict(m) for m in rounds] for name, rounds in found.items()}
    return {"rates": rates, "ratios": ratios, "rounds": raw}


def save(path: Path, results: dict[str, Any]) -> None:
    """Writes the results; sizes that were not measured this time keep their figures."""
    if path.is_file():
        before = json.loads(path.read_text())
        results = {**results, "sizes": {**before["sizes"], **results["sizes"]}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3, help="waves of each contestant")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens per response")
    parser.add_argument("--large-new-tokens", type=int, help="tokens per response at 108M; default as above")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/engine_throughput.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    results: dict[str, Any] = {
        "requests": REQUESTS,
        "prompt_tokens": PROMPT_TOKENS,
        "threads": 1,
        "sizes": {},
    }
    for size in args.sizes:
        large = size == "108M" and args.large_new_tokens
        found = measure_size(size, args.rounds, args.large_new_tokens if large else args.new_tokens)
        results["sizes"][size] = found
        print(size, json.dumps({"rates": found["rates"], "ratios": found["ratios"]}, indent=2), flush=True)
        save(args.output, results)


if __name__ == "__main__":
    main()
