"""The rollout buffer is killed under load: what was acknowledged is there, and no group comes twice."""

import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from slime_plugins.rollout_buffer import client as clients
from slime_plugins.rollout_buffer.client import BufferClient
from tests.engines import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GROUP, WRITERS, READERS, MAX_WAITING = 3, 4, 3, 60
HANGS_S = 300
"""Bounds a hang; nothing takes so long."""
KEPT_S, ABANDONED_S = 10 * HANGS_S, 0.2


class Service:
    """The process, on one file and port, over several lives."""

    def __init__(self, folder):
        self.port, self.file, self._log = free_port(), folder / "b.sqlite", folder / "log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        words = ["--port", str(self.port), "--file", str(self.file), "--max-waiting", str(MAX_WAITING)]
        words += ["--group-size", str(GROUP)]
        command = [sys.executable, "-m", "slime_plugins.rollout_buffer.buffer", *words]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def kill(self):
        assert self._process.poll() is None, self._log.read_text()[-4000:]
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@dataclass
class Lease:
    """What a reader was given between two points of time, and whether it would keep it."""

    uids: list[str]
    asked: float
    answered: float
    kept: bool


@dataclass
class Books:
    """What clients were told."""

    written: list[str] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


class Load:
    """Writers of whole groups and readers with leases, some of which they abandon."""

    def __init__(self, url, seed):
        self.url, self.books = url, Books()
        self.stop_writing, self.stop_reading = threading.Event(), threading.Event()
        self._writers, self._readers = (
            [
                threading.Thread(target=self._noting, args=(work, f"{seed}-{work.__name__}-{number}"))
                for number in range(count)
            ]
            for work, count in ((self._write, WRITERS), (self._read, READERS))
        )
        for thread in (*self._writers, *self._readers):
            thread.start()

    def end_writing(self):
        """What writers have begun is written then: one may wait for the service with the first of a group."""
        self.stop_writing.set()
        for thread in self._writers:
            thread.join(HANGS_S)
            assert not thread.is_alive()

    def join(self):
        self.stop_reading.set()
        self.end_writing()
        for thread in self._readers:
            thread.join(HANGS_S)

    def _noting(self, work, name):
        try:
            work(name, random.Random(name), BufferClient(self.url, deadline_s=HANGS_S))
        except BaseException as error:
            self.books.errors.append(error)

    def _write(self, name, draw, client):
        number = 0
        while not self.stop_writing.is_set():
            number += 1
            items = [self._item(f"{name}.{number}", k, draw) for k in range(GROUP)]
            for item in items:
                client.write(item)
                self.books.written.append(item["uid"])
            assert not client.write(draw.choice(items)), "it was new again"

    def _item(self, group, number, draw):
        tokens = [draw.randrange(1000) for _ in range(5)]
        return {
            **dict(uid=f"{group}.{number}", instance_id=group, messages=[], reward=draw.random()),
            **dict(tokens=tokens, response_length=2),
        }

    def _read(self, name, draw, client):
        while not self.stop_reading.is_set():
            lease, kept, asked = uuid.uuid4().hex, draw.random() < 0.8, time.monotonic()
            seconds = KEPT_S if kept else ABANDONED_S
            items = client.fetch(lease=lease, lease_s=seconds, max_groups=draw.randint(1, 4))
            if not items:
                time.sleep(0.01)
                continue
            given = [item["uid"] for item in items]
            self.books.leases.append(Lease(given, asked, time.monotonic(), kept))
            if kept:
                client.acknowledge([lease])
                self.books.acknowledged += given


def wait_until(holds, load):
    end = time.monotonic() + HANGS_S
    while not holds():
        assert not load.books.errors, load.books.errors
        assert time.monotonic() < end
        time.sleep(0.005)


def killed_under_load(folder, kills, seed):
    """The books after so many kills, once all that was written was given out."""
    service, draw = Service(folder), random.Random(seed)
    load = Load(service.url, seed)
    books = load.books
    try:
        for _ in range(kills):
            before = len(books.written), len(books.acknowledged)
            wait_until(lambda b=before: len(books.written) > b[0] and len(books.acknowledged) > b[1], load)
            time.sleep(draw.random() * 0.1)  # anywhere in what goes on
            service.kill()
            service.start()
        load.end_writing()
        wait_until(lambda: waiting(service.url) == 0 and set(books.acknowledged) >= set(books.written), load)
    finally:
        load.join()
        service.kill()
    assert not books.errors
    return books, service.file


def waiting(url):
    try:
        return httpx.get(f"{url}/buffer/status", timeout=HANGS_S).json()["data"]["waiting"]
    except httpx.TransportError:
        return None


def check(books, file):
    assert len(set(books.acknowledged)) == len(books.acknowledged), "a group was given for good twice"
    assert set(books.acknowledged) == set(books.written)
    for lease in books.leases:
        groups = {uid.rpartition(".")[0] for uid in lease.uids}
        assert len(lease.uids) == GROUP * len(groups) == len(set(lease.uids)), "a group was not complete"
    holder = {uid: lease for lease in books.leases if lease.kept for uid in lease.uids}
    for lease in books.leases:
        for uid in lease.uids:
            first = holder[uid]
            if lease is not first:
                assert not lease.kept and lease.asked <= first.answered, f"{uid} was given twice"
    with closing(sqlite3.connect(file)) as other:
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        kept = [uid for (uid,) in other.execute("SELECT uid FROM items WHERE body IS NOT NULL")]
    assert sorted(kept) == sorted(books.written)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(clients, "_PAUSE_S", 0.02)


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_buffer_that_is_killed_under_load_loses_nothing_and_gives_nothing_twice(kills, tmp_path):
    books, file = killed_under_load(tmp_path, kills, seed=kills)
    check(books, file)
    assert len(books.written) >= kills and any(not lease.kept for lease in books.leases)
    print(f"{kills} kills, {len(books.written)} trajectories, {len(books.leases)} leases")
