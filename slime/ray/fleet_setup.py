"""Sets up a run's models, engines and routers from its flags."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from slime.arguments.core.run_args import copied
from slime.backends.sglang_utils.external import ExternalEngines, external_engines
from slime.backends.sglang_utils.external_router import ExternalRouter
from slime.backends.sglang_utils.router import Router, start_router
from slime.config.fleet import FleetConfig
from slime.config.run import filled
from slime.config.served_models import DEFAULT
from slime.ray.addresses import metrics_port
from slime.ray.engine_group import EngineGroup
from slime.ray.engine_slots import GroupPlace, group_places
from slime.ray.fleet import Fleet
from slime.ray.members import Members
from slime.ray.node import log_dir
from slime.ray.placement_group import Slots
from slime.ray.policies import policy_configs
from slime.ray.served_model import ROUTER_RESTARTS, ServedModel
from slime.ray.spawned_engines import EngineShape, SpawnedEngines
from slime.utils.addresses import find_available_port


def fleet_of(config: FleetConfig, slots: Slots, trainer_gpus: int, former: Members | None = None) -> Fleet:
    """The models of the run, each with its groups of engines; without engines no model.

    Args:
        config: with addresses.
        trainer_gpus: how many of the slots, from the first on, belong to the trainer too if colocated.
        former: who belonged to the fleet in whose place this one is.

    Raises:
        ExternalEngineError: an engine of somebody else's is not there, or is not what the run needs.
    """
    if config.engines.rollout_external:
        return Fleet(config, [_external_model(config)], former)
    groups: dict[str, list[EngineGroup]] = {model.name: [] for model in config.engines.served_models}
    policies = policy_configs(config)
    for place in group_places(config.engines.served_models, config.cluster.rollout_spare_gpus):
        own = policies.get(place.model.policy or place.model.name, config)
        groups[place.model.name].append(_spawned(own, place, slots, trainer_gpus, len(groups) > 1))
    trains = not config.debug.debug_rollout_only
    models = [
        ServedModel(
            model.name,
            groups[model.name],
            partial(_start_router, config, model.name, halves=model.has_pd_disaggregation),
            # Without a trainer no update comes that a dead engine's successor could wait for.
            takes_updates=trains and bool(model.update_weights),
            policy=model.policy,
            update_interval=model.update_interval,
            evaluates=model.evaluates,
            # What it is to play with are weights of the trainer's, which knows their version.
            waits_for_weights=trains and (model.evaluates or model.update_interval is not None),
            router_restarts=_router_restarts(config, model.name),
        )
        for model in config.engines.served_models
    ]
    return Fleet(config, models, former)


def _spawned(
    config: FleetConfig, place: GroupPlace, slots: Slots, trainer_gpus: int, several: bool
) -> EngineGroup:
    group, first = place.group, place.first_slot
    overrides = dict(group.overrides)
    keeps = not place.model.update_weights or place.model.update_interval is not None
    if keeps and config.cluster.offload_rollout:
        # Nobody brings these weights back after their memory was released, or not each time.
        overrides.setdefault("enable_weights_cpu_backup", True)
    shape = EngineShape(group.size, group.worker_type, overrides)
    own = slots.slice(first, first + group.num_gpus)
    source = SpawnedEngines(config, own, shape, first_slot=first, trainer_gpus=trainer_gpus)
    label = place.model.name if several else ""
    return EngineGroup(
        source,
        kind=group.worker_type,
        first_rank=place.first_rank,
        model=label,
        spare=place.spare,
        answer_timeout=config.fault_tolerance.rollout_engine_hang_timeout,
    )


def _external_model(config: FleetConfig) -> ServedModel:
    infos = external_engines(config)
    gets_weights = not config.debug.debug_rollout_only
    groups, first, limit = [], 0, config.fault_tolerance.rollout_engine_hang_timeout
    for kind in dict.fromkeys(info.worker_type for info in infos):
        endpoints = [info.endpoint for info in infos if info.worker_type == kind]
        source = ExternalEngines(endpoints, gets_weights=gets_weights)
        groups.append(EngineGroup(source, kind=kind, first_rank=first, answer_timeout=limit))
        first += len(endpoints)
    start = partial(
        _start_router, config, DEFAULT, halves=len(groups) > 1, known=[info.url for info in infos]
    )
    restarts = _router_restarts(config, DEFAULT)
    return ServedModel(DEFAULT, groups, start, waits_for_weights=gets_weights, router_restarts=restarts)


def _router_restarts(config: FleetConfig, model: str) -> int:
    """How often the router of a model may be started again; that of somebody else is not ours to start."""
    ours = not _is_external(config, model)
    return ROUTER_RESTARTS if ours and config.fault_tolerance.use_fault_tolerance else 0


def _is_external(config: FleetConfig, model: str) -> bool:
    return config.engines.router_external and model == next(iter(config.router.sglang_model_routers))


def _start_router(config: FleetConfig, model: str, *, halves: bool, known: Sequence[str] = ()) -> Router:
    """
    Args:
        halves: whether its engines prefill or decode.
        known: engines that a router of somebody else's may have already.
    """
    host, port = config.router.sglang_model_routers[model]
    is_first = model == next(iter(config.router.sglang_model_routers))
    if _is_external(config, model):
        router = ExternalRouter(host, port, config.router.sglang_api_key)
        router.join(known, config.cluster.engine_startup_timeout)
        return router
    return start_router(
        _router_config(config, model, halves, is_first),
        host=host,
        port=port,
        prometheus_port=find_available_port(metrics_port(port)),
        log_path=log_dir() / ("router.log" if is_first else f"router_{model}.log"),
        api_key=config.router.sglang_api_key,
    )


def _router_config(config: FleetConfig, model: str, halves: bool, is_first: bool) -> FleetConfig:
    """Returns the configuration of one of several routers: a port that was given is the first one's, and the
    tokenizer the model's.
    """
    own: dict[str, Any] = {"router_pd_disaggregation": True} if halves else {}
    if not is_first:
        own["router_prometheus_port"] = None
        own["hf_checkpoint"] = next(m.model_path for m in config.engines.served_models if m.name == model)
    return filled(FleetConfig, copied(config.flat, **own))
