"""Memory of the machine and of containers."""

from pathlib import Path

import psutil
import pytest

from slime.utils import host_memory as module
from slime.utils.host_memory import HostMemory, container_memory, host_memory

_SECOND = {"memory.max": "8000\n", "memory.current": "5000\n", "memory.stat": "anon 10\ninactive_file 700\n"}
_FIRST = {
    "memory/memory.limit_in_bytes": "8000\n",
    "memory/memory.usage_in_bytes": "5000\n",
    "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 700\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("files", [_SECOND, _FIRST], ids=["second", "first"])
def test_a_container_has_what_its_limit_leaves_and_what_caches_of_files_hold(tmp_path, files):
    assert container_memory(write(tmp_path, files)) == HostMemory(8000, 3700)


@pytest.mark.parametrize("files", [{}, _SECOND | {"memory.max": "max\n"}], ids=["no group", "no limit"])
def test_there_may_be_no_limit(tmp_path, files):
    assert container_memory(write(tmp_path, files)) is None


def test_less_is_left_where_more_is_used_than_allowed(tmp_path):
    files = _SECOND | {"memory.current": "9000\n"}
    assert container_memory(write(tmp_path, files)) == HostMemory(8000, 0)


def test_the_tighter_of_machine_and_container_counts(tmp_path, monkeypatch):
    machine = psutil.virtual_memory()
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert host_memory() == HostMemory(machine.total, machine.available)
    write(tmp_path, _SECOND)
    assert host_memory() == HostMemory(8000, 3700)
    write(tmp_path, {"memory.max": f"{machine.total + 1}\n"})
    assert host_memory() == HostMemory(machine.total, machine.available)
