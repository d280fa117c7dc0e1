"""Probes of what a path carries at most: they move what they say, and leave nothing."""

import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from slime.config.run import run_config
from slime.weight_sync import floor
from slime.weight_sync.floor import copy_speed, disk_speed, loopback_speed, probe_size
from slime.weight_sync.transports import engine_group
from slime.weight_sync.transports.broadcast import BroadcastTransport
from slime.weight_sync.transports.disk import DiskTransport
from slime.weight_sync.transports.handle import HandleTransport
from tests.run_args import run_args

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch):
    """What attempts take by the clock of the probes."""
    times = [0.0]
    for took in (4.0, 2.0, 3.0):
        times += [times[-1] + took] * 2
    monkeypatch.setattr(floor, "perf_counter", lambda: times.pop(0))


def test_the_fastest_of_a_few_attempts_counts(seconds, tmp_path):
    assert copy_speed(800, CPU) == 400.0


def test_a_file_is_written_whole_and_is_gone(seconds, tmp_path):
    assert disk_speed(1 << 20, tmp_path) == (1 << 20) / 2.0 and not [*tmp_path.iterdir()]
    with pytest.raises(OSError):
        disk_speed(10, tmp_path / "missing")


def test_all_bytes_go_through_the_loopback_device(seconds, monkeypatch):
    read, received = floor._receive, []

    def counted(receiver: socket.socket, target: memoryview) -> None:
        read(receiver, target)
        received.append(bytes(target))

    monkeypatch.setattr(floor, "_receive", counted)
    assert loopback_speed(3 << 20) == (3 << 20) / 2.0
    assert received == [b"\1" * (3 << 20)] * 3


def test_a_connection_that_breaks_off_ends_the_probe():
    left, right = socket.socketpair()
    left.close()
    with right, pytest.raises(ConnectionError):
        floor._receive(right, memoryview(bytearray(2)))


def test_a_probe_is_of_a_bucket_and_never_large():
    assert [probe_size(size, CPU) for size in (7, 1 << 40)] == [7, 8 << 20]
    assert probe_size(1 << 40, torch.device("cuda")) == 256 << 20


def _made(kind, **flags):
    return kind(run_config(run_args(distributed_timeout_minutes=1, **flags)))


def test_a_handle_needs_two_copies(monkeypatch):
    monkeypatch.setattr("slime.weight_sync.transports.handle.copy_speed", lambda nbytes, device: 2.0 * nbytes)
    assert _made(HandleTransport, update_weight_buffer_size=100).path_speed() == 100.0


@pytest.mark.parametrize(
    ("host", "backend", "known"),
    [("127.0.0.1", "gloo", True), ("10.0.0.1", "gloo", False), ("127.0.0.1", "nccl", False)],
)
def test_a_group_is_probed_where_loopback_is_its_path(monkeypatch, host, backend, known):
    monkeypatch.setattr(engine_group, "process_group_backend", lambda: backend)
    monkeypatch.setattr(engine_group, "loopback_speed", float)
    transport = _made(BroadcastTransport, update_weight_buffer_size=100)
    transport._engines = SimpleNamespace(endpoints=[SimpleNamespace(url=f"http://{host}:1")])
    assert transport.path_speed() == (100.0 if known else float("inf"))


def test_a_directory_that_cannot_be_probed_is_named(tmp_path):
    flags = {"update_weight_disk_dir": str(tmp_path / "gone"), "update_weight_transport": "disk"}
    transport = _made(DiskTransport, synced_checkpoint=str(tmp_path), **flags)
    assert transport.path_speed() == float("inf")  # without engines there is no path
    transport._engines = SimpleNamespace(endpoints=[1])
    transport._timeout = timedelta(seconds=60)
    with pytest.raises(RuntimeError, match=f"--update-weight-disk-dir {tmp_path}/gone: "):
        transport.path_speed()
