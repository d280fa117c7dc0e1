"""Counts of what the router does, in Prometheus's text format."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from slime.router.pool import Worker, WorkerState

_HELP = {
    "requests": "requests answered, by status",
    "retries": "requests sent to another worker because one could not be connected to",
    "refusals": "requests that no worker could take",
    "broken": "answers that ended before they were complete",
    "prompt_bytes": "of prompts sent with --router-policy cache_aware, of which a token has 4",
    "known_bytes": "of those, which their worker had been sent before",
}


class Counts(Counter[str]):
    """``requests/200``, ``retries`` and so on; the part after the slash is a label."""


def prometheus(counts: Mapping[str, int], workers: Iterable[Worker]) -> str:
    """The page of ``/metrics``."""
    return "\n".join([*_counters(counts), *_gauges(list(workers))]) + "\n"


def _counters(counts: Mapping[str, int]) -> Iterator[str]:
    for name, text in _HELP.items():
        metric = f"slime_router_{name}_total"
        yield f"# HELP {metric} {text}"
        yield f"# TYPE {metric} counter"
        if name == "requests":
            rows = sorted((key.split("/")[1], n) for key, n in counts.items() if key.startswith("requests/"))
            yield from (f'{metric}{{status="{status}"}} {count}' for status, count in rows)
        else:
            yield f"{metric} {counts.get(name, 0)}"


def _gauges(workers: list[Worker]) -> Iterator[str]:
    yield "# TYPE slime_router_worker_requests_in_flight gauge"
    yield from (
        f'slime_router_worker_requests_in_flight{{worker="{worker.url}"}} {worker.in_flight}'
        for worker in workers
    )
    yield "# TYPE slime_router_workers gauge"
    states = Counter(worker.state for worker in workers)
    yield from (f'slime_router_workers{{state="{state.value}"}} {states[state]}' for state in WorkerState)
