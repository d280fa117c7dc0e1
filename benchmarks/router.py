"""SlimeRouter against the stock sglang-router, in front of servers that answer at once.

    python benchmarks/router.py [--connections 64] [--seconds 5] [--rounds 3] [--processes 2]

64 connections (HTTP/1.1) ask for answers to 32 tokens. One of two servers answers 4 kB without looking at
the request; everything runs on this machine. The ways take turns. Writes JSON, medians of the rounds: for
each way requests/s, latency at the 50th and 99th percentile, and CPU ms of the router's processes per
request; also with a request body of 1 MB and with a stream of 50 events. Ratios are to the stock router's
round robin in the same run. `added_p99_ms` is from one connection that asks one thing after the other, so
that it is not the wait for a core.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from slime.arguments.core.parser import build_parser
from slime.backends.sglang_utils.router import RouterProcess, start_router
from slime.config.run import RunConfig
from slime.processes.child import ManagedProcess
from slime.utils.http_utils import find_available_port

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "router.json"
ANSWER_BYTES, EVENTS, MEGABYTE = 4096, 50, 2**20
PROMPT = {"input_ids": list(range(100, 132)), "sampling_params": {"max_new_tokens": 128, "temperature": 1.0}}
HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
SHORT = json.dumps(PROMPT).encode()
LONG = json.dumps({**PROMPT, "text": "x" * MEGABYTE}).encode()


# The server: a protocol of its own, so that it costs as little as possible.


class Upstream(asyncio.Protocol):
    """Answers every complete request: a stream if its body asks for one, else 4 kB."""

    body = json.dumps({"text": "y" * (ANSWER_BYTES - 24), "meta_info": {}}).encode()
    info = b'{"model_path": "/nowhere", "weight_version": "1", "is_generation": true}'

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.waiting = transport, bytearray()

    def data_received(self, data: bytes) -> None:
        self.waiting += data
        while (end := self.waiting.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.waiting[:end]).lower()
            length = (
                int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length" in head else 0
            )
            if len(self.waiting) < end + 4 + length:
                return
            body = bytes(self.waiting[end + 4 : end + 4 + length])
            del self.waiting[: end + 4 + length]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        write = self.transport.write  # type: ignore[attr-defined]
        if b'"stream":true' in body or b'"stream": true' in body:
            write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            event = b"data: " + b"z" * 100 + b"\n\n"
            for _ in range(EVENTS):
                write(b"%x\r\n%s\r\n" % (len(event), event))
            write(b"0\r\n\r\n")
            return
        content = self.body if head.startswith(b"post") else self.info
        start = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        write(start % len(content) + content)


async def serve_upstream(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port)
    await server.serve_forever()


# The client: again as little as possible, since it shares the cores with the router.


class Client:
    """One connection, one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> "Client":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        return self

    def close(self) -> None:
        self._writer.close()

    async def ask(self, body: bytes) -> int:
        """Bytes of the answer's body."""
        self._writer.write(HEAD % (b"/generate", len(body)) + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(head.decode())
        if b"content-length:" in head:
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            return len(await self._reader.readexactly(length))
        total = 0
        while size := int(await self._reader.readline(), 16):
            total += len(await self._reader.readexactly(size))
            await self._reader.readline()
        await self._reader.readline()
        return total


async def load(port: int, body: bytes, connections: int, seconds: float) -> list[float]:
    """Seconds that each request took."""
    clients = [await Client(port).open() for _ in range(connections)]
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def run(client: Client) -> None:
        while (start := time.perf_counter()) < end:
            await client.ask(body)
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*map(run, clients))
    for client in clients:
        client.close()
    return latencies


def cpu_seconds(root: int | None) -> float:
    """Returns the CPU seconds of a process and its descendants so far."""
    if root is None:
        return 0.0
    total = 0.0
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def measure(port: int, root: int | None, body: bytes, connections: int, seconds: float) -> dict[str, float]:
    asyncio.run(load(port, body, connections, min(0.5, seconds)))  # warm
    cpu, wall = cpu_seconds(root), time.perf_counter()
    latencies = sorted(asyncio.run(load(port, body, connections, seconds)))
    wall, cpu = time.perf_counter() - wall, cpu_seconds(root) - cpu
    return {
        "requests_per_s": len(latencies) / wall,
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[int(len(latencies) * 0.99)],
        "router_cpu_ms": 1e3 * cpu / len(latencies),
    }


# The ways.


def router_config(**changes: Any) -> RunConfig:
    from tests.run_args import config_with

    parser, _ = build_parser("embedded")
    for action in parser._actions:
        action.required = False
    args = parser.parse_args(["--rollout-num-gpus", "2"])
    return config_with(**vars(args) | changes)


def ways(processes: int) -> dict[str, RunConfig]:
    ours = {"use_slime_router": True}
    return {
        "sglang-router": router_config(router_policy="round_robin"),
        "SlimeRouter": router_config(**ours),
        f"SlimeRouter, {processes} processes": router_config(**ours, slime_router_processes=processes),
    }


@contextlib.contextmanager
def upstreams(folder: Path) -> Iterator[list[str]]:
    ports = [find_available_port(21000), find_available_port(22000)]
    script = [sys.executable, __file__, "--serve"]
    running = [
        ManagedProcess([*script, str(port)], name=f"upstream {port}", log_path=folder / f"{port}.log")
        for port in ports
    ]
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in running:
            process.terminate()


@contextlib.contextmanager
def routers(folder: Path, workers: list[str], processes: int) -> Iterator[dict[str, RouterProcess]]:
    running = {}
    try:
        for number, (name, config) in enumerate(ways(processes).items()):
            router = running[name] = start_router(
                config,
                host="127.0.0.1",
                port=find_available_port(23000 + 100 * number),
                prometheus_port=find_available_port(24000 + 100 * number),
                log_path=folder / f"router{number}.log",
            )
            for url in workers:
                router.register_worker(url)
        yield running
    finally:
        for router in running.values():
            router.shutdown()


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def compare(options: Namespace, workers: list[str], running: dict[str, RouterProcess]) -> dict[str, Any]:
    targets: dict[str, tuple[int, int | None]] = {"direct": (_port(workers[0]), None)}
    targets |= {name: (_port(router.url), router.process.pid) for name, router in running.items()}
    stream = json.dumps({**PROMPT, "stream": True}).encode()
    cases = {
        "short": (SHORT, options.connections),
        "one by one": (SHORT, 1),
        "1 MB body": (LONG, 8),
        "stream": (stream, 8),
    }
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(options.rounds):
        for case, (body, connections) in cases.items():
            for name, (port, root) in targets.items():
                seconds = options.seconds if case == "short" else options.seconds / 2
                found = measure(port, root, body, connections, seconds)
                rounds.setdefault(case, {}).setdefault(name, []).append(found)
    return {
        case: {
            name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            for name, rows in of_case.items()
        }
        for case, of_case in rounds.items()
    }


def ratios(medians: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"requests_per_s": {}, "cpu": {}, "added_p99_ms": {}}
    stock, direct = medians["short"]["sglang-router"], medians["one by one"]["direct"]
    for name, row in medians["short"].items():
        if name == "direct":
            continue
        found["requests_per_s"][name] = row["requests_per_s"] / stock["requests_per_s"]
        found["cpu"][name] = stock["router_cpu_ms"] / max(row["router_cpu_ms"], 1e-9)
        found["added_p99_ms"][name] = medians["one by one"][name]["p99_ms"] - direct["p99_ms"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve_upstream(options.serve))
        return
    with tempfile.TemporaryDirectory() as name, upstreams(Path(name)) as workers:
        time.sleep(0.5)
        with routers(Path(name), workers, options.processes) as running:
            medians = compare(options, workers, running)
    result = {
        "connections": options.connections,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "medians": medians,
        "ratio_to_stock": ratios(medians),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
