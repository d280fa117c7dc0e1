"""torch's files as ``torch.load(weights_only=True)`` reads them, those of long lists many times as fast.

torch's restricted unpickler is written in Python and takes seconds for a million numbers. Files of lists,
dicts, texts, numbers and plain tensors, as recordings are, are read by the unpickler of the standard
library, once it is known that they hold nothing that it would do and torch's would not: opcodes are looked
through beforehand, and names are not looked up but taken from a table. Whatever else a file holds is left
to torch's, so that the same files are refused, for the same reasons.
"""

import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import serialization


def load_without_globals(path: str | Path, *, mmap: bool = False) -> Any:
    """Returns what ``torch.load(path, weights_only=True)`` returns.

    Args:
        mmap: tensors are read when they are used; changing them does not change the file.

    Raises:
        pickle.UnpicklingError: it holds something else than plain data and tensors, which is not made.
    """
    try:
        return _load_flat(path, mmap)
    except OSError:
        raise
    except Exception:  # torch's says what is wrong with it, or reads what only looks as if something were
        return torch.load(path, weights_only=True, mmap=mmap)


class _NotFlatError(Exception):
    """A file that is left to torch's unpickler."""


def _load_flat(path: str | Path, mmap: bool) -> Any:
    with open(path, "rb") as file:
        if not serialization._is_zipfile(file):
            raise _NotFlatError
        with serialization._open_zipfile_reader(file) as reader:
            size = os.fstat(file.fileno()).st_size
            mapped = torch.UntypedStorage.from_file(os.fspath(path), False, size) if mmap else None
            ours = SimpleNamespace(Unpickler=_Unpickler)
            return serialization._load(reader, None, ours, overall_storage=mapped, encoding="utf-8")


def _bytes_of(text: str, encoding: str) -> bytes:
    """How pickles of protocol 2 write bytes."""
    if encoding != "latin1":
        raise _NotFlatError
    return text.encode("latin1")


_MADE = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("collections", "OrderedDict"): OrderedDict,
    ("__builtin__", "set"): set,  # as protocol 2 has it
    ("_codecs", "encode"): _bytes_of,
}
"""All that a file can name, besides kinds of storages, which torch's code takes from a table of its own."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], **options: Any) -> None:
        if not _is_flat(file.getvalue()):  # type: ignore[attr-defined]  # torch gives a BytesIO
            raise _NotFlatError
        super().__init__(file, **options)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _MADE:
            raise _NotFlatError
        return _MADE[module, name]


_FIXED = re.compile(
    rb"(?:[\]})(NtaesuRQ\x85-\x89]|(?:K.)++|(?:G.{8})++|(?:J.{4})++|(?:M.{2})++|[hq].|j.{4}|\x80\x02)*+",
    re.DOTALL,
)
"""Opcodes of fixed length that make containers and numbers, call what the table has, and ask for storages."""
_GLOBAL = re.compile(rb"c[\w.]+\n\w+\n")
_FIRST_LONG_MEMO = 256


def _is_flat(data: bytes) -> bool:
    """Whether all opcodes are those of plain data.

    None of them gives an object a state or makes one without a call, and no entry of the memo comes before
    its turn: it is a table as long as its largest index.
    """
    place, memo = 0, _FIRST_LONG_MEMO
    while True:
        place = _FIXED.match(data, place).end()  # type: ignore[union-attr]  # it matches the empty text too
        match data[place : place + 1]:
            case b"X":
                place += 5 + int.from_bytes(data[place + 1 : place + 5], "little")
            case b"U" | b"\x8a":
                place += 2 + int.from_bytes(data[place + 1 : place + 2], "little")
            case b"r":
                if int.from_bytes(data[place + 1 : place + 5], "little") != memo:
                    return False
                place, memo = place + 5, memo + 1
            case b"c":
                found = _GLOBAL.match(data, place)
                if not found:
                    return False
                place = found.end()
            case found_last:
                return found_last == b"."
