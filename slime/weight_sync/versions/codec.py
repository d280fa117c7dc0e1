"""What has changed in the bytes of a tensor, compressed; and checksums of bytes."""

import zlib
from typing import NamedTuple

import blake3
import numpy as np
import torch
import xxhash
import zstandard

from slime.models.checkpoint.tensor_slices import bytes_of

Bytes = np.ndarray
"""uint8, one dimension, in memory of its own or of a tensor that outlives it."""
_LEVEL = 1
_POSITION = np.dtype("<u4")
_MAX_POSITION = int(np.iinfo(_POSITION).max)


class Change(NamedTuple):
    """What has become of a tensor: the compressed difference, and in how many bytes there is one."""

    payload: bytes
    changed: int


def bytes_in(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor on the CPU, which has to outlive the result."""
    return np.frombuffer(bytes_of(tensor), np.uint8)


def checksum(algorithm: str, data: Bytes) -> str:
    """Hexadecimal digits of ``xxh3-128``, ``blake3`` or ``adler32``."""
    view = data.data
    if algorithm == "xxh3-128":
        digest = xxhash.xxh3_128()
        digest.update(view)  # lets other threads go on meanwhile, as the function for all of it does not
        return digest.hexdigest()
    if algorithm == "blake3":
        return blake3.blake3(view).hexdigest()
    if algorithm == "adler32":
        return f"{zlib.adler32(view):08x}"
    raise ValueError(f"checksum {algorithm!r} (wanted: xxh3-128, blake3 or adler32)")


def difference(new: Bytes, base: Bytes, encoding: str) -> Change | None:
    """The way from ``base`` to ``new``, of equal length; None if they are equal.

    ``xor``: new ^ base. ``overwrite``: u32 count, u32 positions in ascending order, the new bytes; all in
    little-endian order.

    Raises:
        ValueError: positions of so many bytes have no room in 32 bits.
    """
    differs = np.bitwise_xor(new, base)
    changed = int(np.count_nonzero(differs))
    if not changed:
        return None
    raw = differs
    if encoding == "overwrite":
        if new.size > _MAX_POSITION:
            raise ValueError(f"overwrite: a tensor of {new.size} bytes (wanted: below 4 GiB, or xor)")
        at = np.flatnonzero(differs)
        head = np.concatenate([[changed], at]).astype(_POSITION)
        raw = np.concatenate([head.view(np.uint8), new[at]])
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    return Change(compressor.compress(raw.data), changed)


def apply(base: Bytes, payload: bytes | memoryview, encoding: str) -> Bytes:
    """``base`` with a change made, in memory of its own.

    Raises:
        ValueError: this is no change of so many bytes.
    """
    if encoding == "xor":
        return np.bitwise_xor(base, _raw(payload, base.size, base.size))
    raw = _raw(payload, _POSITION.itemsize, (1 + base.size) * _POSITION.itemsize + base.size)
    count = int(raw[: _POSITION.itemsize].view(_POSITION)[0])
    start = (1 + count) * _POSITION.itemsize
    if raw.size != start + count:
        raise ValueError(f"{raw.size} bytes of changes (wanted: {start + count}, for {count} positions)")
    at = raw[_POSITION.itemsize : start].view(_POSITION).astype(np.int64)
    if count and (int(at.max()) >= base.size or (np.diff(at) <= 0).any()):
        raise ValueError(f"positions of changes (wanted: ascending, below {base.size})")
    result = base.copy()
    result[at] = raw[start:]
    return result


def _raw(payload: bytes | memoryview, least: int, most: int) -> Bytes:
    """The decompressed payload, whose size its head announces.

    Raises:
        ValueError: it is damaged, or of another size.
    """
    try:
        size = zstandard.frame_content_size(payload)
        if not least <= size <= most:
            raise ValueError(f"{size} bytes of changes (wanted: {least} to {most})")
        data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=max(size, 1))
    except zstandard.ZstdError as error:
        raise ValueError(f"changes cannot be decompressed: {error}") from error
    return np.frombuffer(data, np.uint8)
