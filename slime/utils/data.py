"""Prompts on disk (JSONL or parquet) and the samples made of them."""

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from slime.utils.types import Sample

PARQUET_BATCH = 1024  # rows read at a time
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d{1,18})?:(?P<stop>-?\d{1,18})?\]$", re.ASCII)


class DataError(ValueError):
    """A data file is missing or malformed; the message names the file and the line or row."""


def parse_path(path: str) -> tuple[Path, slice]:
    """Split ``file@[a:b]`` into the file and the slice of its records; without a suffix, all of them."""
    match = _SLICE.match(path)
    if match is None:
        return Path(path), slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return Path(match["path"]), slice(start, stop)


def read_records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, record) for each record of a JSONL or parquet file, ``where`` being for messages.

    Empty JSONL lines are skipped. A suffix ``@[a:b]`` selects records as a Python slice would.

    Raises:
        DataError: the file is missing, of another kind, has no record, or a line is not a JSON object.
    """
    file, selected = parse_path(path)
    if not file.is_file():
        raise DataError(f"{file}: no such data file")
    if file.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{file}: found suffix {file.suffix!r}, expected .jsonl or .parquet")
    records = (_read_jsonl if file.suffix == ".jsonl" else _read_parquet)(file, selected)
    first = next(records, None)
    if first is None:
        where = "" if selected == slice(None) else f" in the slice {path[path.rindex('@') :]}"
        raise DataError(f"{file}: holds no record{where}")
    yield first
    yield from records


def _read_jsonl(file: Path, selected: slice) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as stream:
        start, stop, _ = selected.indices(_count_lines(stream) if _is_relative(selected) else sys.maxsize)
        for number, line in islice(_lines(stream), start, max(start, stop)):
            where = f"{file}:{number}"
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(f"{where}: not valid JSON ({error})") from error
            if not isinstance(record, dict):
                raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
            yield where, record


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1."""
    return ((number, line) for number, line in enumerate(stream, 1) if line.strip())


def _count_lines(stream: BinaryIO) -> int:
    count = sum(1 for _ in _lines(stream))
    stream.seek(0)
    return count


def _is_relative(selected: slice) -> bool:
    """Whether a bound counts from the end, so that the records must be counted first."""
    return any(bound is not None and bound < 0 for bound in (selected.start, selected.stop))


def _read_parquet(file: Path, selected: slice) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(file) as table:
            start, stop, _ = selected.indices(table.metadata.num_rows)
            rows = (row for batch in table.iter_batches(PARQUET_BATCH) for row in batch.to_pylist())
            for number, record in islice(enumerate(rows), start, max(start, stop)):
                yield f"{file}: row {number}", record
    except OSError as error:  # pyarrow's own errors are ArrowExceptions, those of reading are OSErrors
        raise DataError(f"{file}: cannot read as parquet ({error})") from error
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not a parquet file ({error})") from error


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """The records of ``read_records`` alone."""
    return (record for _, record in read_records(path))


def get_source(sample: Sample) -> str:
    """Which data the sample came from, for metrics by source."""
    return getattr(sample, "source", None) or sample.metadata.get("source_name") or "unknown"


@dataclass(frozen=True)
class RecordKeys:
    """The fields of a record; None where a run does without."""

    prompt: str
    label: str | None = None
    tools: str | None = None
    metadata: str | None = None


@dataclass(frozen=True)
class Row:
    """What a record holds, before its prompt is rendered. ``where`` is file and line, for messages."""

    where: str
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    tools: list[Any] | None


def read_rows(path: str, keys: RecordKeys) -> Iterator[Row]:
    """The records of a file, each looked at.

    Raises:
        DataError: see ``read_records``; or a field is missing or null, the prompt is neither text nor a list
            of messages or is blank, or metadata or tools are not what they should be.
    """
    for where, record in read_records(path):
        for key in (keys.prompt, keys.label):
            if key is not None and key not in record:
                raise DataError(f"{where} has no field {key!r} (found: {', '.join(sorted(record))})")
            if key is not None and record[key] is None:
                raise DataError(f"{where}: field {key!r} is null")
        _check_prompt(where, keys.prompt, record[keys.prompt])
        metadata = _parse(where, "metadata", record.get(keys.metadata), dict) if keys.metadata else None
        tools = _parse(where, "tools", record.get(keys.tools), list) if keys.tools else None
        label = record[keys.label] if keys.label else None
        yield Row(where, record[keys.prompt], label, metadata or {}, tools)


def _check_prompt(where: str, key: str, prompt: Any) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: field {key!r} is blank")
        return
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: field {key!r} is {prompt!r:.40}, expected text or a list of messages")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: {message!r:.80} in field {key!r} is no message with a role")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and _does_without_content(message)):
            raise DataError(f"{where}: {message!r:.80} in field {key!r} is no message with content")


def _does_without_content(message: dict[str, Any]) -> bool:
    """Whether a call of a tool, a line of thought or another field stands in for it."""
    return any(value for key, value in message.items() if key != "role")


def _parse(where: str, name: str, value: Any, kind: type) -> Any:
    """A value of that type, perhaps written as JSON; None if there is none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: {name} are not valid JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise DataError(f"{where}: {name} are {type(value).__name__}, expected {wanted}")
    return value


def render_prompt(tokenizer: PreTrainedTokenizerBase, row: Row, template_kwargs: Mapping[str, Any]) -> str:
    """The prompt with a generation prompt, by the tokenizer's chat template.

    Raises:
        DataError: the template fails, or makes nothing of the prompt.
    """
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=row.tools, tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    # Templates are third-party programs; whatever they raise, the user needs to know for which record.
    except Exception as error:
        raise DataError(f"{row.where}: the chat template fails on this prompt ({error})") from error
    if not text:
        raise DataError(f"{row.where}: the chat template makes nothing of this prompt")
    return text


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


class Dataset:
    """Samples with their prompts ready, in file order or in the order of an epoch.

    Args:
        max_length: prompts of more tokens are left out; None keeps all. Message lists are not measured.
        prompt_key: field with the prompt: text or a list of chat messages.
        apply_chat_template: render the prompt, with a generation prompt, through the tokenizer's template.

    Attributes:
        num_too_long: prompts that were left out.
        fingerprint: 16 hex digits that follow from the prompts in file order, as the file has them. How they
            are rendered, labels and metadata don't count: a change of those neither repeats a prompt nor
            leaves one out.

    Raises:
        DataError: see ``read_rows``; or no record is left.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str | None = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = apply_chat_template_kwargs or {}
        self._apply_chat_template = apply_chat_template
        keys = RecordKeys(prompt_key, label_key, tool_key, metadata_key)
        samples, digests = [], {}
        for row in read_rows(path, keys):
            samples.append(self._build_sample(row))
            digests[id(samples[-1])] = _digest(json.dumps(row.prompt, default=repr).encode())
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        self.fingerprint = _digest(b"".join(digests[id(sample)] for sample in self.origin_samples)).hex()
        self.num_too_long = len(samples) - len(self.origin_samples)
        if not self.origin_samples:
            raise DataError(f"{path}: no prompt of at most {max_length} tokens among {len(samples)} records")
        self.samples = self.origin_samples
        self._seed = seed
        self._epoch = -1

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def too_long(self, flag: str) -> list[str]:
        """In one line, which part was left out by a flag; nothing if none was."""
        if not self.num_too_long:
            return []
        total = self.num_too_long + len(self.origin_samples)
        return [f"{self.num_too_long} of {total} prompts are longer than {flag} and left out"]

    def shuffle(self, epoch: int) -> None:
        """Put the samples into the order of an epoch, which depends on seed and epoch alone."""
        if epoch == self._epoch:
            return
        order = list(range(len(self.origin_samples)))
        random.Random(self._seed + epoch).shuffle(order)
        self.samples = [self.origin_samples[i] for i in order]
        self._epoch = epoch

    def _build_sample(self, row: Row) -> Sample:
        rendered = self._apply_chat_template
        return Sample(
            prompt=render_prompt(self._tokenizer, row, self._template_kwargs) if rendered else row.prompt,
            label=row.label,
            metadata=row.metadata | ({"tools": row.tools} if row.tools else {}),
            apply_chat_template_kwargs=dict(self._template_kwargs),
        )


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: PreTrainedTokenizerBase, processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples, in order, whose text prompt has at most ``max_length`` tokens; lists are all kept."""
    if max_length is None:
        return origin_samples
    texts = [sample.prompt for sample in origin_samples if isinstance(sample.prompt, str)]
    lengths = iter(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else ())
    return [s for s in origin_samples if not isinstance(s.prompt, str) or next(lengths) <= max_length]
