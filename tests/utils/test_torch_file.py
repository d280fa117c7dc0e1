"""Files of plain data are read without torch's slow unpickler; all others as torch reads or refuses them."""

import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.utils import torch_file
from slime.utils.torch_file import load_without_globals
from slime.utils.types import Sample

SHARED = torch.arange(6, dtype=torch.int32)
SAMPLE = Sample(
    index=1,
    tokens=[0, 255, 256, 65536, -1, 2**31, 2**80],
    rollout_log_probs=[-0.5, float("-inf")],
    response="half \ud83d and é",
    metadata={
        "shared": [SHARED, SHARED.view(2, 3).T],
        "odd": [{1, 2}, b"\x00\xff", (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), None, True, False],
        "dtypes": [torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.bool, torch.int64)],
        "many": [str(number) for number in range(400)],
    },
).to_dict()
PLAIN = {"rollout_id": 3, "samples": [SAMPLE], "ordered": OrderedDict(a=1), "empty": torch.zeros(0)}


def packed(path: Path, data: bytes) -> Path:
    """A file of torch's with this pickle in it."""
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, content in (("data.pkl", data), ("byteorder", b"little"), ("data/0", b"\x00" * 8)):
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return path


def pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as file:
        (name,) = (name for name in file.namelist() if name.endswith("data.pkl"))
        return file.read(name)


@pytest.fixture
def only_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would be left to torch fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("left to torch's unpickler")

    monkeypatch.setattr(torch, "load", refuse)


@pytest.mark.parametrize("mmap", [False, True])
def test_what_recordings_hold_is_read_without_torch_s_unpickler(tmp_path, only_fast, mmap) -> None:
    torch.save(PLAIN, tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    found = load_without_globals(tmp_path / "a.pt", mmap=mmap)
    assert str(found) == str(PLAIN)
    one, other = found["samples"][0]["metadata"]["shared"]
    one[0] = 7
    assert other[0, 0] == 7, "memory that two tensors share is shared again"
    assert (tmp_path / "a.pt").read_bytes() == before


def test_other_files_are_read_as_torch_reads_them(tmp_path) -> None:
    model = torch.nn.Linear(2, 2).state_dict() | {
        "p": torch.nn.Parameter(torch.ones(1)),
        "eight": torch.ones(2, dtype=torch.float8_e4m3fn),
    }
    torch.save(model, tmp_path / "model.pt")
    torch.save(PLAIN, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save([1, {2}], tmp_path / "new.pt", pickle_protocol=4)
    for name in ("model", "legacy"):
        path = tmp_path / f"{name}.pt"
        assert str(load_without_globals(path)) == str(torch.load(path, weights_only=True))
    for load in (load_without_globals, lambda path: torch.load(path, weights_only=True)):
        with pytest.raises(pickle.UnpicklingError, match="Unsupported operand"):
            load(tmp_path / "new.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "script.pt")
    with pytest.raises(RuntimeError, match="TorchScript"):
        load_without_globals(tmp_path / "script.pt")
    with pytest.raises(FileNotFoundError):
        load_without_globals(tmp_path / "none.pt")


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOSTILE = {
    "calls a function of the system": b"cposix\nmkdir\nX\x04\x00\x00\x00%s\x85R.",
    "names one below a module": b"cbuiltins\neval.__call__\nX\x03\x00\x00\x0012+\x85R.",
    "names it by the stack": b"\x8c\x05posix\x8c\x05mkdir\x93X\x04\x00\x00\x00%s\x85R.",
    "names it within a list": b"]cbuiltins\ngetattr\na.",
    "makes it by an old opcode": b"(X\x04\x00\x00\x00%siposix\nmkdir\n.",
    "makes one of a class": b"cdecimal\nDecimal\n)\x81.",
    "makes one of a class, the older way": b"(cdecimal\nDecimal\no.",
    "asks for a registered name": b"\x82\x01.",
    "gives a function a state": REBUILD + b"N}X\x0c\x00\x00\x00__defaults__Ns\x86b.",
    "says a text is longer than the file": b"X\xff\xff\xff\x7fab.",
    "asks for a storage by a text": b"Pstorage\n.",
    "asks for a storage by a number": b"K\x01Q.",
    "asks for something else": b"(X\x06\x00\x00\x00module" + b"K\x01" * 4 + b"tQ.",
    "asks for a storage that is not there": b"(X\x07\x00\x00\x00storagectorch\nLongStorage\n"
    b"X\x03\x00\x00\x00../X\x03\x00\x00\x00cpuK\x01tQ.",
    "asks for more than there is": b"(X\x07\x00\x00\x00storagectorch\nLongStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQ.",
    "calls a list": b"])R.",
    "holds nothing": b".",
    "does not end": b"]",
    "": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_does_more_than_hold_data_is_refused(tmp_path, monkeypatch, what) -> None:
    monkeypatch.chdir(tmp_path)
    defaults = torch._utils._rebuild_tensor_v2.__defaults__
    path = packed(tmp_path / "a.pt", HOSTILE[what].replace(b"%s", b"made"))
    with pytest.raises(Exception) as refused:  # torch has many kinds
        load_without_globals(path)
    assert type(refused.value) is not MemoryError
    with pytest.raises(Exception):  # noqa: B017
        torch_file._load_flat(path, mmap=False)
    assert not (tmp_path / "made").exists()
    assert torch._utils._rebuild_tensor_v2.__defaults__ is defaults


def test_a_number_in_the_memo_reserves_no_memory(tmp_path) -> None:
    """The unpickler in C has a table as long as the largest, torch's a dict."""
    for number, is_flat in ((256, True), (257, False), (2**31, False)):
        data = b"\x80\x02Nr" + number.to_bytes(4, "little") + b"."
        assert torch_file._is_flat(data) is is_flat
        assert load_without_globals(packed(tmp_path / "a.pt", data)) is None


def test_half_a_file_is_refused_wherever_it_ends(tmp_path) -> None:
    torch.save(
        {"samples": [Sample(tokens=[1, 300, 70000], metadata={"b": b"b"}).to_dict()]}, tmp_path / "a.pt"
    )
    whole, data = (tmp_path / "a.pt").read_bytes(), pickle_of(tmp_path / "a.pt")
    for end in range(len(data)):
        assert not torch_file._is_flat(data[:end])
    assert torch_file._is_flat(data)
    for end in range(0, len(whole), 97):
        (tmp_path / "b.pt").write_bytes(whole[:end])
        with pytest.raises((RuntimeError, EOFError, pickle.UnpicklingError)):
            load_without_globals(tmp_path / "b.pt")


def test_what_damage_makes_of_a_file_is_refused_or_plain(tmp_path) -> None:
    sample = Sample(tokens=[1, 300, 70000], metadata={"t": torch.arange(1), "n": [(1,), {2}, b"b"]}).to_dict()
    torch.save([sample], tmp_path / "a.pt")
    whole, drawn, refused = pickle_of(tmp_path / "a.pt"), random.Random(0), 0
    for _ in range(300):
        data = bytearray(whole)
        place = drawn.randrange(len(data))
        data[place : place + drawn.randrange(2)] = bytes(
            [drawn.choice(b"K]})(NtaesuRQbico\x81\x85hqjrXGJM.")]
        )
        try:
            found = torch_file._load_flat(packed(tmp_path / "b.pt", bytes(data)), mmap=False)
        except Exception:
            refused += 1
        else:
            assert kinds(found) <= KINDS
    assert 50 < refused < 300


KINDS = {
    int,
    float,
    str,
    bytes,
    bool,
    type(None),
    torch.Tensor,
    *(type(value) for value in torch_file._MADE.values()),
}
KINDS |= {torch.serialization.StorageType, torch.storage.TypedStorage}


def kinds(value: Any) -> set[type]:
    if type(value) is dict:
        return {kind for pair in value.items() for part in pair for kind in kinds(part)}
    if type(value) in (list, tuple, set):
        return {kind for part in value for kind in kinds(part)}
    return {type(value)}
