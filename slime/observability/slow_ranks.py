"""Which rank of a trainer takes longer than the others, where ranks do not wait for one another."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from slime.observability.spans import Span

ALONE = frozenset(
    ("data_preprocess", "log_probs", "ref_log_probs", "teacher_log_probs", "old_log_probs", "values")
)
"""Spans in which no data-parallel rank waits for another one, so that they can be compared."""
NO_RANK = -1
_SLOWER, _SECONDS = 1.5, 0.02  # times what the others take, and by so much


def of_slow(seconds: Mapping[int, float]) -> dict[int, float]:
    """Returns what the others take, by each rank that is far slower than they are."""
    found = {}
    for rank, own in seconds.items():
        others = [value for other, value in seconds.items() if other != rank]
        usual = median(others) if others else own
        if own > _SLOWER * usual and own > usual + _SECONDS:
            found[rank] = usual
    return found


def spans_alone(spans: Iterable[Span]) -> list[Span]:
    """Returns those by which ranks can be compared, a few for each step."""
    return [span for span in spans if span.name in ALONE]


def slow_rank(of_ranks: Sequence[Iterable[Span]]) -> int | None:
    """Finds the rank that is slower by the most seconds; `NO_RANK` if none is, None without a comparison.

    Args:
        of_ranks: what each rank did in one step.
    """
    seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for rank, spans in enumerate(of_ranks):
        for span in spans_alone(spans):
            seconds[span.name][rank] += span.end - span.start
    if not any(len(own) > 1 for own in seconds.values()):
        return None
    late = [(own[rank] - usual, rank) for own in seconds.values() for rank, usual in of_slow(own).items()]
    return max(late)[1] if late else NO_RANK


def report_of_all(of_ranks: Sequence[tuple[dict[str, Any], Iterable[Span]]], role: str) -> dict[str, Any]:
    """Returns the main rank's report, which alone is not empty, with the slow rank of its role."""
    report: dict[str, Any] = next((report for report, _ in of_ranks if report), {})
    slow = slow_rank([spans for _, spans in of_ranks])
    if not report or slow is None:
        return report
    name = "perf/slow_rank" if role == "actor" else f"perf/{role}-slow_rank"
    return {**report, "perf": {**report.get("perf", {}), name: slow}}
