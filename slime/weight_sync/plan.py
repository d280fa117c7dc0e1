"""An update before it is sent: what it consists of, its source, and what becomes of it on its way."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import cast

import torch

from slime.observability.spans import SpanList
from slime.training.weights import NamedTensors, StagedWeights, TensorInfo, Weights
from slime.utils.types import EngineEndpoint
from slime.weight_sync.filters.filter import Filter
from slime.weight_sync.proof import SentTensors
from slime.weight_sync.split import Share, split

Send = Callable[[NamedTensors, bool], int]
"""Takes a bucket, and whether it is the last one; returns the bytes that this rank handed over."""
Prepare = Callable[[NamedTensors], bool]
"""Takes the bucket that will be sent first; whether its tensors are needed no more, and it takes the next."""
_NO_MEMORY = torch.device("meta")


class Manifest:
    """The tensors of an update by name.

    Raises:
        ValueError: two tensors have one name.
    """

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        for tensor in tensors:
            if tensor.name in self.tensors:
                raise ValueError(f"weight {tensor.name!r}: is in the update twice")
            self.tensors[tensor.name] = tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def checked(self, buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        """Yields the same buckets, and looks at each of their tensors.

        Raises:
            RuntimeError: a tensor is another one than was announced, comes twice, or has not come at the end.
        """
        missing = dict(self.tensors)
        for bucket in buckets:
            _require_announced(missing, bucket)
            yield bucket
            del bucket  # the next one is made without it in memory
        if missing:
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise RuntimeError(f"weight {next(iter(missing))!r}{others}: not sent, but in the manifest")


class WeightPlan:
    """A source of weights, and the filters that they pass one after the other.

    Args:
        max_bytes: of a bucket as the source gives it.
        notes_sent: whether checksums of what is sent are taken.
        spans: where it is noted when a bucket was gathered, converted and sent; the second holds the first.
    """

    def __init__(
        self,
        source: Weights,
        filters: Sequence[Filter],
        max_bytes: int,
        notes_sent: bool = False,
        spans: SpanList | None = None,
    ) -> None:
        self._source, self._filters, self._max_bytes = source, filters, max_bytes
        self._spans = SpanList() if spans is None else spans
        self.ranks = source.ranks
        self.sent = SentTensors() if notes_sent else None

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank, of a source that has some."""
        return cast(StagedWeights, self._source).stage

    def share(self, stages: Sequence[int], rank: int) -> "WeightPlan":
        """What a rank is given where all of them share the weights of such a source.

        Args:
            stages: of all ranks, in order.
        """
        own = split(self._source.manifest(), stages)[rank]
        share = WeightPlan(Share(cast(StagedWeights, self._source), own), self._filters, self._max_bytes)
        share._spans, share.sent = self._spans, self.sent
        return share

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Takes note of the engines that are updated from now on. Collective on all trainer ranks."""
        return

    def disconnect(self) -> None:
        """Gives up what `connect` made."""
        return

    @property
    def needs_session(self) -> bool:
        """Whether engines have to be told when an update begins and ends."""
        return any(each.needs_session for each in self._filters)

    @cached_property
    def manifest(self) -> Manifest:
        """What transports are given, the same in each update.

        Raises:
            ValueError: a filter cannot do with a tensor.
        """
        tensors: Iterable[TensorInfo] = self._source.manifest()
        for each in self._filters:
            tensors = each.manifest(tensors)
        return Manifest(tensors)

    def filtered(self, buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        """What becomes of buckets of the source."""
        for each in self._filters:
            buckets = each.apply(buckets)
        checked = self.manifest.checked(buckets)
        return checked if self.sent is None else self.sent.noted(checked)

    @property
    def rounding(self) -> float:
        """What the source lost in the last update; see `Weights`."""
        return self._source.rounding

    def weights(self) -> list[str]:
        """The names of the source's tensors, before filters."""
        return [tensor.name for tensor in self._source.manifest()]

    def bucket_bytes(self, parts: int) -> int:
        """The most bytes of one of so many buckets that are there at once."""
        return max(self._max_bytes // parts, 1)

    def begin(self, prepare: Prepare | None, parts: int = 1) -> "Passage":
        """Gathers the first bucket, in step with the other ranks of the source.

        Args:
            prepare: given what becomes of it, where this rank sends; None where it only gathers.
            parts: how many buckets are there at once, and share the bytes of one.

        Raises:
            ValueError: a filter cannot do with a tensor.
        """
        gathered = self._measured("gather", self._source.buckets(self.bucket_bytes(parts)))
        converted = None if prepare is None else self._measured("convert", self._converted(gathered))
        passage = Passage(gathered, converted, prepare or _as_it_is, self._spans)
        passage.prepare_next()
        passage.left = 0 if prepare is None else len(self.manifest.tensors)
        return passage

    def _converted(self, gathered: Iterator[NamedTensors]) -> Iterator[NamedTensors]:
        # Before what may fail on this rank alone: the others gather it too.
        first = [bucket for bucket in (next(gathered, None),) if bucket is not None]
        yield from self.filtered(chain(_given_away(first), gathered))

    def carry(self, send: Send | None) -> int:
        """Gathers all weights and gives them to ``send``; see `Passage.carry`."""
        return self.begin(None if send is None else _as_it_is).carry(send)

    def _measured(self, name: str, buckets: Iterator[NamedTensors]) -> Iterator[NamedTensors]:
        """Yields the same buckets, and notes how long each was waited for."""
        while True:
            with self._spans.measure(name):
                bucket = next(buckets, None)
            if bucket is None:
                return
            yield bucket
            del bucket


class Passage:
    """Weights on their way, of which the first bucket is there, or several.

    Attributes:
        left: the tensors that have not been sent.
        may_prepare: whether `prepare_next` may be called.
    """

    def __init__(
        self,
        gathered: Iterator[NamedTensors],
        converted: Iterator[NamedTensors] | None,
        prepare: Prepare,
        spans: SpanList,
    ) -> None:
        self._gathered, self._converted, self._prepare, self._spans = gathered, converted, prepare, spans
        self._ready: list[NamedTensors] = []
        self.left = 0
        self.may_prepare = False

    def prepare_next(self) -> None:
        """Gathers a bucket, in step with the other ranks of the source; it is prepared where it is sent."""
        if self._converted is None:
            next(self._gathered, None)
            return
        bucket = next(self._converted, None)
        if bucket is None:
            self.may_prepare = False
        elif bucket:
            self.may_prepare = self._prepare(bucket)
            given = bucket if not self.may_prepare else _without_memory(bucket)
            self._ready.append(given)

    def carry(self, send: Send | None) -> int:
        """Gathers the rest, in step with the other ranks of the source, and gives all to ``send``.

        A rank without ``send`` only gathers. So does one after a failure, which it raises at the end: others
        would wait for it.

        Returns:
            Bytes that this rank handed over.
        """
        sent = 0
        try:
            for bucket in self._to_send():
                if send is not None and bucket:
                    self.left -= len(bucket)
                    with self._spans.measure("send"):
                        sent += send(bucket, self.left == 0)
                del bucket
        except Exception:
            self._ready, self._converted = [], None
            _exhaust(self._gathered)
            raise
        return sent

    def _to_send(self) -> Iterator[NamedTensors]:
        if self._converted is None:
            _exhaust(self._gathered)
            return
        ready, self._ready = self._ready, []
        yield from _given_away(ready)
        yield from self._converted


def _given_away(buckets: list[NamedTensors]) -> Iterator[NamedTensors]:
    """Yields them, and keeps none of them in memory."""
    while buckets:
        yield buckets.pop(0)


def _without_memory(bucket: NamedTensors) -> NamedTensors:
    """What tells of a bucket's tensors all but their values."""
    return [(name, torch.empty_like(tensor, device=_NO_MEMORY)) for name, tensor in bucket]


def _as_it_is(bucket: NamedTensors) -> bool:
    """Prepares nothing."""
    return False


def _exhaust(buckets: Iterator[NamedTensors]) -> None:
    for _ in buckets:
        pass


def _require_announced(missing: dict[str, TensorInfo], bucket: NamedTensors) -> None:
    """Takes the tensors of a bucket off those that are missing; raises RuntimeError for any other."""
    for name, tensor in bucket:
        _require_equal(missing.pop(name, None), name, tensor)


def _require_equal(announced: TensorInfo | None, name: str, tensor: torch.Tensor) -> None:
    if announced is None:
        raise RuntimeError(f"weight {name!r}: sent twice, or not in the manifest")
    found, wanted = (tensor.dtype, tuple(tensor.shape)), (announced.dtype, announced.shape)
    if found != wanted:
        shown = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in (found, wanted)]
        raise RuntimeError(f"weight {name!r}: {shown[0]} (wanted: {shown[1]})")
