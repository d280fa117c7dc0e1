"""Which engines may leave a fleet or join it."""

from collections.abc import Collection, Mapping, Sequence

from slime.config.fleet import FleetConfig
from slime.ray.engine import Engine, EngineState, MembershipError
from slime.ray.served_model import ServedModel

Models = Mapping[str, ServedModel]


def refusal_of(config: FleetConfig) -> str:
    """Why no engine may leave or join; empty if they may."""
    if not config.engines.rollout_external:
        return ""
    return "--rollout-external-engine-addrs: the engines are somebody else's (wanted: engines of the run)"


def model_named(models: Models, name: str) -> ServedModel:
    """The first one, without a name."""
    if name and name not in models:
        raise MembershipError(f"model {name}: none is served (wanted: {' or '.join(models)})")
    return models[name or next(iter(models))]


def places_for(model: ServedModel, count: int) -> list[int]:
    """The places that so many engines are to take."""
    if any(engine.has_started and engine.is_colocated for engine in model.engines):
        raise MembershipError(
            f"model {model.name} is on GPUs of the trainer (wanted: a run without --colocate)"
        )
    if len(free := model.free_ranks()) < count:
        raise MembershipError(
            f"{count} more of model {model.name}: {len(free)} of its places are free "
            "(wanted: more --rollout-spare-gpus, or a drain before)"
        )
    return free[:count]


def engine_of(models: Models, rank: int) -> tuple[ServedModel, Engine]:
    """The engine of this number, and its model."""
    found = {engine.rank: (model, engine) for model in models.values() for engine in model.engines}
    if rank not in found:
        known = ", ".join(map(str, sorted(found)))
        raise MembershipError(f"engine {rank}: there is none of that number (wanted: one of {known})")
    return found[rank]


def require_drainable(engine: Engine, asked: Collection[int]) -> None:
    """
    Args:
        asked: numbers of engines that are to leave already.

    Raises:
        MembershipError: it cannot leave.
    """
    if engine.rank in asked or engine.state is EngineState.DRAINING:
        raise MembershipError(f"{engine} is drained already")
    if engine.state is not EngineState.SERVING:
        raise MembershipError(f"{engine} is {engine.state.value} (wanted: one that is serving)")
    if engine.kind != "regular":
        raise MembershipError(f"{engine} is a {engine.kind} engine (wanted: a regular one)")
    if engine.is_colocated:
        raise MembershipError(
            f"{engine} is on GPUs of the trainer, which would not become free (wanted: a run without "
            "--colocate)"
        )


def require_others(models: Models, ranks: Sequence[int], asked: Collection[int]) -> None:
    """
    Raises:
        MembershipError: without these, and those that are to leave already, no engine of a model that serves
            now would be left.
    """
    leaving = {*ranks, *asked}
    for model in models.values():
        serving = {engine.rank for engine in model.engines if engine.state is EngineState.SERVING}
        last = sorted(serving & set(ranks))
        if last and not serving - leaving:
            raise MembershipError(
                f"engine {last[-1]} is the last of model {model.name} that serves (wanted: at least one "
                "beside those that leave)"
            )
