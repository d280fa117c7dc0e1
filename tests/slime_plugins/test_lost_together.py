"""Service of the rollout buffer and rollout manager are killed together, and programs elsewhere write on."""

import asyncio
import threading
import time
from pathlib import Path

import httpx
import pytest

from slime_plugins.rollout_buffer import client as clients
from slime_plugins.rollout_buffer import rollout_buffer_example as module
from slime_plugins.rollout_buffer.client import BufferClient
from tests.engines import free_port
from tests.forking import ForkedScript, forking
from tests.run_args import run_args

pytestmark = pytest.mark.slow

GROUP, WANTED, HANGS_S = 2, 3, 300


def manage(url: str, notes: str) -> None:
    """Fetches for rollout after rollout, as a manager does, and notes what each has for good."""
    module.POLL_S = 0.02
    flags = dict(rollout_buffer_url=url, rollout_task_type="outside", run_uid="run", rollout_timeout=HANGS_S)
    sizes = dict(rollout_batch_size=WANTED, n_samples_per_prompt=GROUP, fetch_trajectory_retry_times=-1)
    engines = dict(sglang_router_ip="127.0.0.1", sglang_router_port=1)
    asyncio.run(rollouts(run_args(**flags, **sizes, **engines), Path(notes)))


async def rollouts(args, notes):
    await module._start(args, [])
    while True:
        groups: list = []
        await module._collect(args, groups, WANTED, [])
        with notes.open("a") as file:
            file.writelines(f"{item['uid']}\n" for group in groups for item in group)


class Pair:
    """Both processes, over several lives."""

    def __init__(self, folder: Path) -> None:
        self.port, self.notes, self._folder = free_port(), folder / "notes", folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.notes.touch()

    def start(self) -> None:
        words = ["--port", str(self.port), "--file", str(self._folder / "b.sqlite")]
        self._service = ForkedScript("slime_plugins.rollout_buffer.buffer", words, self._folder / "log")
        self._manager = forking().Process(target=manage, args=(self.url, str(self.notes)), daemon=True)
        self._manager.start()

    def kill(self) -> None:
        for process in (self._service, self._manager):
            process.kill()
        self._service.wait()
        self._manager.join()

    def status(self) -> dict:
        """Nothing while there is no service."""
        assert self._manager.is_alive()
        try:
            return httpx.get(f"{self.url}/buffer/status", timeout=HANGS_S).json()["data"]
        except httpx.TransportError:
            return {}

    def wait_until_started(self) -> None:
        """What is written before belongs to no run."""
        end = time.monotonic() + HANGS_S
        while not self.status().get("asked"):
            assert time.monotonic() < end
            time.sleep(0.02)

    def wait_until_fetched(self, written: int) -> None:
        """Whole rollouts are kept for good, and what is left is held under a lease."""
        kept = written - written % WANTED
        end = time.monotonic() + HANGS_S
        while True:
            counts, noted = self.status().get("groups", {}), len(self.notes.read_text().splitlines())
            assert not counts.get("retired") and time.monotonic() < end, counts
            found = counts.get("leased"), counts.get("acknowledged"), noted
            if found == (written - kept, kept, kept * GROUP):
                return
            time.sleep(0.02)


def write(url: str, numbers: range) -> None:
    client = BufferClient(url, deadline_s=HANGS_S)
    for number in numbers:
        for part in range(GROUP):
            tokens = {"tokens": [1, 2], "response_length": 1, "messages": []}
            client.write({"uid": f"{number}.{part}", "instance_id": str(number), "reward": 1.0, **tokens})


def test_what_was_leased_and_written_comes_once_after_service_and_manager_were_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(clients, "_PAUSE_S", 0.02)
    pair, lives, each = Pair(tmp_path), 3, 5
    pair.start()
    try:
        pair.wait_until_started()
        write(pair.url, range(each))
        pair.wait_until_fetched(each)
        for life in range(1, lives):
            pair.kill()
            more = range(life * each, (life + 1) * each)
            writer = threading.Thread(target=write, args=(pair.url, more))
            writer.start()
            pair.start()
            pair.wait_until_fetched((life + 1) * each)
            writer.join(HANGS_S)
    finally:
        pair.kill()
    given = pair.notes.read_text().splitlines()
    assert sorted(given) == sorted(f"{n}.{part}" for n in range(lives * each) for part in range(GROUP))
