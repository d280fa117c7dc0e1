"""What a seed decides beforehand: the layout of a run, its flags, and which faults it will meet."""

import random
from dataclasses import dataclass, replace
from typing import Any

from slime.config.served_models import ServedModelConfig, ServerGroupConfig
from tests.run_args import run_args

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
DEFAULT = "slime.rollout.sglang_rollout.generate_rollout"
ROUTER = ("router", 3000)


@dataclass(frozen=True)
class Plan:
    """One history.

    Attributes:
        faults: virtual seconds on average between two faults of engines; None without.
        silent: one engine stops to answer, of several that tolerate it, and nothing else goes wrong.
        strikes: how likely an engine is hit while weights are sent.
        router_deaths: virtual seconds after which the router is killed, each time.
        manager_deaths: the same of the rollout manager.
        crash_after: virtual seconds after which the whole run is killed, to be resumed; None for never.
        token: virtual seconds on average that an engine computes one.
        pieces: parts in which weights come to an engine.
        drains: virtual seconds after which somebody has an engine leave, each time.
        adds: the same of engines that are to join.
        spare: places beside those of the first engines.
        queue: requests that each engine is to have, by which others join and leave; None without.
    """

    seed: int
    asynchronous: bool
    fully_async: bool
    partial: bool
    tolerant: bool
    engines: int
    ranks: int
    rollouts: int
    batch: int
    interval: int
    max_staleness: int | None
    pause_mode: str
    filters: bool
    faults: float | None
    strikes: float
    loss: float
    delay: float
    crash_after: float | None
    pieces: int
    longest_answer: int
    token: float
    concurrency: int
    silent: bool = False
    router_deaths: tuple[float, ...] = ()
    manager_deaths: tuple[float, ...] = ()
    drains: tuple[float, ...] = ()
    adds: tuple[float, ...] = ()
    spare: int = 0
    queue: float | None = None


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"plan {seed}")
    fully, asynchronous = rng.random() < 0.6, rng.random() < 0.6
    troubled = rng.random() < 0.75
    tolerant = rng.random() < 0.8
    plan = Plan(
        seed=seed,
        asynchronous=asynchronous,
        fully_async=fully,
        partial=rng.random() < 0.5,
        tolerant=tolerant,
        engines=rng.choice((1, 2, 2, 3, 4)),
        ranks=rng.choice((1, 1, 2)),
        rollouts=rng.randint(2, 6),
        batch=rng.randint(1, 3),
        interval=rng.choice((1, 1, 2)) if asynchronous else 1,
        max_staleness=rng.choice((None, None, 1, 2, 2, 3)) if fully else None,
        pause_mode=rng.choice(("abort", "abort", "in_place")) if fully else "abort",
        filters=rng.random() < 0.3,
        faults=rng.choice((10.0, 30.0, 100.0)) if troubled and rng.random() < 0.7 else None,
        strikes=rng.choice((0.0, 0.3, 0.6)) if troubled else 0.0,
        loss=rng.choice((0.0, 0.0, 0.003)) if troubled else 0.0,
        delay=rng.choice((0.0, 0.0, 0.003)),
        crash_after=rng.uniform(20.0, 120.0) if troubled and rng.random() < 0.3 else None,
        pieces=rng.randint(1, 3),
        longest_answer=rng.choice((5, 20, 40)),
        token=rng.choice((0.03, 0.2, 0.6)),
        concurrency=rng.choice((1, 2, 4, 8)),
    )
    adds, spare = _joins(seed)
    queue, room = _scaling(seed)
    plan = replace(plan, drains=_changes(seed), adds=adds, spare=spare + room, queue=queue)
    if rng.random() < 0.1:
        return _silenced(plan)
    if not tolerant and adds and queue is None:
        return _joiners_struck(plan)
    deaths = lambda *numbers: tuple(rng.uniform(5.0, 150.0) for _ in range(rng.choice(numbers)))
    if not troubled:
        return plan
    routers, managers = deaths(0, 0, 0, 1, 1, 3), deaths(0, 0, 0, 1, 2)
    return replace(plan, router_deaths=routers, manager_deaths=managers)


def _changes(seed: int) -> tuple[float, ...]:
    """Times at which engines are asked to leave, in half of all histories."""
    rng = random.Random(f"changes {seed}")
    return tuple(rng.uniform(5.0, 120.0) for _ in range(rng.choice((0, 0, 0, 1, 2, 4))))


def _joins(seed: int) -> tuple[tuple[float, ...], int]:
    """Times at which engines are to join, in half of all histories, and places for them."""
    rng = random.Random(f"joins {seed}")
    times = tuple(rng.uniform(5.0, 120.0) for _ in range(rng.choice((0, 0, 0, 1, 2, 4))))
    return times, rng.choice((0, 1, 2)) if times else 0


def _scaling(seed: int) -> tuple[float | None, int]:
    """By how many requests engines come and go, in a quarter of all histories, and places for them."""
    rng = random.Random(f"scaling {seed}")
    if rng.random() < 0.75:
        return None, 0
    return rng.choice((0.5, 1.0, 2.0)), rng.choice((0, 1, 2))


def _joiners_struck(plan: Plan) -> Plan:
    """Engines that join are killed, which costs nobody else, and nothing else goes wrong."""
    return replace(plan, faults=None, strikes=0.7, loss=0.0, delay=0.0, crash_after=None)


def _silenced(plan: Plan) -> Plan:
    quiet = dict(strikes=0.0, loss=0.0, delay=0.0, crash_after=None)
    return replace(plan, silent=True, tolerant=True, engines=max(plan.engines, 2), faults=15.0, **quiet)


def args_of(plan: Plan) -> Any:
    """The flags of its run."""
    group = ServerGroupConfig("regular", num_gpus=plan.engines, num_gpus_per_engine=1)
    served = ServedModelConfig("default", None, True, 1, [group])
    return run_args(
        served_models=[served],
        rollout_num_engines=plan.engines,
        rollout_num_gpus=plan.engines,
        rollout_spare_gpus=plan.spare,
        rollout_queue_per_engine=plan.queue,
        rollout_scaling_interval=15.0,
        actor_num_gpus_per_node=plan.ranks,
        synced_checkpoint=None,
        rollout_function_path=FULLY_ASYNC if plan.fully_async else DEFAULT,
        data_source_path="tests.simulation.hooks.WatchedSource",
        custom_rm_path="tests.simulation.hooks.reward",
        dynamic_sampling_filter_path="tests.simulation.hooks.keeps" if plan.filters else None,
        partial_rollout=plan.partial and not plan.fully_async,
        max_staleness=plan.max_staleness,
        pause_generation_mode=plan.pause_mode,
        update_weights_interval=plan.interval,
        update_weight_buffer_size=4,
        num_rollout=plan.rollouts,
        rollout_batch_size=plan.batch,
        over_sampling_batch_size=plan.batch + plan.seed % 2,
        n_samples_per_prompt=2,
        global_batch_size=2 * plan.batch,
        rollout_max_response_len=100,
        sglang_server_concurrency=plan.concurrency,
        use_fault_tolerance=plan.tolerant,
        rollout_health_check_interval=5.0,
        rollout_health_check_timeout=4.0,
        rollout_engine_hang_timeout=100.0,
        rollout_timeout=1000.0,
        train_timeout=3000.0,
        cluster_timeout=120.0,
        engine_startup_timeout=200.0,
        distributed_timeout_minutes=4,
        check_served_policy=False,
        save="disk",
        load="disk",
        save_interval=1,
        start_rollout_id=None,
        sglang_router_ip=ROUTER[0],
        sglang_router_port=ROUTER[1],
        sglang_model_routers={"default": ROUTER},
    )
