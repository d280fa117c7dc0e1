"""The simulated world itself: time, threads, locks, and what it says of a thread that waits for ever."""

import pytest

from tests.simulation.kernel import Violation, World
from tests.simulation.stand_ins import Condition, Event, Lock, Modules, Pool


def test_time_jumps_to_the_next_timer():
    world, seen = World(1), []

    def body():
        world.spawn("other", lambda: (world.sleep(50.0), seen.append(world.now)))
        world.sleep(100.0)
        seen.append(world.now)

    world.run(body)
    assert seen == [50.0, 100.0]


@pytest.mark.parametrize("seed", range(20))
def test_a_lock_keeps_others_out_and_an_event_lets_all_go_on(seed):
    world, inside, log = World(seed, preemption=0.5), [], []
    lock, begin = Lock(world), Event(world)

    def work(name):
        begin.wait()
        with lock:
            inside.append(name)
            assert inside == [name]
            world.sleep(1.0)
            inside.remove(name)
            log.append(name)

    def body():
        pool = Pool(world, 3)
        futures = [pool.submit(work, name) for name in "abc"]
        world.sleep(5.0)
        assert log == []
        begin.set()
        for future in futures:
            future.result()

    world.run(body)
    assert sorted(log) == ["a", "b", "c"]


def test_the_order_of_threads_follows_from_the_seed_alone():
    def order(seed):
        world, log = World(seed), []

        def body():
            for number in range(8):
                world.spawn("one", lambda number=number: log.append(number))
            world.sleep(1.0)

        world.run(body)
        return tuple(log)

    orders = [order(seed) for seed in range(10)]
    assert orders == [order(seed) for seed in range(10)] and len(set(orders)) > 5


def test_a_wait_that_runs_out_is_told_from_one_that_was_ended():
    world, found = World(3), []

    def body():
        changed = Condition(world)
        with changed:
            found.append(changed.wait(2.0))
        world.after(1.0, changed.notify_all)
        with changed:
            found.append(changed.wait(2.0))

    world.run(body)
    assert found == [False, True]


def test_nobody_who_could_go_on_is_a_violation_that_names_the_waits():
    world = World(1)
    with pytest.raises(Violation, match=r"nobody can go on: driver: an event since 7.0 s"):
        world.run(lambda: (world.sleep(7.0), Event(world).wait()))


def test_timers_without_end_are_a_violation():
    world = World(1, most_events=100)

    def again():
        world.after(1.0, again)

    def body():
        again()
        Event(world).wait()

    with pytest.raises(Violation, match="a wait without end after 101 events: driver: an event"):
        world.run(body)


def test_an_error_in_any_thread_ends_the_world():
    world = World(1)

    def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError):
        world.run(lambda: (world.spawn("other", fail), world.sleep(10.0)))


def test_a_process_that_is_killed_ends_where_it_is_and_its_locks_stay_its_own_affair():
    world, log = World(1), []

    def body():
        def wait():
            try:
                world.sleep(100.0)
                log.append("went on")
            finally:
                log.append(f"ended at {world.now:.0f}")

        world.spawn("victim", wait, process="victim")
        world.sleep(3.0)
        world.kill("victim")
        world.sleep(1.0)

    world.run(body)
    assert log == ["ended at 3"]


def test_a_coroutine_on_the_loop_of_the_world_sleeps_in_its_time():
    import asyncio

    world, found = World(1), []
    modules = Modules(world)

    async def sleep():
        await asyncio.sleep(1000.0)
        return world.now

    def body():
        found.append(modules.asyncio.run_coroutine_threadsafe(sleep(), modules.loop()).result())

    world.run(body)
    modules.close()
    assert found == pytest.approx([1000.0])
