import os
import signal
import time

import pytest
import ray

from slime.ray.waiting import DeadlineExceeded, ProcessDied, wait_all, wait_one

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@ray.remote
def hang() -> None:
    time.sleep(600)


@ray.remote
def fail() -> None:
    raise ValueError("rank 1 is broken")


@ray.remote
def answer(value: int) -> int:
    return value


def test_a_failed_rank_is_reported_while_an_earlier_one_hangs() -> None:
    # Once the deadline has passed, the error would be that one.
    with pytest.raises(ValueError, match="rank 1 is broken"):
        wait_all([hang.remote(), fail.remote()], "a collective", timeout=150)


def test_the_deadline_names_the_wait_and_the_missing_ranks() -> None:
    answered = answer.remote(1)
    ray.get(answered)  # a process for it may take longer to start than the deadline
    with pytest.raises(DeadlineExceeded, match=r"saving: no answer from rank\(s\) \[0\] after 5 s"):
        wait_all([hang.remote(), answered], "saving", timeout=5)


def test_results_come_in_the_order_of_the_calls() -> None:
    assert wait_all([answer.remote(i) for i in range(5)], "answers", timeout=150) == list(range(5))


@ray.remote
class Victim:
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_named_with_its_rank() -> None:
    with pytest.raises(ProcessDied, match=r"training: the process of rank 1 ended: .*"):
        wait_all([answer.remote(1), Victim.remote().die.remote()], "training", timeout=150)


@ray.remote
class Stillborn:
    def __init__(self) -> None:
        raise ValueError("this data source\n  cannot be built")

    def answer(self) -> int:
        return 1


def test_a_constructor_that_fails_is_reported_with_its_own_error() -> None:
    with pytest.raises(
        ProcessDied, match=r"start: the process of rank 0 ended: ValueError: this data source"
    ):
        wait_one(Stillborn.remote().answer.remote(), "start", timeout=150)
