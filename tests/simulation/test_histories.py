"""Whole lives of runs under simulation: invariants hold, a seed replays exactly, planted bugs are found.

``benchmarks/simulate.py`` plays more of them.
"""

import gc
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.simulation import plan, seams
from tests.simulation.bugs import BUGS, planted
from tests.simulation.history import Found, play, play_plan

ROOT = Path(__file__).parents[2]
_FOUND = json.loads((ROOT / "benchmarks/results/simulate.json").read_text())["bugs_found_after"]
FOUND_BY: dict[str, int] = {name: histories - 1 for name, histories in _FOUND.items() if histories}
"""The seed of a history that found a bug when `benchmarks/simulate.py` was last run, if with --bugs."""


@pytest.fixture(autouse=True, scope="module")
def imported_once():
    """What is there already need not be looked through by the garbage collector, several times a second."""
    play(0)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_every_invariant_holds_in_histories_of_every_kind():
    played = [play(seed) for seed in range(100)]
    outcomes = Counter(history.outcome == "trained" for history in played)
    assert outcomes[True] > 30 and outcomes[False] > 3
    assert sum(history.faults for history in played) > 50
    assert sum(history.resumed for history in played) > 4
    survived = [history for history in played if history.faults and history.outcome == "trained"]
    assert len(survived) > 6
    kinds = {(h.plan.fully_async, h.plan.asynchronous, h.plan.ranks, h.plan.pause_mode) for h in survived}
    assert len(kinds) > 4


@pytest.mark.slow
def test_a_seed_replays_exactly_in_this_process_and_in_any_other():
    seeds = [3, 4, 8, 9]
    here = [play(seed).digest for seed in seeds]
    assert here == [play(seed).digest for seed in seeds] and len(set(here)) == len(seeds)
    code = f"from tests.simulation.history import play\nfor seed in {seeds}: print(play(seed).digest)"
    there = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "77", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert there.stdout.split() == here, there.stderr


def test_a_history_that_does_not_hold_says_how_to_see_it_again_and_ends_the_same_way_each_time():
    name, seed = "the version of the weights falls", 1
    found = []
    for _ in range(2):
        with planted(name), pytest.raises(Found) as raised:
            play(seed, traced=True)
        found.append(raised.value)
    first, second = found
    assert f"python benchmarks/simulate.py --seed {seed}" in str(first)
    assert (first.digest, first.lines, str(first)) == (second.digest, second.lines, str(second))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    """By the seed that found it last or, where the product has changed since, by another one."""
    with planted(name), pytest.raises(Found) as found:
        for seed in [FOUND_BY.get(name, 0), *range(4000)]:
            play(seed)
    play(found.value.seed)  # nothing of it is left


def test_an_engine_that_hangs_before_it_tells_its_version_is_replaced():
    """The manager asks after each update, and its caller has a deadline too, which must not come first."""
    quiet = dict(tolerant=True, faults=None, strikes=0.0, loss=0.0, delay=0.0, crash_after=None, silent=False)
    hit = []

    def hang_once(sim):
        look = sim.rules.control

        def control(engine, name, body):
            look(engine, name, body)
            if name == "continue_generation" and engine.version == "2" and not hit:
                hit.append(engine)
                engine.hang(1e6)

        sim.rules.control = control

    one = replace(plan.draw(0), engines=2, rollouts=4, interval=1, **quiet)
    history = play_plan(one, change=hang_once)
    assert history.outcome == "trained" and hit and not hit[0].alive


@pytest.mark.parametrize("request_name", ["pause_generation", "update_weights_from_distributed"])
def test_a_router_that_ends_while_an_engine_hangs_in_an_update_costs_no_rollout_side(request_name):
    """The next one does without that engine, however long nobody else gives it up."""
    quiet = dict(tolerant=True, faults=None, strikes=0.0, loss=0.0, delay=0.0, crash_after=None, silent=False)
    alone = dict(router_deaths=(), manager_deaths=(), drains=(), adds=(), queue=None)
    hit, sides = [], []

    def hang_once(sim):
        sim.args.rollout_engine_hang_timeout, sim.args.distributed_timeout_minutes = 600.0, 15
        look = sim.rules.control

        def control(engine, name, body):
            look(engine, name, body)
            if name == request_name and engine.listed and not hit:
                hit.append(engine)
                sides.append(sim.rollout)
                engine.hang(1e6)
                sim.router.die("was killed by SIGKILL")

        sim.rules.control = control

    one = replace(plan.draw(0), engines=2, rollouts=4, interval=1, **quiet, **alone)
    history = play_plan(one, change=hang_once)
    assert history.outcome == "trained" and not hit[0].alive
    assert [side.starts for side in sides] == [1]


@pytest.mark.nightly
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_within_a_thousand_histories(name):
    with planted(name), pytest.raises(Found):
        for seed in range(1000):
            play(seed)


@pytest.mark.nightly
def test_every_invariant_holds_in_thousands_of_histories():
    for seed in range(3000):
        play(seed)


def test_no_module_under_simulation_has_another_clock_or_threads_of_its_own():
    """Names that would let real time or real threads in; what is patched or harmless is left out."""
    foreign = {
        "time",
        "threading",
        "ThreadPoolExecutor",
        "RLock",
        "monotonic",
        "sleep",
        "perf_counter",
        "ray",
    }
    patched = set(seams.names_of(_Anything()))
    left = [
        f"{path}.{name}"
        for path in seams.UNDER_SIMULATION
        for name, value in vars(import_module(path)).items()
        if name in foreign
        and f"{path}.{name}" not in patched
        and (isinstance(value, ModuleType) or callable(value))
    ]
    assert left == [
        # No thread is changed while it holds one of these.
        "slime.rollout.answer_log.threading",
        "slime.rollout.ledger.RLock",
        "slime.utils.async_utils.threading",
        "slime.utils.weight_clock.threading",
    ]


class _Anything:
    def __getattr__(self, name):
        return self


def test_plans_are_of_every_kind():
    drawn = [plan.draw(seed) for seed in range(300)]
    assert drawn == [plan.draw(seed) for seed in range(300)]
    for name, values in {
        "asynchronous": {True, False},
        "fully_async": {True, False},
        "tolerant": {True, False},
        "engines": {1, 2, 3, 4},
        "ranks": {1, 2},
        "interval": {1, 2},
        "max_staleness": {None, 1, 2, 3},
        "pause_mode": {"abort", "in_place"},
        "pieces": {1, 2, 3},
    }.items():
        assert {getattr(one, name) for one in drawn} == values, name
