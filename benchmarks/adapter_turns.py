"""CPU that an agent's turn costs in an adapter, beside the same request sent to an engine directly.

    python benchmarks/adapter_turns.py [--sessions 64] [--context 32768] [--turns 4] [--rounds 3]
        [--many 250 1000] [--many-context 2048]

Each session is a conversation of so many tokens in 64 messages, with five tools. A turn is a result of a
tool of 100 words and an answer of 50 tokens. The engine answers at once; it and the agents are another
process than the one that is measured: the adapter, or a program that sends as many tokens to
``/generate`` and reads answers. Both take turns. Writes JSON: medians of the rounds in CPU ms per turn
(user and system), what the adapter adds, the first turn of a session, which encodes all of it, and the
memory of a session. Then the same of the adapter alone with many sessions, each of which takes its turns
beside the others, and how many of their turns were not recorded.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from slime.agent.adapters import OpenAIAdapter  # noqa: E402
from slime.agent.aiohttp_threaded import run_app_in_thread  # noqa: E402
from slime.utils.http_utils import post  # noqa: E402
from slime.utils.misc import spare_collector  # noqa: E402

FORKED = multiprocessing.get_context("fork")
RESULTS = ROOT / "benchmarks" / "results" / "adapter_turns.json"
MESSAGES, NEW_WORDS, ANSWER_TOKENS = 64, 100, 50
WORDS = ["".join(random.Random(n).choices("abcdefghijklmnop", k=3 + n % 6)) for n in range(1500)]
SAMPLING = {"max_new_tokens": 100, "temperature": 1.0}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """About a token for each word."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        special_tokens=["<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([" ".join(WORDS)] * 2, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def text(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def make_tools() -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": text(number, 60),
                "parameters": {
                    "type": "object",
                    "properties": {
                        word: {"type": "string", "description": text(number, 8)} for word in WORDS[:4]
                    },
                },
            },
        }
        for number in range(5)
    ]


class Engine(asyncio.Protocol):
    """Answers each request at once with the same tokens."""

    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.parts, self.left = transport, bytearray(), 0

    def data_received(self, data: bytes) -> None:
        if not self.left:
            self.parts += data
            head, found, rest = bytes(self.parts).partition(b"\r\n\r\n")
            if not found:
                return
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            self.parts, self.left, data = bytearray(), length, rest
        self.left -= len(data)
        if not self.left:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            self.transport.write(head % len(self.answer) + self.answer)  # type: ignore[attr-defined]


def engine_answer(tokenizer: PreTrainedTokenizerFast) -> bytes:
    words = tokenizer(text(0, 4 * ANSWER_TOKENS))["input_ids"]
    ids = [*words[: ANSWER_TOKENS - 1], tokenizer.eos_token_id]
    meta = {
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "output_token_logprobs": [[-0.125 * (at % 7), token, None] for at, token in enumerate(ids)],
        **{"weight_version": "1", "prompt_tokens": 1, "completion_tokens": len(ids), "cached_tokens": 0},
        "e2e_latency": 0.1,
    }
    return json.dumps({"text": tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}).encode()


# What is measured: each a process, which says its CPU seconds and its memory when it is asked.


def serve_adapter(pipe: Connection, tokenizer: PreTrainedTokenizerFast, url: str, sessions: int) -> None:
    spare_collector()  # as the rollout manager does, in whose process adapters are
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=url, tool_parser="hermes")
    for number in range(sessions):
        adapter.open_session(str(number), sampling_defaults=SAMPLING)
    pipe.send(run_app_in_thread(adapter.app).port)
    while pipe.recv():
        taken = sum(adapter.trajectories.turn_count(str(number)) for number in range(sessions))
        pipe.send((time.process_time(), psutil.Process().memory_info().rss, taken))


def ask_directly(pipe: Connection, prompts: list[list[int]], url: str, turns: int) -> None:
    async def session(prompt: list[int]) -> None:
        for _ in range(turns):
            body = {"input_ids": prompt, "sampling_params": SAMPLING, "return_logprob": True}
            answer = await post(url, body)
            made = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
            prompt = prompt + made + prompt[:NEW_WORDS]

    async def everyone() -> None:
        await asyncio.gather(*map(session, prompts))

    spare_collector()
    begun = time.process_time()
    asyncio.run(everyone())
    pipe.send(time.process_time() - begun)


# The agents, which share a process with the engine.


class Agent:
    """One session, with a connection of its own."""

    def __init__(self, number: int, port: int, context: int, tools: list[dict[str, Any]]) -> None:
        self._number, self._port, self._tools = number, port, tools
        each = context // MESSAGES
        self._messages = [{"role": "system", "content": text(1, each)}]
        for at in range(MESSAGES - 1):
            role = "assistant" if at % 2 else "user" if not at else "tool"
            self._messages.append({"role": role, "content": text(1000 * number + at, each)})

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)

    async def turn(self) -> None:
        body = json.dumps({"model": "m", "messages": self._messages, "tools": self._tools}).encode()
        self._writer.write(HEAD.format("/v1/chat/completions", self._number, len(body)).encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        answer = json.loads(await self._reader.readexactly(length))
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(str(answer))
        self._messages.append(answer["choices"][0]["message"])
        self._messages.append({"role": "tool", "tool_call_id": "c", "content": text(self._number, NEW_WORDS)})


async def measure_adapter(args: argparse.Namespace, pipe: Connection) -> dict[str, float]:
    """CPU ms of the first turn and of one that goes on, and MiB of a session."""

    async def usage() -> tuple[float, int, int]:
        pipe.send(True)
        return await asyncio.to_thread(pipe.recv)

    port = await asyncio.to_thread(pipe.recv)
    agents = [Agent(number, port, args.context, make_tools()) for number in range(args.sessions)]
    for agent in agents:
        await agent.open()
    before = await usage()
    await asyncio.gather(*(agent.turn() for agent in agents))
    opened = await usage()
    await asyncio.gather(*(agent.turn() for agent in agents))  # the template is looked at in the first ones
    begun = await usage()
    for _ in range(args.turns):
        await asyncio.gather(*(agent.turn() for agent in agents))
    ended = await usage()
    pipe.send(False)
    return {
        "first_turn_ms": 1e3 * (opened[0] - before[0]) / args.sessions,
        "adapter_ms": 1e3 * (ended[0] - begun[0]) / args.sessions / args.turns,
        "session_mib": (ended[1] - before[1]) / args.sessions / 2**20,
        "lost_turns": args.sessions * (args.turns + 2) - ended[2],
    }


async def with_many(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, sessions: int
) -> dict[str, float]:
    """The adapter's figures with so many sessions."""
    many = argparse.Namespace(sessions=sessions, context=args.many_context, turns=args.turns)
    served, its = FORKED.Pipe()
    server, url = await start_engine()
    adapter = FORKED.Process(target=serve_adapter, args=(its, tokenizer, url, sessions))
    async with server:
        adapter.start()
        found = await measure_adapter(many, served)
    adapter.join()
    return {"sessions": sessions, "context": args.many_context, **found}


async def start_engine() -> tuple[asyncio.Server, str]:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=4096)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/generate"


async def measured_round(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    server, url = await start_engine()
    prompts = [
        [random.Random(number).randrange(6000) for _ in range(args.context)]
        for number in range(args.sessions)
    ]
    ours, theirs = FORKED.Pipe()
    direct = FORKED.Process(target=ask_directly, args=(theirs, prompts, url, args.turns))
    served, its = FORKED.Pipe()
    adapter = FORKED.Process(target=serve_adapter, args=(its, tokenizer, url, args.sessions))
    async with server:
        adapter.start()
        found = await measure_adapter(args, served)
        direct.start()
        seconds = await asyncio.to_thread(ours.recv)
    direct.join()
    adapter.join()
    return {**found, "direct_ms": 1e3 * seconds / args.sessions / args.turns}


def commit() -> str:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--many", type=int, nargs="*", default=[250, 1000])
    parser.add_argument("--many-context", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    tokenizer = make_tokenizer()
    Engine.answer = engine_answer(tokenizer)
    rounds = [asyncio.run(measured_round(args, tokenizer)) for _ in range(args.rounds)]
    medians = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    added = statistics.median(found["adapter_ms"] - found["direct_ms"] for found in rounds)
    result = {
        **{"sessions": args.sessions, "context": args.context, "turns": args.turns, "rounds": args.rounds},
        **{"cores": os.cpu_count(), "load_average": os.getloadavg()[0]},
        **{"date": time.strftime("%Y-%m-%d"), "commit": commit()},
        **{"medians": medians, "added_ms": added},
        "many": [asyncio.run(with_many(args, tokenizer, sessions)) for sessions in args.many],
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
