"""The engines of a run in rows, as ``slime engines list`` and the dashboard show them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from slime.ray.engine import Engine, EngineState
from slime.ray.engine_place import EnginePlace
from slime.ray.served_model import ServedModel

_LONGEST = 500  # characters of a failure, which may end with what a server said last


@dataclass(frozen=True)
class EngineRow:
    """One engine, or a free place. Times are Unix seconds.

    Attributes:
        since: when it came into this state.
        version: of the weights that it serves; empty where it was given none.
        failure: why the last engine in this place died, at ``failed``; empty if none has.
        health: "answers", or what is wrong; empty where it is not asked.
        running, waiting: its requests; None where it does not say.
        tokens_per_second: that it generates.
        cache: the part of its KV cache that is in use, 0 to 1.
    """

    model: str
    rank: int
    kind: str
    state: str
    url: str
    since: float = 0.0
    version: str = ""
    failure: str = ""
    failed: float = 0.0
    health: str = ""
    running: int | None = None
    waiting: int | None = None
    tokens_per_second: float | None = None
    cache: float | None = None


def rows_of(models: Iterable[ServedModel], to_drain: Collection[int]) -> list[EngineRow]:
    """All engines and free places, by rank; nobody is asked for it.

    Args:
        to_drain: numbers of engines that are to leave after the weight update.
    """
    rows = []
    for model in models:
        free = model.free_ranks()
        rows += [_row(model, engine, to_drain) for engine in (*model.engines, *model.joiners)]
        for rank in model.empty_ranks():
            state = "free" if rank in free else "free when its notice ends"
            rows.append(EngineRow(model.name, rank, "", state, "", **_past(model.place_of(rank))))
    return sorted(rows, key=lambda row: row.rank)


def _row(model: ServedModel, engine: Engine, to_drain: Collection[int]) -> EngineRow:
    url, state = engine.url if engine.has_started else "", engine.state.value
    if engine.rank in to_drain and engine.state is not EngineState.DRAINING:
        state += ", drains after the update"
    elif engine.joins and engine.state is EngineState.READY:
        state += ", joins with the next update"
    found = _past(engine.place) | {"version": engine.version, "health": engine.place.ailment[:_LONGEST]}
    return EngineRow(model.name, engine.rank, engine.kind, state, url, **found)


def _past(place: EnginePlace) -> dict[str, Any]:
    return {"since": place.since, "failure": place.failure[:_LONGEST], "failed": place.failed}
