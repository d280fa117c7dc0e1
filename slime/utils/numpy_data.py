"""numpy's scalars and arrays in torch's files, read without running anything and made plain.

Recordings and states of others hold them: labels and metadata that came out of a parquet file, for instance.
"""

from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from torch.serialization import safe_globals

from slime.utils.torch_file import load_without_globals
from slime.utils.types import plain

_KINDS = "biufcSUmM"
_READING = RLock()  # what is safe to make is one list for all threads


def load_plain(path: str | Path) -> Any:
    """The content of a torch file of plain data, tensors and numpy's types; those as Python's and torch's.

    Raises:
        pickle.UnpicklingError: it holds something else, which is not made.
    """
    return plain(load_as_it_is(path))


def load_as_it_is(path: str | Path) -> Any:
    """The content of such a file with numpy's types, and without a walk through what it holds.

    Raises:
        pickle.UnpicklingError: it holds something else, which is not made.
    """
    with _READING, safe_globals(_MADE):
        return load_without_globals(path)


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if dtype.kind not in _KINDS or not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise ValueError(f"a scalar of dtype {dtype} (wanted: a number, text or a time)")
    return np.frombuffer(data, dtype)[0]


def _encode(text: str, encoding: str) -> bytes:
    """How old pickles write bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes encoded as {encoding!r} (wanted: latin1)")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """How old pickles write those of an empty array."""
    return b""


def _array(kind: type, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An empty array, which its state fills; what it would hold at first is of no size."""
    if kind is not np.ndarray or shape != (0,):
        raise ValueError(f"an array of type {kind!r} and shape {shape} (wanted: an ndarray)")
    return np.ndarray(0, "b")


_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_DTYPES = [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name.endswith("DType")]
_MADE: list[Any] = [
    np.ndarray,
    np.dtype,
    *_DTYPES,
    (_encode, "_codecs.encode"),
    *((_no_bytes, f"{module}.bytes") for module in ("builtins", "__builtin__")),
    *((_array, f"{module}._reconstruct") for module in _ARRAYS),
    *((_scalar, f"{module}.scalar") for module in _ARRAYS),
]
