"""How fast the path of a transport can be at most: what its bytes would take without us.

Probes are small and run once, when engines are connected: at most 8 MiB on a CPU, some 20 to 60 ms.
"""

import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from slime.utils.accelerator import synchronize

_ATTEMPTS = 3
_ON_CPU, _ON_GPU = 8 * 1024**2, 256 * 1024**2


def probe_size(bucket_bytes: int, device: torch.device) -> int:
    """Bytes of a probe: a bucket's, if they are not too many."""
    return min(bucket_bytes, _ON_CPU if device.type == "cpu" else _ON_GPU)


def copy_speed(nbytes: int, device: torch.device) -> float:
    """Bytes per second of a copy within the memory of a device."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def copy() -> None:
        target.copy_(source)
        synchronize(device)

    return speed_of(nbytes, copy)


def disk_speed(nbytes: int, directory: Path) -> float:
    """Bytes per second of a file that is written to a directory, which does not keep it.

    Raises:
        OSError: the directory cannot be written.
    """
    data = torch.ones(nbytes, dtype=torch.uint8).numpy().data

    def write() -> None:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(data)

    return speed_of(nbytes, write)


def loopback_speed(nbytes: int) -> float:
    """Bytes per second of a TCP connection on this machine."""
    data = torch.ones(nbytes, dtype=torch.uint8).numpy().data
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=10) as sender,
        server.accept()[0] as receiver,
    ):
        receiver.settimeout(10)
        target = memoryview(bytearray(nbytes))

        def send() -> None:
            sending = threading.Thread(target=sender.sendall, args=(data,), name="probe-loopback")
            sending.start()
            _receive(receiver, target)
            sending.join()

        return speed_of(nbytes, send)


def _receive(receiver: socket.socket, target: memoryview) -> None:
    while target:
        got = receiver.recv_into(target)
        if not got:
            raise ConnectionError("the probe of the loopback device was broken off")
        target = target[got:]


def speed_of(nbytes: int, act: Callable[[], None]) -> float:
    """Bytes per second of the fastest of a few attempts, for which memory has been touched before."""
    best = float("inf")
    for _ in range(_ATTEMPTS):
        start = perf_counter()
        act()
        best = min(best, perf_counter() - start)
    return nbytes / max(best, 1e-9)
