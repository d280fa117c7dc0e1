"""What was sent, held against what engines say that they hold."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from slime.backends.sglang_utils.client import EngineClient
from slime.training.weights import NamedTensors
from slime.utils.tensor_bucket import tensor_digest

_OF_EACH_RANK = {"action": "checksum", "per_rank": True}
Digests = dict[str, tuple[str, str]]
"""The format and the checksum of tensors by name."""


class SentTensors:
    """The checksums of an update, by name and dtype."""

    def __init__(self) -> None:
        self._digests: Digests = {}

    @property
    def digests(self) -> Digests:
        """The checksums of what this rank sent last."""
        return self._digests

    def noted(self, buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        """Yields the same buckets; forgets those of the update before."""
        self._digests = {}
        for bucket in buckets:
            self._digests |= {name: _digest(tensor) for name, tensor in bucket}
            yield bucket
            del bucket  # the next one is made without it in memory

    def add(self, digests: Digests) -> None:
        """Takes note of what another rank has sent."""
        self._digests = {**self._digests, **digests}

    def require_held(self, engines: Sequence[EngineClient], weights: Iterable[str]) -> None:
        """Compares with all engines, and these with each other.

        Servers that name other tensors than a checkpoint has, as SGLang's joined ones, are compared with
        each other alone.

        Args:
            weights: the names of all weights of the model in this update, before they were quantised.

        Raises:
            RuntimeError: names the first tensor that an engine holds otherwise, and the engine.
        """
        known = frozenset(weights)
        answers = [engine.weights_checker("checksum")["ranks"] for engine in engines]
        for engine, ranks in zip(engines, answers, strict=True):
            for rank in ranks:
                if "dtypes" in rank:
                    self._require_sent(engine, rank, known)
        for engine, ranks in zip(engines[1:], answers[1:], strict=True):
            _require_equal(engines[0], engine, answers[0], ranks)

    def _require_sent(self, engine: EngineClient, rank: Mapping[str, Any], known: frozenset[str]) -> None:
        for name, held in rank["checksums"].items():
            if name not in known:
                raise RuntimeError(f"engine {engine.endpoint.url}: weight {name!r}: no update brought it")
            dtype, sent = self._digests.get(name, ("", ""))
            # Numbers of another format are not those that were sent.
            if dtype == rank["dtypes"][name] and held != sent:
                where = f"engine {engine.endpoint.url}: weight {name!r}"
                raise RuntimeError(f"{where}: checksum {held} (wanted: {sent}, as sent)")


def require_ranks_hold(
    engines: Sequence[EngineClient],
    sent: Sequence[Sequence[Digests]],
    asked: Mapping[str, Any] = _OF_EACH_RANK,
) -> None:
    """Compares the tensors of each rank of each engine with those that were sent to it.

    Servers that tell no formats, as SGLang, are held against each other alone, and must have all names.

    Args:
        sent: by engine and rank.
        asked: for what they hold.

    Raises:
        RuntimeError: names the first tensor that a rank holds otherwise, or that no update brought it.
    """
    answers = [engine.weights_checker("checksum")["ranks"] for engine in engines]
    for engine, wanted, ranks in zip(engines, sent, answers, strict=True):
        own = all("dtypes" in rank for rank in ranks)
        held = engine.request("POST", "/weights_checker", dict(asked))["ranks"] if own else ranks
        for number, (digests, rank) in enumerate(zip(wanted, held, strict=True)):
            where = f"engine {engine.endpoint.url}, rank {number}"
            _require_names(where, digests, rank["checksums"], all_of_them=own)
            if own:
                _require_checksums(where, digests, rank)
    for engine, ranks in zip(engines[1:], answers[1:], strict=True):
        _require_equal(engines[0], engine, answers[0], ranks)


def _require_names(where: str, sent: Digests, held: Mapping[str, str], all_of_them: bool) -> None:
    missing = sent.keys() - held.keys()
    if missing:
        raise RuntimeError(f"{where}: tensor {min(missing)!r}: was sent, and is not there")
    if all_of_them and (others := held.keys() - sent.keys()):
        raise RuntimeError(f"{where}: tensor {min(others)!r}: no update brought it")


def _require_checksums(where: str, sent: Digests, rank: Mapping[str, Any]) -> None:
    for name, (dtype, checksum) in sent.items():
        found = rank["checksums"][name]
        # Numbers of another format are not those that were sent.
        if dtype == rank["dtypes"][name] and found != checksum:
            raise RuntimeError(f"{where}: tensor {name!r}: checksum {found} (wanted: {checksum}, as sent)")


def _digest(tensor: torch.Tensor) -> tuple[str, str]:
    return str(tensor.dtype).removeprefix("torch."), tensor_digest(tensor)


def _require_equal(
    first: EngineClient, other: EngineClient, wanted: Sequence[Any], found: Sequence[Any]
) -> None:
    """Raises RuntimeError where engines of equal layout hold different weights."""
    if len(wanted) != len(found):
        return
    for ours, theirs in zip(wanted, found, strict=True):
        left, right = ours["checksums"], theirs["checksums"]
        if left.keys() != right.keys():
            name = min(left.keys() ^ right.keys())
        else:
            name = next((name for name in left if left[name] != right[name]), None)
        if name is not None:
            raise RuntimeError(
                f"engine {other.endpoint.url}: weight {name!r}: checksum {right.get(name)} "
                f"(wanted: {left.get(name)}, as on {first.endpoint.url})"
            )
