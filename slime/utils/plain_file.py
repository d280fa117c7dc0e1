"""torch files of plain data and tensors: whole or not there, and read without running anything."""

import io
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from slime.utils.torch_file import load_without_globals

ZIP_WRITER = "inline_container"
"""What an error of torch's zip writer names."""

_SAFETENSORS_WRITER = ("I/O error", "IoError")  # IoError: before 0.6
_CONTAINERS = (dict, list, tuple)
_LONGEST_REASON = 100


class NotPlainError(ValueError):
    """Data that a file would not give back.

    Attributes:
        keys: where it is, from the outside in.
        found: the type of what is there, and of a container with entries that would come back one by one why
            they do not together.
    """

    def __init__(self, path: Path, keys: tuple[Any, ...], found: str) -> None:
        super().__init__(f"{path}: {place(keys)} is {found} (wanted: plain data and tensors)")
        self.keys, self.found = keys, found


def write_plain(data: dict[str, Any], path: Path) -> None:
    """Writes a file that ``torch.load(weights_only=True)`` can read.

    Raises:
        NotPlainError: the data holds something else, which user code has put there. Found out now and not
            when the file is needed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader must never see half a file, even if the run is killed while it writes.
    partial = path.with_suffix(".partial")
    try:
        torch.save(data, partial)
        load_without_globals(partial, mmap=True)
    except Exception as error:  # how an object is pickled, or is not, is its own code
        partial.unlink(missing_ok=True)
        keys, found = _culprit(data)
        if not keys:  # a full disk, for instance
            raise
        together = f" with entries that do not go together ({reason(error)})" if found in _CONTAINERS else ""
        raise NotPlainError(path, keys, _name(found) + together) from error
    os.replace(partial, path)


def is_write_error(error: BaseException) -> bool:
    """Whether a file system did not take what was written.

    Neither torch's zip writer nor safetensors has an exception for it.
    """
    if isinstance(error, RuntimeError):
        return ZIP_WRITER in str(error)
    if isinstance(error, SafetensorError):
        return any(told in str(error) for told in _SAFETENSORS_WRITER)
    return isinstance(error, OSError)


def reason(error: Exception) -> str:
    """Why torch wrote or read nothing, without its advice to trust the file."""
    text = str(error)
    first = (text.partition("WeightsUnpickler error: ")[2] or text).partition("\n")[0]
    return first[:_LONGEST_REASON] or type(error).__name__


def place(keys: tuple[Any, ...]) -> str:
    """``('metadata', 'env', 0)`` as ``metadata['env'][0]``."""
    return str(keys[0]) + "".join(f"[{key!r}]" for key in keys[1:]) if keys else "all of it"


def _survives(data: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(data, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:
        return False
    return True


def _culprit(data: Any) -> tuple[tuple[Any, ...], type]:
    """The innermost entry that does not survive, and its type."""
    entries = data.items() if type(data) is dict else enumerate(data) if type(data) in _CONTAINERS else ()
    for key, value in entries:
        if not _survives(value):
            keys, found = _culprit(value)
            return (key, *keys), found
    return (), type(data)


def _name(found: type) -> str:
    module = "" if found.__module__ == "builtins" else f"{found.__module__}."
    return module + found.__qualname__
