"""Copies rows of tensors out of a safetensors file: whole ones by reads, parts of them by short mappings."""

import ctypes
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

# Pages of a mapping count as memory of the process until it ends.
_MAPPED_BYTES = 4 * 1024**2


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, which has to outlive them.

    Not by ``tensor.numpy()``: its storage could never be resized afterwards, as offloading weights does.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class TensorSlices:
    """A file, which has been opened as safetensors before, so that its header is known to be sound."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        length = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(length))
        self._starts = {
            name: 8 + length + entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def close(self) -> None:
        self._file.close()

    def copy(
        self,
        target: torch.Tensor,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        rows: range,
        columns: Sequence[slice],
    ) -> None:
        """Fills ``target`` with ``rows`` of a tensor of one or more dimensions, converting its format.

        Args:
            target: of the shape of that part.
            name: of the tensor.
            dtype, shape: its own.
            rows: which ones.
            columns: what of each row, a slice for each further dimension.
        """
        rest = tuple(shape[1:])
        width = torch.Size(rest).numel() * dtype.itemsize
        start = self._starts[name] + rows.start * width
        whole = torch.Size(target.shape[1:]) == torch.Size(rest)
        if whole and target.dtype == dtype and target.is_cpu and target.is_contiguous():
            self._read(target.view(-1), start)
            return
        step = max(1, _MAPPED_BYTES // max(1, width))
        for at in range(0, len(rows) if width else 0, step):
            part = target[at : at + step]
            self._copy_mapped(part, start + at * width, dtype, (len(part), *rest), columns)

    def _copy_mapped(
        self,
        target: torch.Tensor,
        start: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        columns: Sequence[slice],
    ) -> None:
        """Fills ``target`` with what ``columns`` cut out of the rows of that shape at byte ``start``.

        A read would bring whole rows into a buffer, which costs twice as much where half of them is wanted.
        """
        count = torch.Size(shape).numel()
        end, base = start + count * dtype.itemsize, start - start % mmap.ALLOCATIONGRANULARITY
        if os.fstat(self._file.fileno()).st_size < end:
            raise OSError(f"{self._file.name}: ends before byte {end}")
        with mmap.mmap(self._file.fileno(), end - base, access=mmap.ACCESS_COPY, offset=base) as mapped:
            stored = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start - base).view(*shape)
            target.copy_(stored[(slice(None), *columns)])
            del stored  # else the mapping cannot end

    def _read(self, target: torch.Tensor, start: int) -> None:
        data = bytes_of(target)
        while data:
            count = os.preadv(self._file.fileno(), [data], start)
            if count == 0:
                raise OSError(f"{self._file.name}: ends before byte {start + len(data)}")
            data, start = data[count:], start + count
