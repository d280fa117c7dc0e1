"""Tensors survive the way into and out of buckets and text; nothing else gets in."""

import base64
import io
import os
import pickle
import pickletools
import subprocess
import sys
import time

import psutil
import pytest
import torch

from slime.utils import tensor_bucket
from slime.utils.tensor_bucket import (
    FlatBuffer,
    FlattenedTensorBucket,
    FlattenedTensorMetadata,
    deserialize_tensors,
    serialize_bucket,
    serialize_tensors,
)

TENSORS = [
    ("bytes", torch.arange(3, dtype=torch.uint8)),
    ("float", torch.randn(2, 3)),
    ("half", torch.randn(5).bfloat16()),
    ("transposed", torch.randn(4, 2).T),
    ("empty", torch.empty(0, 3)),
    ("scalar", torch.tensor(2.5, dtype=torch.float64)),
]


def same(found, expected) -> bool:
    return all(
        a == b and x.dtype == y.dtype and torch.equal(x, y)
        for (a, x), (b, y) in zip(found, expected, strict=True)
    )


def test_a_bucket_gives_back_its_tensors():
    bucket = FlattenedTensorBucket(named_tensors=TENSORS)
    again = FlattenedTensorBucket(flattened_tensor=bucket.flattened_tensor, metadata=bucket.metadata)
    assert same(again.reconstruct_tensors(), TENSORS)


def test_metadata_that_does_not_fit_the_buffer_is_refused():
    bucket = FlattenedTensorBucket(named_tensors=TENSORS)
    bucket.metadata[1].end_idx += 4
    with pytest.raises(ValueError, match="'float'"):
        bucket.reconstruct_tensors()


@pytest.mark.parametrize("share", [True, False])
def test_text_gives_back_the_tensors(share):
    assert same(deserialize_tensors(serialize_tensors(TENSORS, share)), TENSORS)


def test_metadata_travels_with_its_bucket():
    bucket = FlattenedTensorBucket(named_tensors=TENSORS)
    text = serialize_tensors({"t": bucket.flattened_tensor, "m": bucket.metadata}, share=False)
    found = deserialize_tensors(text)
    assert found["m"] == bucket.metadata and torch.equal(found["t"], bucket.flattened_tensor)


def test_another_process_reads_shared_tensors_without_a_copy_in_the_text_though_their_manager_is_slow():
    tensors = [("w", torch.ones(100_000))]
    text = serialize_tensors(tensors)
    assert len(text) < 2000
    program = (
        "import sys; from slime.utils.tensor_bucket import deserialize_tensors; print(flush=True); "
        "[(n, t)] = deserialize_tensors(sys.stdin.read()); print(n, t.sum().item())"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as reader:
        reader.stdout.readline()
        manager = manager_of(text)
        manager.suspend()
        try:
            reader.stdin.write(text)
            reader.stdin.close()
            time.sleep(1.5)  # torch waits for one second
        finally:
            manager.resume()
        assert reader.stdout.read().split() == ["w", "100000.0"]


def manager_of(text: str) -> psutil.Process:
    """The process that removes torch's files of shared memory when nobody uses them any more."""
    values = [value for _, value, _ in pickletools.genops(base64.b64decode(text)) if isinstance(value, bytes)]
    (address,) = {value.decode() for value in values if b"/torch-shm-" in value}
    (pid,) = {found.pid for found in psutil.net_connections("unix") if found.laddr == address and found.pid}
    return psutil.Process(pid)


def strings_of(text: str) -> list[str]:
    """Names and texts in a pickle; those of a global are "module name" or come one after the other."""
    return [
        str(value) for _, value, _ in pickletools.genops(base64.b64decode(text)) if isinstance(value, str)
    ]


@pytest.mark.parametrize("share", [True, False])
def test_a_bucket_is_pickled_under_the_names_that_sglang_allows(share):
    bucket = FlattenedTensorBucket(named_tensors=TENSORS)
    text = serialize_tensors({"t": bucket.flattened_tensor, "m": bucket.metadata}, share)
    found = strings_of(text)
    assert "sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata" in found
    assert not [name for name in found if name.startswith("slime")]
    assert "_codecs" not in found


def test_a_bucket_whose_layout_is_known_is_pickled_as_the_first_one_and_by_the_same_names():
    """Also where another pickle lies between, and read by the unpickler in C that servers use."""
    named = [("a.weight", torch.ones(3)), ("a.bias", torch.ones(3)), ("b", torch.zeros(2, 2).bfloat16())]
    buffer = FlatBuffer()
    for value in (1.0, 2.0):
        bucket = buffer.flatten([(name, torch.full_like(tensor, value)) for name, tensor in named])
        for layout in (bucket, FlattenedTensorBucket(named_tensors=TENSORS)):
            text = serialize_bucket(layout)
            whole = serialize_tensors(
                {"flattened_tensor": layout.flattened_tensor, "metadata": layout.metadata}
            )
            assert {*strings_of(text)} == {*strings_of(whole)}
            assert base64.b64decode(text)[:2] == base64.b64decode(whole)[:2]
            readers = (deserialize_tensors, read_in_c)
            for found in (read(one) for one in (text, whole) for read in readers):
                assert found["metadata"] == layout.metadata
                assert torch.equal(found["flattened_tensor"], layout.flattened_tensor)


def test_memory_that_is_shared_from_the_first_is_not_copied_when_it_is_handed_over():
    """Nor is it made anew for a bucket that has room in it; what is too small goes first."""
    shared, places = FlatBuffer(shared=True), []
    for size in (3, 2, 5):
        bucket = shared.flatten([("a", torch.arange(size))])
        place = bucket.flattened_tensor.data_ptr()
        assert bucket.flattened_tensor.is_shared()
        found = deserialize_tensors(serialize_bucket(bucket))["flattened_tensor"]
        assert bucket.flattened_tensor.data_ptr() == place
        assert found.view(torch.int64).tolist() == [*range(size)]
        places.append(place)
    assert places[0] == places[1]
    assert not FlatBuffer().flatten([("a", torch.ones(2))]).flattened_tensor.is_shared()


def test_a_buffer_that_grows_lets_go_of_its_file_before_it_gets_another(monkeypatch):
    def files():
        return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}

    def counted(size):
        found.append(len(files() - before))
        return making(size)

    making, before, found = tensor_bucket.shared_memory, files(), []
    monkeypatch.setattr(tensor_bucket, "shared_memory", counted)
    shared = FlatBuffer(shared=True)
    for size in (1000, 100_000):
        shared.flatten([("a", torch.ones(size))])
    assert found == [0, 0] and len(files() - before) == 1


def read_in_c(text: str):
    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            ours = module == "sglang.srt.weight_sync.tensor_bucket"
            return FlattenedTensorMetadata if ours else super().find_class(module, name)

    storage = deserialize_tensors(text)["flattened_tensor"].untyped_storage()
    storage._shared_incref()  # each reader takes one off
    return Reader(io.BytesIO(base64.b64decode(text))).load()


@pytest.mark.parametrize(
    "target", [b"ctorch.nn.parameter\nParameter\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nSize\n"]
)
def test_a_pickle_cannot_set_attributes_of_classes_and_functions(target):
    for state in (b"N(S'planted'\nI1\nd\x86", b"(S'planted'\nI1\nd"):
        text = base64.b64encode(b"\x80\x04" + target + state + b"b.").decode()
        with pytest.raises(ValueError, match="blocked state"):
            deserialize_tensors(text)
    planted = (torch.nn.Parameter, torch._utils._rebuild_tensor_v2, torch.Size)
    assert not any(hasattr(place, "planted") for place in planted)


def test_old_protocols_are_read():
    data = pickle.dumps(TENSORS[:2], protocol=2)
    assert same(deserialize_tensors(base64.b64encode(data).decode()), TENSORS[:2])


class Evil:
    def __reduce__(self):
        return (print, ("owned",))


@pytest.mark.parametrize(
    "data", [b"", b"hello", pickle.dumps(Evil()), pickle.dumps(torch.load), pickle.dumps(eval)]
)
def test_anything_else_is_refused(data, capsys):
    with pytest.raises(ValueError, match="serialized tensors"):
        deserialize_tensors(base64.b64encode(data).decode())
    assert "owned" not in capsys.readouterr().out
