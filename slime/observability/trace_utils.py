"""Spans and events of a sample's life, which user code records and recordings of rollouts keep.

with trace_span(sample, "search", attrs={"query": query}) as span:
    passages = await search(query)
    span.update({"passages": len(passages)})

They are in ``sample.trace``, an attribute of plain data: ``{"version": 1, "trace_id": ..., "attempt": 0,
"events": [...]}``. An event has a type (span_start, span_end or event), name, ts (seconds since the epoch),
trace_id, sample_id, group_id, attempt, span_id, parent_span_id and attrs.
"""

import functools
import inspect
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from slime.config.debug import DebugConfig
from slime.config.run import filled
from slime.utils.types import Sample

TRACE_VERSION = 1
TRACE_CHILDREN_KEY = "trace_children"
"""Among the attributes of a span: spans below it that someone else measured, ``{name: attrs}``."""
_PHASE = re.compile(r"pd_(prefill|decode|transfer)_\w+")
Attrs = Mapping[str, Any] | None

# The spans that the running task is within, by trace.
_open_spans: ContextVar[Mapping[str, str] | None] = ContextVar("open_spans", default=None)


@dataclass
class TraceHandle:
    """A trace without its sample, to be handed to code that does not know the sample."""

    trace: dict[str, Any]
    sample_id: int | None = None
    group_id: int | None = None
    parent_span_id: str | None = None


@dataclass
class Span:
    """An open span; what `update` adds is written when it ends."""

    attrs: dict[str, Any] = field(default_factory=dict)

    def update(self, attrs: Attrs = None, **more: Any) -> None:
        self.attrs |= {**(attrs or {}), **more}


Target = Sample | TraceHandle | list[Sample | TraceHandle]


def bind_trace(target: Sample | TraceHandle) -> TraceHandle:
    """The trace of a sample, begun if it has none, below the span that is open."""
    if isinstance(target, TraceHandle):
        return target
    if not isinstance(getattr(target, "trace", None), dict):
        new = {"version": TRACE_VERSION, "trace_id": uuid.uuid4().hex, "attempt": 0, "events": []}
        vars(target)["trace"] = new
    trace = vars(target)["trace"]
    return TraceHandle(trace, target.index, target.group_index, _innermost(trace))


@contextmanager
def trace_span(
    target: Target, name: str, *, attrs: Attrs = None, record_error: bool = True
) -> Iterator[Span]:
    """A span of one sample, or the same of several; an exception that leaves it is noted in ``error``."""
    opened = [(handle, uuid.uuid4().hex[:16]) for handle in _handles(target)]
    for handle, span_id in opened:
        _record(handle, "span_start", name, attrs, span_id)
    inner = {handle.trace["trace_id"]: span_id for handle, span_id in opened}
    token = _open_spans.set({**(_open_spans.get() or {}), **inner})
    span = Span()
    try:
        yield span
    except BaseException as error:
        if record_error:
            span.update(error=f"{type(error).__name__}: {error}")
        raise
    finally:
        for child, found in span.attrs.pop(TRACE_CHILDREN_KEY, {}).items():
            trace_event(target, child, attrs=found)
        _open_spans.reset(token)
        for handle, span_id in opened:
            _record(handle, "span_end", name, span.attrs, span_id)


def span_of(args: object, target: Sample | Sequence[Sample], name: str) -> AbstractContextManager[Span]:
    """Opens a span of one sample, or of several, if spans are collected; else one that nobody keeps."""
    if not filled(DebugConfig, args, thin=True).collects_spans:  # plug-ins bring args of their own
        return nullcontext(Span())
    return trace_span(target if isinstance(target, Sample) else list(target), name)


def trace_event(target: Target, name: str, *, attrs: Attrs = None) -> None:
    """Something that takes no time."""
    for handle in _handles(target):
        _record(handle, "event", name, attrs, None)


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Callable[..., Target] | None = None,
    attrs_getter: Callable[..., Attrs] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes each call of a function, plain or async, a span.

    Args:
        target: the parameter that holds the samples; or ``target_getter``, called as the function is.
        attrs_getter: called as the function is.
    """
    if (target is None) == (target_getter is None):
        raise ValueError(f"trace_function {name!r}: wanted target or target_getter, one of the two")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def span_of(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments if target else {}
            found = target_getter(*args, **kwargs) if target_getter else bound[str(target)]
            return trace_span(found, name, attrs=attrs_getter(*args, **kwargs) if attrs_getter else None)

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with span_of(*args, **kwargs):
                return await function(*args, **kwargs)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with span_of(*args, **kwargs):
                return function(*args, **kwargs)

        return awaited if inspect.iscoroutinefunction(function) else called

    return decorate


def trace_next_attempt(target: Target) -> None:
    """What follows belongs to another attempt at the same sample."""
    for handle in _handles(target):
        handle.trace["attempt"] += 1


def export_trace(target: Sample | TraceHandle) -> dict[str, Any]:
    """A trace as plain data, for another process."""
    return dict(vars(bind_trace(target)))


def import_trace(data: Mapping[str, Any]) -> TraceHandle:
    """Inverse of `export_trace`; what is recorded stays in this process until it is sent back."""
    return TraceHandle(**data)


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine's ``meta_info`` says of an answer as a whole: its counts, times, version and end."""
    attrs: dict[str, Any] = {
        key: value for key, value in meta.items() if isinstance(value, int | float | str)
    }
    children: dict[str, dict[str, Any]] = {}
    for key in [key for key in attrs if _PHASE.fullmatch(key)]:
        phase = key.split("_")[1]
        children.setdefault(f"sglang_pd_{phase}", {})[key] = attrs.pop(key)
    if children:
        attrs[TRACE_CHILDREN_KEY] = children
    if isinstance(meta.get("finish_reason"), Mapping):
        attrs["finish_reason"] = meta["finish_reason"].get("type")
    return attrs


def _handles(target: Target) -> list[TraceHandle]:
    return [bind_trace(item) for item in (target if isinstance(target, list) else [target])]


def _innermost(trace: Mapping[str, Any]) -> str | None:
    return (_open_spans.get() or {}).get(trace["trace_id"])


def _record(handle: TraceHandle, kind: str, name: str, attrs: Attrs, span_id: str | None) -> None:
    handle.trace["events"].append(
        {
            "type": kind,
            "name": name,
            "ts": time.time(),
            "trace_id": handle.trace["trace_id"],
            "sample_id": handle.sample_id,
            "group_id": handle.group_id,
            "attempt": handle.trace["attempt"],
            "span_id": span_id,
            "parent_span_id": _innermost(handle.trace) or handle.parent_span_id,
            "attrs": dict(attrs or {}),
        }
    )
