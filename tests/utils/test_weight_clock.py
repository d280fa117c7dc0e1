import asyncio

from slime.utils.weight_clock import WeightClock


def test_an_update_that_begins_again_counts_once():
    clock = WeightClock()
    for _ in range(3):
        clock.begin_update()
    assert (clock.updates, clock.version) == (1, None)
    clock.end_update(4)
    clock.begin_update()
    assert (clock.updates, clock.version) == (2, 4)


def test_age_is_counted_to_the_weights_that_are_trained():
    clock = WeightClock()
    assert clock.age(3) == 0
    clock.end_update(5)
    assert clock.age(3) == 2
    clock.ahead = 1
    assert clock.age(3) == 3
    assert clock.age(None) == 0


def test_prefixes_have_the_key_of_the_weights_that_will_read_them():
    clock = WeightClock()
    assert clock.cache_key() == {}
    clock.keeps_prefixes = True
    keys = [clock.cache_key()["extra_key"]]
    for step in (clock.begin_update, lambda: clock.end_update(1), clock.begin_update):
        step()
        keys.append(clock.cache_key()["extra_key"])
    assert keys[1] == keys[2] and len(set(keys)) == 3


async def test_whoever_waits_is_woken_by_another_thread():
    clock = WeightClock()
    await clock.settled()
    clock.begin_update()
    waiting = [asyncio.ensure_future(clock.settled()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await asyncio.to_thread(clock.end_update, 1)
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
