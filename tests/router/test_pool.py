"""Which worker gets a request, and when one is trusted."""

import random

from slime.router.pool import Worker, WorkerPool, WorkerState

URLS = [f"http://10.0.0.{number}:1" for number in range(5)]


def pool_of(*urls: str) -> WorkerPool:
    pool = WorkerPool(failure_threshold=3)
    for url in urls:
        pool.report(pool.add(url), None, None)
    return pool


def fail(pool: WorkerPool, worker: Worker, times: int = 3) -> None:
    for _ in range(times):
        pool.report(worker, "no answer", None)


def test_the_worker_with_the_fewest_requests_gets_the_next_one() -> None:
    pool, rng = pool_of(*URLS), random.Random(0)
    for _ in range(200):
        if rng.random() < 0.7:
            fewest = min(worker.in_flight for worker in pool)
            chosen = pool.choose(None)
            assert chosen is not None and chosen.in_flight == fewest
            chosen.in_flight += 1
        else:
            busy = [worker for worker in pool if worker.in_flight]
            if busy:
                rng.choice(busy).in_flight -= 1


def test_idle_workers_take_turns() -> None:
    pool = pool_of(*URLS)
    assert [pool.choose(None).url for _ in range(10)] == [*URLS, *URLS]


def test_a_session_stays_and_only_those_of_a_worker_that_leaves_move() -> None:
    pool = pool_of(*URLS)
    sessions = [f"session {number}" for number in range(500)]
    before = {session: pool.choose(session).url for session in sessions}
    assert {session: pool.choose(session).url for session in sessions} == before
    assert all(list(before.values()).count(url) > 50 for url in URLS)
    pool.remove(URLS[2])
    moved = {session for session in sessions if pool.choose(session).url != before[session]}
    assert moved == {session for session in sessions if before[session] == URLS[2]}


def test_workers_that_were_tried_or_do_not_serve_are_not_chosen() -> None:
    pool = pool_of(*URLS[:2])
    pool.add(URLS[2])
    tried = [pool.choose(None), pool.choose(None)]
    assert {worker.url for worker in tried} == set(URLS[:2])
    assert pool.choose(None, tried) is None and pool.choose("session", tried) is None
    assert f"{URLS[2]} is pending: has not answered yet" in pool.why_none()
    assert WorkerPool(1).why_none() == "no worker is registered"


def test_one_that_refused_a_connection_is_the_last_choice_for_a_while() -> None:
    pool = pool_of(*URLS[:2])
    first = pool.get(URLS[0])
    pool.refused(first)
    pool.get(URLS[1]).in_flight = 100
    assert pool.choose(None).url == URLS[1]
    assert pool.choose(None, [pool.get(URLS[1])]) is first


def test_failures_count_only_in_a_row() -> None:
    pool = pool_of(URLS[0])
    worker = pool.get(URLS[0])
    for _ in range(5):
        fail(pool, worker, 2)
        assert not pool.report(worker, None, None)
    fail(pool, worker, 2)
    assert pool.report(worker, "no answer", None), "it serves no more"
    assert worker.state is WorkerState.QUARANTINED and pool.choose(None) is None
    assert f"{URLS[0]} is quarantined: no answer" in pool.why_none()


def test_the_way_back_is_newer_weights_that_are_current() -> None:
    pool = pool_of(*URLS[:2])
    sick, well = pool.get(URLS[0]), pool.get(URLS[1])
    pool.report(sick, None, 4)
    pool.report(well, None, 5)
    fail(pool, sick)
    for version in (None, 4, 5):  # a new process without weights; those it had; those that all had then
        assert not pool.report(sick, None, version)
    pool.report(well, None, 7)
    assert not pool.report(sick, None, 6), "newer than at its quarantine, older than what serves"
    assert pool.report(sick, None, 7)
    assert sick.state is WorkerState.SERVING


def test_whoever_registers_a_quarantined_worker_vouches_for_it() -> None:
    pool = pool_of(URLS[0])
    old = pool.get(URLS[0])
    fail(pool, old)
    new = pool.add(URLS[0])
    assert new is not old and new.state is WorkerState.PENDING
    assert pool.report(new, None, None)
    assert pool.add(URLS[0]) is new and len(pool) == 1


def test_another_process_takes_the_table_over_and_keeps_its_counts() -> None:
    parent, child = pool_of(*URLS[:3]), WorkerPool(3)
    child.apply(parent.table())
    child.get(URLS[0]).in_flight = 7
    fail(parent, parent.get(URLS[1]))
    parent.remove(URLS[2])
    child.apply(parent.table())
    assert child.get(URLS[0]).in_flight == 7
    assert child.choose(None).url == URLS[0] and len(child) == 2
    assert child.why_none() == parent.why_none()
