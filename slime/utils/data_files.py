"""Records of JSONL and parquet files, in turn or by number, without holding them in memory.

Of a JSONL file memory holds where its lines begin (12 bytes each). A parquet file is unpacked into a
temporary file, which is mapped into memory, when its records are first asked for by number. (``datasets``
would want one schema for all records; those of RL data differ, in their metadata for instance.)
"""

import glob
import os
import re
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson
import pyarrow
import pyarrow.parquet as pq

PARQUET_BATCH = 1024  # rows read at a time
SUFFIXES = (".jsonl", ".parquet")
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d{1,18})?:(?P<stop>-?\d{1,18})?\]$", re.ASCII)

Record = dict[str, Any]


class DataError(ValueError):
    """A data file is missing or malformed; the message names the file and the line or row."""


def parse_path(path: str) -> tuple[str, slice]:
    """Split ``path@[a:b]`` into the path and the slice of its records; without a suffix, all of them."""
    match = _SLICE.match(path)
    if match is None:
        return path, slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def find_files(path: str) -> list[Path]:
    """The file of that name; the JSONL and parquet files in a directory, or those that fit a pattern, sorted.

    Raises:
        DataError: there is none, or it is of another kind.
    """
    if os.path.isdir(path):
        files = sorted(file for file in Path(path).iterdir() if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"{path}: a directory without .jsonl and .parquet files")
        return files
    found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    matches = sorted(filter(os.path.isfile, found))
    if not matches:
        raise DataError(f"{path}: no such data file")
    for file in map(Path, matches):
        if file.suffix not in SUFFIXES:
            raise DataError(f"{file}: found suffix {file.suffix!r}, expected .jsonl or .parquet")
    return [Path(match) for match in matches]


class RecordFile(Protocol):
    """The records of one file. ``where`` names file and line or row, for messages."""

    def __len__(self) -> int: ...

    def where(self, number: int) -> str: ...

    def read(self, number: int) -> Record: ...

    def scan(self, start: int, stop: int) -> Iterator[Record]: ...


class JsonLines:
    """A JSONL file; empty lines are no records."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._starts, self._lines = array("Q"), array("I")
        with file.open("rb") as stream:
            self._stamp = _stamp(stream.fileno())
            position = 0
            for line, text in enumerate(stream, 1):
                if not text.isspace():
                    self._starts.append(position)
                    self._lines.append(line)
                position += len(text)
        self._starts.append(position)

    def __len__(self) -> int:
        return len(self._lines)

    def where(self, number: int) -> str:
        return f"{self._file}:{self._lines[number]}"

    def read(self, number: int) -> Record:
        start, stop = self._starts[number : number + 2]
        stream = _opened(self._file, self._stamp)
        self._check_unchanged(stream)
        return self._parse(number, os.pread(stream.fileno(), stop - start, start))

    def scan(self, start: int, stop: int) -> Iterator[Record]:
        with self._file.open("rb") as stream:
            self._check_unchanged(stream)
            stream.seek(self._starts[start])
            lines = (text for text in stream if not text.isspace())
            for number, text in enumerate(islice(lines, stop - start), start):
                yield self._parse(number, text)

    def _check_unchanged(self, stream: BinaryIO) -> None:
        if _stamp(stream.fileno()) != self._stamp:
            raise DataError(f"{self._file}: has changed since the run began to read it")

    def _parse(self, number: int, text: bytes) -> Record:
        try:
            record = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{self.where(number)}: not valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{self.where(number)}: expected a JSON object, found {type(record).__name__}")
        return record


def _stamp(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=64)
def _opened(file: Path, stamp: tuple[int, ...]) -> BinaryIO:
    """Opens a file; some stay open, fewer than a directory may have, and what is forgotten is closed."""
    return file.open("rb")


class ParquetRows:
    """A parquet file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with _parquet(file) as table:
            self._length = table.metadata.num_rows
        self._batches: list[pyarrow.RecordBatch] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return self._length

    def where(self, number: int) -> str:
        return f"{self._file}: row {number}"

    def read(self, number: int) -> Record:
        if not self._batches:
            self._batches = self._unpack()
            self._starts = list(accumulate((batch.num_rows for batch in self._batches), initial=0))
        batch = bisect_right(self._starts, number) - 1
        return self._batches[batch].slice(number - self._starts[batch], 1).to_pylist()[0]

    def scan(self, start: int, stop: int) -> Iterator[Record]:
        with _parquet(self._file) as table:
            rows = (row for batch in table.iter_batches(PARQUET_BATCH) for row in batch.to_pylist())
            yield from islice(rows, start, stop)

    def _unpack(self) -> list[pyarrow.RecordBatch]:
        with _parquet(self._file) as table, tempfile.NamedTemporaryFile(suffix=".arrow") as unpacked:
            with pyarrow.ipc.new_file(unpacked.name, table.schema_arrow) as writer:
                for batch in table.iter_batches(PARQUET_BATCH):
                    writer.write_batch(batch)
            # The mapping keeps what is in the file when its name is gone.
            reader = pyarrow.ipc.open_file(pyarrow.memory_map(unpacked.name))
            return [reader.get_batch(i) for i in range(reader.num_record_batches)]


@contextmanager
def _parquet(file: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(file) as table:
            yield table
    except OSError as error:  # pyarrow's own errors are ArrowExceptions, those of reading are OSErrors
        raise DataError(f"{file}: cannot read as parquet ({error})") from error
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not a parquet file ({error})") from error


class Records:
    """The records of a path: of a file, a directory or a pattern, perhaps a slice of them all.

    Raises:
        DataError: there is no file, one is neither JSONL nor parquet, or no record is left; a record asked
            for is not a JSON object.
    """

    def __init__(self, path: str) -> None:
        name, selected = parse_path(path)
        self._files: list[RecordFile] = [
            JsonLines(file) if file.suffix == ".jsonl" else ParquetRows(file) for file in find_files(name)
        ]
        self._starts = list(accumulate(map(len, self._files), initial=0))
        self._numbers = range(self._starts[-1])[selected]
        if not self._numbers:
            where = "" if selected == slice(None) else f" in the slice {path[path.rindex('@') :]}"
            raise DataError(f"{name}: holds no record{where}")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: int) -> tuple[str, Record]:
        """Returns where a record is, for messages, and what it holds."""
        file, number = self._find(position)
        return file.where(number), file.read(number)

    def __iter__(self) -> Iterator[tuple[str, Record]]:
        for file, first in zip(self._files, self._starts, strict=False):
            start = max(self._numbers.start - first, 0)
            stop = min(self._numbers.stop - first, len(file))
            for number, record in enumerate(file.scan(start, stop) if start < stop else (), start):
                yield file.where(number), record

    def _find(self, position: int) -> tuple[RecordFile, int]:
        number = self._numbers[position]
        file = bisect_right(self._starts, number) - 1
        return self._files[file], number - self._starts[file]


def read_records(path: str) -> Iterator[tuple[str, Record]]:
    """Yield (where, record) for each record of ``Records``."""
    yield from Records(path)


def read_file(path: str) -> Iterator[Record]:
    """The records of ``read_records`` alone."""
    return (record for _, record in read_records(path))
