"""Prompts on disk and the samples made of them."""

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from slime.utils.data_files import DataError, Records, read_file
from slime.utils.data_rows import RecordKeys, Row, make_row, read_rows, render_prompt
from slime.utils.data_sources import epoch_order, find_sources
from slime.utils.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DataError",
    "Dataset",
    "RecordKeys",
    "Row",
    "filter_long_prompt",
    "get_source",
    "read_file",
    "read_rows",
    "render_prompt",
]

MEASURED_AT_ONCE = 1024  # prompts


def get_source(sample: Sample) -> str:
    """Which data the sample came from, for metrics by source."""
    return getattr(sample, "source", None) or sample.metadata.get("source_name") or "unknown"


class Samples(Sequence[Sample]):
    """Samples in some order, each made of its record whenever it is asked for."""

    def __init__(self, make: Callable[[int], Sample], order: Sequence[int] | np.ndarray) -> None:
        self._make, self._order = make, order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._make(int(i)) for i in self._order[index]]
        return self._make(int(self._order[index]))


class Dataset:
    """Samples with their prompts ready, in the order of the files or in that of an epoch.

    A sample is made when it is asked for, and anew each time: a change of one is lost, but ``samples`` may be
    replaced by a list. Memory holds the positions of the records.

    Args:
        path: a file, a directory, a pattern, or a YAML file of several (``slime.utils.data_sources``).
        max_length: prompts of more tokens are left out; None keeps all. Message lists are not measured.
        prompt_key: field with the prompt: text or a list of chat messages.
        apply_chat_template: render the prompt, with a generation prompt, through the tokenizer's template.
        check: look at every record now, and not only when it is asked for.

    Attributes:
        num_too_long: prompts that were left out.
        weighted: whether sources have weights, so that each epoch has an order of its own.

    Raises:
        DataError: see ``read_rows``; or a source has no record left.
    """

    def __init__(
        self,
        path: str,
        tokenizer: "PreTrainedTokenizerBase",
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
        check: bool = True,
    ) -> None:
        self._tokenizer, self._processor, self._max_length = tokenizer, processor, max_length
        self._template_kwargs = apply_chat_template_kwargs or {}
        self._apply_chat_template = apply_chat_template
        self._keys = RecordKeys(prompt_key, label_key, tool_key, metadata_key)
        self._sources = find_sources(path)
        self.weighted = self._sources[0].weight is not None
        self._records = [Records(source.path) for source in self._sources]
        self._kept: list[Sequence[int]] = [range(len(records)) for records in self._records]
        self._fingerprint: str | None = None
        if check or max_length is not None:
            self._kept = self._survey()
        self._starts = list(accumulate(map(len, self._kept), initial=0))
        self.num_too_long = sum(map(len, self._records)) - self._starts[-1]
        self.origin_samples: Sequence[Sample] = Samples(self._make, range(self._starts[-1]))
        self.samples = self.origin_samples
        self._seed = seed
        self._arranged: tuple[int, bool] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    @property
    def fingerprint(self) -> str:
        """16 hex digits that follow from the prompts in file order, as the files have them, and from weights.

        How prompts are rendered, labels and metadata don't count: a change of those neither repeats a prompt
        nor leaves one out. Unless all records were looked at, the first call reads them all.
        """
        if self._fingerprint is None:
            digest = _Digest()
            for source, records in zip(self._sources, self._records, strict=True):
                for where, record in records:
                    digest.add(make_row(where, record, self._keys, source.name))
            self._fingerprint = digest.hex(self._weights())
        return self._fingerprint

    def too_long(self, flag: str) -> list[str]:
        """Says in one line which part a flag left out; nothing if it left out none."""
        if not self.num_too_long:
            return []
        total = self.num_too_long + len(self.origin_samples)
        return [f"{self.num_too_long} of {total} prompts are longer than {flag} and left out"]

    def shuffle(self, epoch: int) -> None:
        """Put the samples into the order of an epoch, which depends on seed and epoch alone."""
        self.arrange(epoch, shuffled=True)

    def arrange(self, epoch: int, shuffled: bool) -> None:
        """Shuffled or not, weighted sources have each epoch go on where the one before it ended."""
        if (epoch, shuffled) == self._arranged:
            return
        sizes = [len(kept) for kept in self._kept] if self.weighted else [len(self.origin_samples)]
        order = epoch_order(sizes, self._weights(), self._seed, epoch, shuffled)
        self.samples = Samples(self.origin_samples.__getitem__, order)
        self._arranged = epoch, shuffled

    def _weights(self) -> list[float] | None:
        return [source.weight or 0.0 for source in self._sources] if self.weighted else None

    def _survey(self) -> list[Sequence[int]]:
        """Look at all records; of each source, the numbers of those that are not too long."""
        digest = _Digest()
        kept: list[Sequence[int]] = []
        for source, records in zip(self._sources, self._records, strict=True):
            rows = (make_row(where, record, self._keys, source.name) for where, record in records)
            numbers, first = array("Q"), 0
            while some := list(islice(rows, MEASURED_AT_ONCE)):
                for number, row in self._fitting(list(enumerate(some, first))):
                    numbers.append(number)
                    digest.add(row)
                first += len(some)
            if not numbers:
                wanted = f"no prompt of at most {self._max_length} tokens among {first} records"
                raise DataError(f"{source.path}: {wanted}")
            kept.append(numbers)
        self._fingerprint = digest.hex(self._weights())
        return kept

    def _fitting(self, rows: list[tuple[int, Row]]) -> list[tuple[int, Row]]:
        if self._max_length is None and not self._apply_chat_template:
            return rows
        samples = [self._build_sample(row) for _, row in rows]
        fit = filter_long_prompt(samples, self._tokenizer, self._processor, self._max_length)
        kept = set(map(id, fit))
        return [row for row, sample in zip(rows, samples, strict=True) if id(sample) in kept]

    def _make(self, position: int) -> Sample:
        number = bisect_right(self._starts, position) - 1
        where, record = self._records[number][self._kept[number][position - self._starts[number]]]
        return self._build_sample(make_row(where, record, self._keys, self._sources[number].name))

    def _build_sample(self, row: Row) -> Sample:
        rendered = self._apply_chat_template
        return Sample(
            prompt=render_prompt(self._tokenizer, row, self._template_kwargs) if rendered else row.prompt,
            label=row.label,
            metadata=row.metadata | ({"tools": row.tools} if row.tools else {}),
            apply_chat_template_kwargs=dict(self._template_kwargs),
        )


class _Digest:
    """A digest of prompts, in their order."""

    def __init__(self) -> None:
        self._all = hashlib.blake2b(digest_size=8)

    def add(self, row: Row) -> None:
        # As ``json.dumps`` writes it, which is how the states of earlier versions have it.
        one = hashlib.blake2b(json.dumps(row.prompt, default=repr).encode(), digest_size=8)
        self._all.update(one.digest())

    def hex(self, weights: list[float] | None) -> str:
        if weights is not None:
            self._all.update(json.dumps(weights).encode())
        return self._all.hexdigest()


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: "PreTrainedTokenizerBase", processor: Any, max_length: int | None
) -> list[Sample]:
    """The samples, in order, whose text prompt has at most ``max_length`` tokens; lists are all kept."""
    if max_length is None:
        return origin_samples
    fast = getattr(tokenizer, "is_fast", False)
    unsure = [
        sample
        for sample in origin_samples
        if isinstance(sample.prompt, str) and not (fast and _is_short(sample.prompt, max_length))
    ]
    texts = [sample.prompt for sample in unsure]
    lengths = map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else ()
    too_long = {id(sample) for sample, length in zip(unsure, lengths, strict=True) if length > max_length}
    return [sample for sample in origin_samples if id(sample) not in too_long]


def _is_short(text: str, max_length: int) -> bool:
    """Whether it need not be counted: a token is a character of ASCII at least, but one may be put before."""
    return len(text) < max_length and text.isascii()
