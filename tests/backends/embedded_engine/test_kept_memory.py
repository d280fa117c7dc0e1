"""Shared memory is mapped once for all buckets that come through it, and let go of with its file."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from slime.backends.embedded_engine import kept_memory
from slime.backends.embedded_engine.kept_memory import KeptMemory
from slime.processes.reaper import sweep
from slime.utils.tensor_bucket import (
    FlatBuffer,
    FlattenedTensorBucket,
    deserialize_tensors,
    serialize_bucket,
    serialize_tensors,
)

LONG, SHORT = torch.arange(5000.0), torch.full((3,), 7.0)


@pytest.fixture
def memory():
    return KeptMemory()


def read(memory: KeptMemory, text: str) -> torch.Tensor:
    """The tensor of a bucket, in the memory that it came through."""
    bucket = FlattenedTensorBucket(**deserialize_tensors(text, memory.storage))
    ((_, tensor),) = bucket.reconstruct_tensors()
    memory.forget_others()
    return tensor


def maps() -> set[str]:
    """The files of shared memory that this process has mapped, each with its address."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "/dev/shm/torch_" in line}


def test_what_comes_through_one_file_is_read_where_the_first_bucket_was(memory):
    buffer = FlatBuffer()
    first = read(memory, serialize_bucket(buffer.flatten([("w", LONG)])))
    assert torch.equal(first, LONG) and first.data_ptr() != buffer._kept.data_ptr()
    for value in (LONG + 1, LONG.flip(0)):
        found = read(memory, serialize_bucket(buffer.flatten([("w", value)])))
        assert torch.equal(found, value) and found.data_ptr() == first.data_ptr()
    short = read(memory, serialize_bucket(buffer.flatten([("v", SHORT)])))
    assert torch.equal(short, SHORT) and short.data_ptr() == first.data_ptr()


def test_a_file_that_no_bucket_comes_through_any_more_is_let_go_of(memory):
    before = maps()
    old, new = FlatBuffer(), FlatBuffer()
    read(memory, serialize_bucket(old.flatten([("w", LONG)])))
    name = next(iter(memory._kept))
    for left in (True, True, False):
        read(memory, serialize_bucket(new.flatten([("w", LONG)])))
        assert (name in memory._kept) == left and len(memory._kept) == 1 + left
    del old, new
    assert not [name for name in memory._kept if os.path.exists("/dev/shm" + name)]
    memory.forget_others()
    assert maps() == before


def test_files_of_several_ranks_stay_mapped_side_by_side(memory):
    buffers = [FlatBuffer() for _ in range(2)]
    for _ in range(2):
        texts = [serialize_bucket(buffer.flatten([("w", LONG)])) for buffer in buffers]
        found = [deserialize_tensors(text, memory.storage)["flattened_tensor"] for text in texts]
        memory.forget_others()
        places = [tensor.data_ptr() for tensor in found]
        assert len({*places}) == len(memory._kept) == 2
    assert places == [one.data.data_ptr() for one in memory._kept.values()]


def test_readers_take_themselves_off_a_file_that_torch_never_maps(memory):
    """So its owner removes it, and no reader does."""
    opened, buffer = [], FlatBuffer()

    def storage(handle, nbytes, mapped):
        return memory.storage(handle, nbytes, lambda: (opened.append(handle), mapped())[1])

    for _ in range(4):
        deserialize_tensors(serialize_bucket(buffer.flatten([("w", LONG)])), storage)
        memory.forget_others()
    ((name, kept),) = memory._kept.items()
    assert opened == [] and kept.readers[0] == 1
    kept.leave()
    assert kept.readers[0] == 1  # that of the owner
    with_two = {"one": buffer._kept[:8], "other": buffer._kept[8:16]}
    deserialize_tensors(serialize_tensors(with_two), storage)
    memory.forget_others()
    assert opened == [] and kept.readers[0] == 1 and os.path.exists("/dev/shm" + name)
    del buffer, with_two
    assert not os.path.exists("/dev/shm" + name)


@pytest.mark.parametrize("buckets", [2, 3])
def test_two_files_that_take_turns_are_mapped_once(memory, buckets, monkeypatch):
    """The first bucket of each update comes through the first one."""
    mapped, files = kept_memory._mapped, [FlatBuffer(), FlatBuffer()]
    made = []
    monkeypatch.setattr(kept_memory, "_mapped", lambda *file: (made.append(file), mapped(*file))[1])
    for update in range(3):
        for bucket in range(buckets):
            value = LONG + 10 * update + bucket
            found = read(memory, serialize_bucket(files[bucket % 2].flatten([("w", value)])))
            assert torch.equal(found, value)
    assert len(made) == 2


def test_a_file_of_the_same_name_is_another_file(memory):
    buffer = FlatBuffer()
    bucket = buffer.flatten([("w", LONG)])
    read(memory, serialize_bucket(bucket))
    ((name, kept),) = memory._kept.items()
    path, aside = Path("/dev/shm" + name), Path("/dev/shm" + name + "_aside")
    aside.write_bytes(path.read_bytes())
    text = serialize_bucket(bucket)
    os.replace(aside, path)  # the name stays, as torch removes it
    found = read(memory, text)
    assert torch.equal(found, LONG) and memory._kept[name].file != kept.file


@pytest.mark.parametrize("more", [-8, 8])
def test_a_mapping_of_another_size_is_not_taken(memory, more):
    """A name and a file say nothing of how much of it a bucket fills."""
    buffer = FlatBuffer()
    read(memory, serialize_bucket(buffer.flatten([("w", LONG)])))
    ((name, kept),) = memory._kept.items()
    with Path("/dev/shm" + name).open("ab") as file:
        file.write(bytes(8))
    wanted = torch.zeros(kept.data.numel() + more, dtype=torch.uint8).untyped_storage()
    found = memory.storage(name.encode(), wanted.nbytes(), lambda: wanted)
    assert found is not wanted and found.nbytes() == wanted.nbytes()


def test_a_file_that_goes_within_a_request_is_let_go_of_at_its_end(memory):
    before = maps()
    buffer = FlatBuffer()
    text = serialize_bucket(buffer.flatten([("w", LONG)]))
    del deserialize_tensors(text, memory.storage)["flattened_tensor"]
    assert len(memory._used) == 1
    del buffer
    memory.forget_others()
    assert not memory._kept and maps() == before


def test_a_file_that_is_gone_is_not_mapped_beside_the_one_in_its_place(memory, monkeypatch):
    old, new = FlatBuffer(), FlatBuffer()
    read(memory, serialize_bucket(old.flatten([("w", LONG)])))
    del old
    mapped, kept = kept_memory._mapped, []
    monkeypatch.setattr(
        kept_memory, "_mapped", lambda *file: (kept.append(len(memory._kept)), mapped(*file))[1]
    )
    read(memory, serialize_bucket(new.flatten([("w", LONG)])))
    assert kept == [0]


@pytest.mark.parametrize(
    ("name", "size"), [("/torch_none_here", 4), ("/../etc/passwd", 4), ("torch_1", 4), ("/other", 4)]
)
def test_where_there_is_no_such_file_torch_s_mapping_stands(memory, name, size):
    storage = torch.zeros(size, dtype=torch.uint8).untyped_storage()
    assert memory.storage(name.encode(), size, lambda: storage) is storage and not memory._used


@pytest.mark.parametrize("change", ["shorter", "link", "empty"])
def test_no_byte_behind_the_end_of_a_file_or_of_another_one_is_mapped(memory, change):
    """Reading there would end the process."""
    name = f"/torch_{os.getpid()}_{change}"
    path, other = Path("/dev/shm" + name), Path(f"/dev/shm/other_{os.getpid()}")
    nbytes = 0 if change == "empty" else 100
    try:
        other.write_bytes(bytes(kept_memory._HEADER + nbytes))
        if change == "link":
            path.symlink_to(other)
        else:
            path.write_bytes(bytes(kept_memory._HEADER + nbytes - (change == "shorter")))
        storage = torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
        assert memory.storage(name.encode(), nbytes, lambda: storage) is storage and not memory._used
    finally:
        path.unlink()
        other.unlink()


READER = """
import sys
import torch
from slime.backends.embedded_engine.kept_memory import KeptMemory
from slime.utils.tensor_bucket import deserialize_tensors

memory = KeptMemory()
for line in sys.stdin:
    try:
        flat = deserialize_tensors(line.strip(), memory.storage)["flattened_tensor"]
        found = flat.view(torch.float32).sum().item()
        del flat
    except ValueError:
        found = "gone"
    memory.forget_others()
    print(found, flush=True)
print(len(memory._kept))
"""
OWNER = """
import time
import torch
from slime.utils.tensor_bucket import FlatBuffer, serialize_bucket

buffer = FlatBuffer()
for value in (1.0, 2.0):
    print(serialize_bucket(buffer.flatten([("w", torch.full((1000,), value))])), flush=True)
    input()
time.sleep(1000)
"""


def started(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)


def said(process: subprocess.Popen[str], line: str) -> str:
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()


@pytest.mark.slow
def test_whoever_has_kept_the_memory_of_a_killed_trainer_lives_on_and_forgets_it():
    """Its file is removed meanwhile, as a reaper does."""
    reader, owner, own = started(READER), started(OWNER), FlatBuffer()
    try:
        assert said(reader, owner.stdout.readline()) == "1000.0\n"
        last = said(owner, "\n")
        assert said(reader, last) == "2000.0\n"
        assert psutil.Process(reader.pid).net_connections("unix") == []  # or torch_shm_manager would stay
        owner.kill()
        owner.wait()
        sweep({owner.pid})
        mapped = Path(f"/proc/{reader.pid}/maps")
        assert f"torch_{owner.pid}_" in mapped.read_text()
        assert said(reader, last) == "gone\n"
        assert f"torch_{owner.pid}_" not in mapped.read_text()
        for value in (3.0, 4.0):
            text = serialize_bucket(own.flatten([("w", torch.full((1000,), value))]))
            assert said(reader, text + "\n") == f"{value * 1000}\n"
        rest, _ = reader.communicate()
        assert (rest, reader.returncode) == ("1\n", 0)
    finally:
        for process in (owner, reader):
            process.kill()
            process.wait()
