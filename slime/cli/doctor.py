"""``slime doctor``: this machine, and what each part of it lacks for a run."""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

_GIB = 2**30
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_MEMORY, _LEAST_DISK, _LEAST_SHARED, _LEAST_FILES = 4 * _GIB, 5 * _GIB, _GIB, 4096
_PYTHON = (3, 11), (3, 12)

State = Literal["ok", "note", "lack"]


@dataclass(frozen=True)
class Finding:
    """A line of the page.

    Attributes:
        state: "lack" where runs fail or crawl, "note" where something optional is missing.
        advice: what to do about it.
    """

    part: str
    state: State
    found: str
    advice: str = ""


def run(words: Sequence[str]) -> int:
    """Prints a line for each part; exit status 1 if one lacks what a run needs."""
    parser = argparse.ArgumentParser("slime doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    as_json = parser.parse_args(words).json
    lacking = 0
    for finding in findings():
        lacking += finding.state == "lack"
        print(json.dumps(asdict(finding)) if as_json else line(finding), flush=True)
    if not as_json:
        print(f"\n{lacking} part(s) lack what a run needs." if lacking else "\nA run can start here.")
    return int(lacking > 0)


def line(finding: Finding) -> str:
    """A finding for people: its advice stands below it."""
    text = f"{finding.state:<5} {finding.part:<14} {finding.found}"
    return f"{text}\n{'':<21}-> {finding.advice}" if finding.advice else text


def findings() -> Iterator[Finding]:
    """All parts, those that are looked at fast first."""
    for look in LOOKS:
        try:
            yield from look()
        except ModuleNotFoundError as error:  # also a broken installation is told what it lacks
            part = look.__name__.replace("_", " ")
            yield Finding(part, "note", f"not looked at, without the package {error.name}")


def python() -> Iterator[Finding]:
    """The interpreter."""
    found = f"{sys.version.split()[0]} in {sys.prefix}"
    good = _PYTHON[0] <= sys.version_info[:2] <= _PYTHON[1]
    yield (
        Finding("Python", "ok", found)
        if good
        else Finding("Python", "lack", found, "wanted: Python 3.11 or 3.12")
    )


def processors() -> Iterator[Finding]:
    """Cores that this process may use, and how busy they are."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    found = f"{cores} cores, load {load:.1f}"
    if load > 2 * cores:
        yield Finding("processors", "note", found, "the machine is busy: starts take several times as long")
    elif cores < 2:
        yield Finding("processors", "note", found, "trainer and engine take turns on one core: slow")
    else:
        yield Finding("processors", "ok", found)


def memory() -> Iterator[Finding]:
    """Memory of the host or of its container."""
    from slime.utils.host_memory import host_memory

    total, available = host_memory()
    found = f"{size(available)} free of {size(total)}"
    advice = f"wanted: {size(_LEAST_MEMORY)} for the quickstart; slime check says what a run needs"
    yield _at_least("memory", found, available, _LEAST_MEMORY, advice)


def disk() -> Iterator[Finding]:
    """Space where runs write: here, and where temporary files go, those of Ray too."""
    for part, place in (("disk", Path.cwd()), ("temporary", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(place).free
        writable = os.access(place, os.W_OK)
        found = f"{size(free)} free in {place}" + ("" if writable else ", not writable")
        advice = f"wanted: {size(_LEAST_DISK)}, writable" + (", or another TMPDIR" if "temp" in part else "")
        yield _at_least(part, found, free if writable else 0, _LEAST_DISK, advice)


def shared_memory() -> Iterator[Finding]:
    """What weights and batches pass through; containers often have 64 MiB of it."""
    if not _SHARED_MEMORY.is_dir():
        yield Finding("shared memory", "lack", f"no {_SHARED_MEMORY}", "wanted: a Linux with it mounted")
        return
    free = shutil.disk_usage(_SHARED_MEMORY).free
    advice = f"wanted: {size(_LEAST_SHARED)}; docker run --shm-size 8g, or --ipc host"
    yield _at_least("shared memory", f"{size(free)} free in {_SHARED_MEMORY}", free, _LEAST_SHARED, advice)


def open_files() -> Iterator[Finding]:
    """How many files and sockets a process may have open: Ray and HTTP need many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _at_least("open files", f"{soft} of {hard}", soft, _LEAST_FILES, f"ulimit -n {min(hard, 65536)}")


def ports() -> Iterator[Finding]:
    """Whether servers can listen on loopback and under this node's address."""
    from slime.utils.addresses import find_available_port, get_host_info, is_port_available

    name, address = get_host_info()
    try:
        port = find_available_port(20_000)
    except RuntimeError as error:
        yield Finding("ports", "lack", str(error), "wanted: a loopback interface with free ports")
        return
    if is_port_available(port, address):
        yield Finding("ports", "ok", f"free from {port}; {name} is {address}")
    else:
        advice = "wanted: an address of this machine in SLIME_HOST_IP"
        yield Finding("ports", "lack", f"nothing can listen on {address} ({name})", advice)


def cluster() -> Iterator[Finding]:
    """The Ray cluster that runs from here would join."""
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        yield Finding("Ray cluster", "ok", "RAY_ADDRESS is not set: each run starts its own")
    elif _answers(address):
        yield Finding("Ray cluster", "ok", f"somebody listens at RAY_ADDRESS {address}")
    else:
        advice = "unset RAY_ADDRESS, or ray start --head there"
        yield Finding("Ray cluster", "lack", f"nobody listens at RAY_ADDRESS {address}", advice)


def _answers(address: str) -> bool:
    import socket

    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return True  # another form, which Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def packages() -> Iterator[Finding]:
    """Versions of what the package needs, against the ranges that it declares."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in requires("slime") or ()]
    except PackageNotFoundError:
        yield Finding("packages", "note", "slime is not installed", "pip install -e . in the checkout")
        return
    known = []
    for need in needed:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        found = _version_of(need.name)
        if found is None or not need.specifier.contains(found, prereleases=True):
            yield Finding(
                need.name, "lack", found or "not installed", f"pip install '{need.name}{need.specifier}'"
            )
        elif need.name in ("torch", "ray", "megatron-core", "transformers", "sglang-router"):
            known.append(f"{need.name} {found}")
    yield Finding("packages", "ok", ", ".join(known))


def gpus() -> Iterator[Finding]:
    """GPUs, and the library by which they speak."""
    from slime.utils.hardware import has_gpu

    if not has_gpu():
        yield Finding("GPUs", "ok", "none: logical GPUs on the CPU, with gloo and the embedded engine")
        return
    import torch

    from slime.utils.accelerator import gpu_count

    for index in range(gpu_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found = f"{properties.name}, {size(free)} free of {size(total)}"
        busy = free < 0.9 * total
        yield Finding(f"GPU {index}", "note" if busy else "ok", found, "in use already" if busy else "")
    yield from _nccl()


def _nccl() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        advice = "wanted: a build of torch for this GPU, as PyPI's"
        yield Finding("NCCL", "lack", f"not in torch {torch.__version__}", advice)
        return
    number = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding("NCCL", "ok", f"{number}, torch for CUDA {torch.version.cuda}")


def sglang() -> Iterator[Finding]:
    """The engine for GPUs; without it the embedded one serves."""
    found, grammars = _version_of("sglang"), _version_of("xgrammar")
    if found:
        yield Finding("SGLang", "ok", found)
    else:
        advice = "on GPUs: pip install 'slime[sglang]'" if shutil.which("nvidia-smi") else ""
        text = "not installed: the embedded engine serves"
        text += f" (grammars by xgrammar {grammars})" if grammars else " (without xgrammar no grammars)"
        yield Finding("SGLang", "note" if advice else "ok", text, advice)


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _at_least(part: str, found: str, value: float, least: float, advice: str) -> Finding:
    return Finding(part, "ok", found) if value >= least else Finding(part, "lack", found, advice)


def size(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(python, processors, memory, disk, shared_memory, open_files, ports, cluster),
    *(packages, sglang, gpus),
)
"""What is looked at, in order; a part is a function here."""
