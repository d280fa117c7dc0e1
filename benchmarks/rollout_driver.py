"""What the rollout loop itself costs: CPU and memory per sample against an engine that answers at once.

    python benchmarks/rollout_driver.py                            # 1,000, 10,000 and 100,000 samples
    python benchmarks/rollout_driver.py --samples 10000 --rounds 3

All samples of a count are one rollout and in flight together; up to 1,024 of them have a request open
(``--sglang-server-concurrency`` 512 x 2 engines). The engine is a process of its own that parses no more than
a request's length and answers with 16 tokens. Measured are the CPU seconds (user + system) of the driver's
process: data source, prompt encoding, HTTP, JSON, response, reward and books, in Python 3 on one core. The
target is below 300 microseconds a sample at 10,000, and the same at 100,000.

``http`` is the same number of bare requests by the same client, with nothing around them. Memory is what the
resident set has grown by when all samples are in flight and none has an answer, divided by their number.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
from argparse import Namespace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson
import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from slime.config.run import run_config  # noqa: E402
from slime.rollout.generate_state import GenerateState, params_for_sample  # noqa: E402
from slime.rollout.sglang_rollout import generate_rollout_async, get_model_url  # noqa: E402
from slime.utils.async_utils import run  # noqa: E402
from slime.utils.http_utils import init_http_client, post  # noqa: E402
from slime.utils.misc import spare_collector  # noqa: E402
from slime.utils.types import Sample  # noqa: E402
from tests.run_args import run_args  # noqa: E402
from tools.make_tiny_model import make_tokenizer  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "rollout_driver.json"
PROMPT = "<|im_start|>user\nWhat is 47 times 28?<|im_end|>\n<|im_start|>assistant\n"
GROUP = 8  # samples
TOKENS = 16


def answer() -> bytes:
    meta = {
        "id": "0",
        "finish_reason": {"type": "stop", "matched": 258},
        "prompt_tokens": 30,
        "completion_tokens": TOKENS,
        "cached_tokens": 29,
        "weight_version": "1",
        "weight_versions": [{"version": "1", "start": 0, "end": TOKENS}],
        "e2e_latency": 0.001,
        "output_token_logprobs": [[-0.25, 17, None]] * TOKENS,
    }
    return orjson.dumps({"text": "2" * TOKENS, "output_ids": [17] * TOKENS, "meta_info": meta})


def serve(pipe: Connection) -> None:
    """Engine and router in one: reads a request by its length, answers always the same."""
    generated = _http(answer())
    workers = _http(orjson.dumps({"workers": []}))

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lowered = head.lower()
                at = lowered.find(b"content-length:")
                length = int(lowered[at + 15 : lowered.index(b"\r\n", at)]) if at >= 0 else 0
                await reader.readexactly(length)
                writer.write(generated if head.startswith(b"POST /generate") else workers)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def _http(body: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )


class Prompts:
    """A data source without files."""

    def __init__(self) -> None:
        self.given = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        first, self.given = self.given, self.given + num_samples
        return [
            [Sample(prompt=PROMPT, index=g * GROUP + i, group_index=g) for i in range(GROUP)]
            for g in range(first, self.given)
        ]


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    return float(sample.response_length)


def make_args(checkpoint: str, port: int, samples: int) -> Namespace:
    groups = samples // GROUP
    return run_args(
        hf_checkpoint=checkpoint,
        rollout_timeout=3600,
        rollout_batch_size=groups,
        over_sampling_batch_size=groups,
        n_samples_per_prompt=GROUP,
        rollout_max_response_len=64,
        rollout_num_engines=2,
        sglang_server_concurrency=512,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        vocab_size=len(make_tokenizer()),
        custom_rm_path="benchmarks.rollout_driver.reward",
    )


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rollout_cost(args: Namespace, samples: int) -> float:
    """CPU microseconds per sample of one rollout."""
    GenerateState.clear()
    init_http_client(args)
    GenerateState(args)
    gc.collect()
    before = cpu_seconds()
    output = run(generate_rollout_async(args, 0, Prompts()))
    spent = cpu_seconds() - before
    assert sum(map(len, output.samples)) == samples // GROUP * GROUP
    return spent / samples * 1e6


def http_cost(args: Namespace, samples: int) -> float:
    """CPU microseconds of one bare request."""
    state = GenerateState(args)
    sample = Sample(prompt=PROMPT, index=0)
    payload = {
        "input_ids": state.encode_prompt(sample),
        "sampling_params": params_for_sample(run_config(args).rollout, state.sampling_params, sample),
        "return_logprob": True,
    }

    async def one(limit: asyncio.Semaphore) -> None:
        async with limit:
            await post(get_model_url(args), payload)

    async def all_of_them() -> None:
        limit = asyncio.Semaphore(1024)
        await asyncio.gather(*(one(limit) for _ in range(samples)))

    before = cpu_seconds()
    run(all_of_them())
    return (cpu_seconds() - before) / samples * 1e6


def in_a_process(checkpoint: str, port: int, samples: int) -> float:
    """Resident bytes per sample in flight, in a process that has freed none before."""
    context = multiprocessing.get_context("forkserver")
    parent, child = context.Pipe()
    process = context.Process(target=bytes_in_flight, args=(child, checkpoint, port, samples))
    process.start()
    try:
        return parent.recv()
    finally:
        process.join()


def bytes_in_flight(pipe: Connection, checkpoint: str, port: int, samples: int) -> None:
    """Sends the resident bytes per sample while none of them has an answer yet."""
    rollout_cost(make_args(checkpoint, port, 64), 64)
    args = make_args(checkpoint, port, samples)
    GenerateState.clear()
    state = GenerateState(args)
    gc.collect()
    process = psutil.Process()

    async def begin() -> float:
        before = process.memory_info().rss
        for _ in range(1024):
            await state.semaphore.acquire()
        rollout = asyncio.ensure_future(generate_rollout_async(args, 0, Prompts()))
        while len(state.pending) < samples // GROUP:
            await asyncio.sleep(0)
        await asyncio.sleep(0.5)  # every group has begun its samples
        grown = process.memory_info().rss - before
        rollout.cancel()
        await asyncio.gather(rollout, return_exceptions=True)
        return grown / samples

    pipe.send(run(begin()))


def measure(counts: list[int], rounds: int) -> dict[str, Any]:
    parent, child = multiprocessing.get_context("forkserver").Pipe()
    server = multiprocessing.get_context("forkserver").Process(target=serve, args=(child,), daemon=True)
    server.start()
    try:
        port = parent.recv()
        with tempfile.TemporaryDirectory() as checkpoint:
            make_tokenizer().save_pretrained(checkpoint)
            rollout_cost(make_args(checkpoint, port, 64), 64)  # imports, connections
            spare_collector()  # as the rollout manager does
            results: dict[str, Any] = {}
            for samples in counts:
                args = make_args(checkpoint, port, samples)
                costs = [rollout_cost(args, samples) for _ in range(rounds)]
                bare = [http_cost(args, min(samples, 10_000)) for _ in range(rounds)]
                results[str(samples)] = {
                    "cpu_us_per_sample": statistics.median(costs),
                    "http_us_per_request": statistics.median(bare),
                    "rss_bytes_per_sample_in_flight": in_a_process(checkpoint, port, samples),
                }
    finally:
        server.terminate()
        server.join()
    first, last = (results[str(count)]["cpu_us_per_sample"] for count in (min(counts), max(counts)))
    shares = [row["cpu_us_per_sample"] / row["http_us_per_request"] for row in results.values()]
    ratio = {"largest_over_smallest": last / first, "over_bare_http": statistics.median(shares)}
    return {"samples": results, "rounds": rounds, "load_average": os.getloadavg()[0], "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = measure(options.samples, options.rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
