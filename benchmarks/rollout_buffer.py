"""Durable writes and reads of the rollout buffer per second, beside SQLite alone.

    python benchmarks/rollout_buffer.py [--items 320] [--tokens 1000] [--group 8] [--clients 16] [--rounds 7]

SQLite alone: one row a transaction, in a table with an index of its uids, flushed with each commit as the
buffer's is; its reads take a group's rows and mark them in one transaction. The store does the same through
its own methods. The service is another process, with so many clients that write, and then lease and
acknowledge groups, at once; those that wait at the same time share a flush. All take turns in each round. The
file is next to the results, as a temporary folder may be in memory. Writes JSON: medians of the rounds in
trajectories per second, and of the ratios to SQLite alone within a round.
"""

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from slime.utils.addresses import find_available_port  # noqa: E402
from slime_plugins.rollout_buffer.client import BufferClient  # noqa: E402
from slime_plugins.rollout_buffer.store import Item, Store  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "rollout_buffer.json"
START_S = 60.0
Rates = dict[str, float]


def make_items(count: int, group: int, tokens: int) -> list[Item]:
    """Trajectories of so many tokens, half of them the response, with log-probs and a version."""
    length = tokens // 2
    return [
        {
            **dict(uid=str(number), instance_id=str(number // group), messages=[], reward=1.0, extra_info={}),
            **dict(tokens=list(range(number, number + tokens)), response_length=length),
            **dict(rollout_log_probs=[-1 / (1 + k) for k in range(length)], version_spans=[["1", length]]),
        }
        for number in range(count)
    ]


def rate(count: int, work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def sqlite_alone(file: Path, items: Sequence[Item], group: int) -> Rates:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(
        "CREATE TABLE items (id INTEGER PRIMARY KEY, uid TEXT UNIQUE, taken INTEGER, body BLOB)"
    )

    def write() -> None:
        for item in items:
            connection.execute("BEGIN IMMEDIATE")
            row = (item["uid"], orjson.dumps(item))
            connection.execute("INSERT INTO items (uid, taken, body) VALUES (?, 0, ?)", row)
            connection.execute("COMMIT")

    def read() -> None:
        for first in range(1, len(items) + 1, group):
            span = first, first + group
            connection.execute("BEGIN IMMEDIATE")
            rows = connection.execute("SELECT body FROM items WHERE id >= ? AND id < ?", span)
            assert all(orjson.loads(body) for (body,) in rows)
            connection.execute("UPDATE items SET taken = 1 WHERE id >= ? AND id < ?", span)
            connection.execute("COMMIT")

    rates = {"writes": rate(len(items), write), "reads": rate(len(items), read)}
    connection.close()
    return rates


def store_alone(file: Path, items: Sequence[Item], group: int) -> Rates:
    store = Store(file)
    store.begin_run("math", group)

    def write() -> None:
        for item in items:
            store.add(item, group)

    def read() -> None:
        while store.take(1):
            pass

    rates = {"writes": rate(len(items), write), "reads": rate(len(items), read)}
    assert store.current().waiting == 0
    store.close()
    return rates


def over_http(file: Path, items: Sequence[Item], group: int, clients: int) -> Rates:
    port = find_available_port(20000)
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer.buffer", "--port", str(port)]
    process = subprocess.Popen([*command, "--file", str(file), "--group-size", str(group)], cwd=ROOT)
    client = BufferClient(f"http://127.0.0.1:{port}", deadline_s=START_S)
    try:
        client.fetch()
        with ThreadPoolExecutor(clients) as pool:
            write = rate(len(items), lambda: exhaust(pool.map(client.write, items)))
            read = rate(len(items), lambda: exhaust(pool.map(lambda k: take(client, k), range(clients))))
    finally:
        process.kill()
        process.wait()
    return {"writes": write, "reads": read}


def take(client: BufferClient, number: int) -> None:
    """Leases and acknowledges a group at a time, until there is none."""
    for turn in range(10**9):
        lease = f"{number}-{turn}"
        if not client.fetch(lease=lease, max_groups=1):
            return
        client.acknowledge([lease])


def exhaust(values: Iterable[Any]) -> None:
    for _ in values:
        pass


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--items", type=int, default=320)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    items = make_items(args.items // args.group * args.group, args.group, args.tokens)
    ways: dict[str, Callable[[Path], Rates]] = {
        "sqlite": lambda file: sqlite_alone(file, items, args.group),
        "store": lambda file: store_alone(file, items, args.group),
        "http": lambda file: over_http(file, items, args.group, args.clients),
    }
    rounds: list[dict[str, Rates]] = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.output.parent) as folder:
            rounds.append({name: way(Path(folder) / name) for name, way in ways.items()})
    medians = {
        name: {kind: statistics.median(r[name][kind] for r in rounds) for kind in ("writes", "reads")}
        for name in ways
    }
    ratio = {
        name: {
            kind: statistics.median(r[name][kind] / r["sqlite"][kind] for r in rounds)
            for kind in ("writes", "reads")
        }
        for name in ("store", "http")
    }
    setting = {name: getattr(args, name) for name in ("items", "tokens", "group", "clients", "rounds")}
    result = {**setting, "per_s": medians, "ratio": ratio}
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
