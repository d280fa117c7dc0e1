"""What the page shows of recorded samples, taken off files that anybody may have written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from slime.utils.engine_meta import VersionSpans
from slime.utils.types import Sample

Column = np.ndarray
"""A value per token of a response [R]: numbers, or versions as texts."""
_LINE, _TEXT = 200, 20_000  # characters
_MESSAGES, _REWARDS = 100, 20
_LONGEST = 4_000_000  # tokens
_LARGEST_SUM = 200_000_000  # of a file: lists may be shared, so that they are larger than it
BEFORE, AFTER = "log-prob, before the step", "log-prob, after the step"
_OF_TRAINING = {
    "log_probs": "log-prob, trainer",
    "before_log_probs": BEFORE,
    "after_log_probs": AFTER,
    "ref_log_probs": "log-prob, reference",
    "advantages": "advantage",
    "returns": "return",
    "values": "value",
    "entropy": "entropy",
    "kl": "KL to the reference",
    "loss_masks": "mask, trained",
}
"""Fields of a train batch, and what the page calls them."""


@dataclass
class Recorded:
    """A sample of a rollout.

    Attributes:
        tokens: [L], prompt and response.
        length: tokens of the response, R.
        log_probs, mask: [R]; None where they were not recorded.
    """

    tokens: np.ndarray
    length: int
    log_probs: Column | None
    mask: Column | None
    versions: Column
    about: dict[str, Any]
    prompt: str
    response: str

    def line(self, number: int) -> dict[str, Any]:
        """Returns what stands in a list of samples."""
        trained = self.length if self.mask is None else int(np.count_nonzero(self.mask))
        texts = {"prompt": self.prompt[-_LINE:], "response": self.response[:_LINE]}
        return {"number": number, **self.about, "length": self.length, "trained": trained, **texts}

    def whole(self, number: int) -> dict[str, Any]:
        """Returns what stands above its tokens."""
        texts = {"prompt": self.prompt[:_TEXT], "response": self.response[:_TEXT]}
        counts = {"total": len(self.tokens), "of_prompt": len(self.tokens) - self.length}
        return {"number": number, **self.about, **counts, **texts}

    def values(self) -> dict[str, Column]:
        """Returns what the rollout says of each token."""
        known = {"log-prob, engine": self.log_probs, "mask": self.mask, "version": self.versions}
        return {name: column for name, column in known.items() if column is not None}

    def windowed(self, column: Column, start: int, end: int) -> list[Any]:
        """Returns the values of the tokens ``start`` to ``end``; None where there is none, as of a prompt."""
        of_prompt = len(self.tokens) - self.length
        before = max(0, min(end, of_prompt) - start)
        shown = column[max(0, start - of_prompt) : max(0, end - of_prompt)].tolist()
        return [None] * before + [None if isinstance(v, float) and not isfinite(v) else v for v in shown]


@dataclass
class Trained:
    """The train batch of a rollout.

    Attributes:
        rows: for each sample, known by its index and tokens, the fields per token.
    """

    rows: dict[tuple[Any, bytes], dict[str, Column]] = field(default_factory=dict)

    def values(self, sample: Recorded) -> dict[str, Column]:
        """Returns what training says of each token of a response; a rank's piece of it is left out."""
        found = self.rows.get((sample.about["index"], sample.tokens.tobytes()), {})
        return {name: column for name, column in found.items() if len(column) == sample.length}


def recorded(content: Any) -> list[Recorded]:
    """Returns the samples of a file that ``--save-debug-rollout-data`` wrote.

    Raises:
        ValueError: it holds none.
    """
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list):
        raise ValueError("no samples in it (wanted: a file of --save-debug-rollout-data)")
    made, left = [], _LARGEST_SUM
    for sample in samples:
        made.append(_recorded(sample if isinstance(sample, dict) else {}))
        left -= 1 + len(made[-1].tokens) + made[-1].length
        if left < 0:
            raise ValueError(f"more than {_LARGEST_SUM} tokens in it")
    return made


def _recorded(sample: Mapping[str, Any]) -> Recorded:
    tokens = _ids(sample.get("tokens"))
    length = min(max(0, _whole(sample.get("response_length")) or 0), len(tokens))
    return Recorded(
        tokens=tokens,
        length=length,
        log_probs=_column(sample.get("rollout_log_probs"), length),
        mask=_column(sample.get("loss_mask"), length),
        versions=_versions(sample, length),
        about={
            "index": _whole(sample.get("index")),
            "group": _whole(sample.get("group_index")),
            "status": _text(sample.get("status"))[:_LINE],
            "reward": _reward(sample.get("reward")),
            "label": _text(sample.get("label"))[:_LINE],
            "removed": sample.get("remove_sample") is True,
        },
        prompt=_prompt(sample.get("prompt")),
        response=_text(sample.get("response")),
    )


def trained(content: Any) -> Trained:
    """Returns what a file of ``--save-debug-train-data`` says.

    Raises:
        ValueError: it is none.
    """
    shards = content.get("shards") if isinstance(content, dict) else None
    if not isinstance(shards, list):
        raise ValueError("no shards in it (wanted: a file of --save-debug-train-data)")
    rows = {}
    for shard in shards:
        for number, tokens in enumerate(_sequence(shard, "tokens")):
            index = _whole(_entry(_sequence(shard, "sample_indices"), number))
            columns = {
                name: _numbers(_entry(_sequence(shard, key), number)) for key, name in _OF_TRAINING.items()
            }
            rows[index, _ids(tokens).tobytes()] = {name: c for name, c in columns.items() if c is not None}
    return Trained(rows)


def _sequence(shard: Any, key: str) -> Sequence[Any]:
    found = shard.get(key) if isinstance(shard, dict) else None
    return found if isinstance(found, list) else ()


def _entry(values: Sequence[Any], number: int) -> Any:
    return values[number] if number < len(values) else None


def _numbers(values: Any) -> Column | None:
    """An array of one axis; None of anything else, into which nobody looks."""
    if not hasattr(values, "__len__") or _size(values) > _LONGEST:
        return None
    if isinstance(values, list) and _are_numbers(values):
        return np.asarray(values, dtype=np.float64)
    if hasattr(values, "detach") and values.dim() == 1:  # a tensor
        return np.asarray(values.detach().to("cpu").double().numpy())
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biuf":
        return values.astype(np.float64)
    return None


def _are_numbers(values: list[Any]) -> bool:
    return all(issubclass(kind, int | float | np.number) for kind in set(map(type, values)))


def _size(values: Any) -> int:
    return int(values.numel()) if hasattr(values, "numel") else len(values)


def _ids(values: Any) -> np.ndarray:
    found = _numbers(values)
    return np.zeros(0, np.int64) if found is None else found.astype(np.int64)


def _column(values: Any, length: int) -> Column | None:
    found = _numbers(values)
    return found if found is not None and len(found) == length else None


def _versions(sample: Mapping[str, Any], length: int) -> Column:
    spans: VersionSpans = [
        (str(span[0])[:_LINE], span[1])
        for span in _list(sample.get("version_spans"))
        if isinstance(span, list | tuple) and len(span) == 2 and (_whole(span[1]) or 0) > 0
    ]
    versions = [_text(version)[:_LINE] for version in _list(sample.get("weight_versions"))]
    known = Sample(response_length=length, version_spans=spans, weight_versions=versions)
    return np.array(known.token_versions, dtype=object)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_whole else None


def _text(value: Any) -> str:
    """Texts and numbers; nothing of structures, which may be as deep as they like."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float | np.number) else ""


def _reward(value: Any) -> Any:
    if isinstance(value, dict):
        return {_text(key)[:_LINE]: _plain(part) for key, part in list(value.items())[:_REWARDS]}
    return _plain(value)


def _plain(value: Any) -> float | str | None:
    if isinstance(value, str):
        return value[:_LINE]
    is_finite = isinstance(value, int | float | np.number) and isfinite(value)
    return float(value) if is_finite else None


def _prompt(value: Any) -> str:
    """A text, or the messages of a chat, a line of their role above each."""
    if isinstance(value, str):
        return value
    messages = [message for message in _list(value)[:_MESSAGES] if isinstance(message, dict)]
    return "\n".join(f"[{_text(m.get('role'))}]\n{_text(m.get('content'))}" for m in messages)
