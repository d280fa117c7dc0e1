"""Prompts on disk (JSONL or parquet) and the samples made of them."""

import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from slime.utils.types import Sample

PARQUET_BATCH = 1024  # rows read at a time
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


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
        DataError: the file is missing, of another kind, or a line is not a JSON object.
    """
    file, selected = parse_path(path)
    if not file.is_file():
        raise DataError(f"{file}: no such data file")
    if file.suffix == ".jsonl":
        yield from _read_jsonl(file, selected)
    elif file.suffix == ".parquet":
        yield from _read_parquet(file, selected)
    else:
        raise DataError(f"{file}: found suffix {file.suffix!r}, expected .jsonl or .parquet")


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
    except OSError as error:  # pyarrow's ArrowInvalid is a ValueError, its I/O errors are OSErrors
        raise DataError(f"{file}: cannot read as parquet ({error})") from error
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a parquet file ({error})") from error


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """The records of ``read_records`` alone."""
    return (record for _, record in read_records(path))


def get_source(sample: Sample) -> str:
    """Which data the sample came from, for metrics by source."""
    return getattr(sample, "source", None) or sample.metadata.get("source_name") or "unknown"


class Dataset:
    """Samples with their prompts ready, in file order or in the order of an epoch.

    Args:
        max_length: prompts of more tokens are left out; None keeps all. Message lists are not measured.
        prompt_key: field with the prompt: text or a list of chat messages.
        apply_chat_template: render the prompt, with a generation prompt, through the tokenizer's template.

    Attributes:
        num_too_long: prompts that were left out.

    Raises:
        DataError: see ``read_records``; or a record lacks a field, or no record is left.
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
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._keys = (prompt_key, label_key, tool_key, metadata_key)
        self._template_kwargs = apply_chat_template_kwargs or {}
        self._apply_chat_template = apply_chat_template
        samples = [self._build_sample(where, record) for where, record in read_records(path)]
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        self.num_too_long = len(samples) - len(self.origin_samples)
        if not self.origin_samples:
            limit = "" if max_length is None else f" of at most {max_length} tokens"
            raise DataError(f"{path}: no prompt{limit} among {len(samples)} records")
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

    def _build_sample(self, where: str, record: dict[str, Any]) -> Sample:
        prompt_key, label_key, tool_key, metadata_key = self._keys
        metadata = _parse_metadata(where, record.get(metadata_key))
        tools = _parse_tools(where, record.get(tool_key)) if tool_key else None
        if tools:
            metadata["tools"] = tools
        check_record(where, record, prompt_key, label_key)
        prompt = record[prompt_key]
        return Sample(
            prompt=self._render(where, prompt, tools) if self._apply_chat_template else prompt,
            label=record[label_key] if label_key else None,
            metadata=metadata,
            apply_chat_template_kwargs=dict(self._template_kwargs),
        )

    def _render(self, where: str, prompt: str | list[dict[str, Any]], tools: list[Any] | None) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **self._template_kwargs
            )
        # Templates are third-party programs; whatever they raise, the user needs to know for which record.
        except Exception as error:
            raise DataError(f"{where}: the chat template fails on this prompt ({error})") from error


def check_record(where: str, record: dict[str, Any], prompt_key: str | None, label_key: str | None) -> None:
    """Whether a record holds what a sample is made of.

    Raises:
        DataError: a field is missing or null, or the prompt is neither text nor a list of messages.
    """
    for key in (prompt_key, label_key):
        if key is not None and key not in record:
            raise DataError(f"{where} has no field {key!r} (found: {', '.join(sorted(record))})")
        if key is not None and record[key] is None:
            raise DataError(f"{where}: field {key!r} is null")
    if prompt_key is not None and not isinstance(record[prompt_key], str):
        _check_messages(where, prompt_key, record[prompt_key])


def _check_messages(where: str, key: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: field {key!r} is {messages!r:.40}, expected text or a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: {message!r:.80} in field {key!r} is no message with a role")


def _parse_metadata(where: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = _parse_json(where, "metadata", value)
    if value is not None and not isinstance(value, dict):
        raise DataError(f"{where}: metadata is {type(value).__name__}, expected an object")
    return dict(value or {})


def _parse_tools(where: str, value: Any) -> list[Any] | None:
    if isinstance(value, str):
        value = _parse_json(where, "tools", value)
    if value is not None and not isinstance(value, list):
        raise DataError(f"{where}: tools are {type(value).__name__}, expected a list")
    return value


def _parse_json(where: str, name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: {name} are not valid JSON ({error})") from error


def filter_long_prompt(
    samples: list[Sample], tokenizer: PreTrainedTokenizerBase, processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples, in order, whose text prompt has at most ``max_length`` tokens; lists are all kept."""
    if max_length is None:
        return samples
    texts = [sample.prompt for sample in samples if isinstance(sample.prompt, str)]
    lengths = iter(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else ())
    return [s for s in samples if not isinstance(s.prompt, str) or next(lengths) <= max_length]
