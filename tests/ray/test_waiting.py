import os
import signal
import time

import pytest
import ray

from slime.ray.local_start import start_ray
from slime.ray.waiting import DeadlineExceeded, ProcessDied, wait_all, wait_one

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def cluster():
    options = {"num_cpus": 4, "include_dashboard": False, "log_to_driver": False}
    start_ray(300.0, lambda: ray.init(address="local", **options))
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
def length(data: bytes) -> int:
    return len(data)


@ray.remote
def need_what_is_lost() -> None:
    raise ray.exceptions.ObjectReconstructionFailedError("0f" * 28, None, "")


def test_what_is_lost_with_a_node_is_a_loss_by_name() -> None:
    """As a batch is whose rollout manager ran on that node: the step can be taken again.

    So Ray fails a call that was given what only another node held, which is gone.
    """
    with pytest.raises(ray.exceptions.ObjectLostError):
        ray.get(lost := need_what_is_lost.remote())
    with pytest.raises(ProcessDied, match=r"^actor: training: what rank 0 answered, or was given, is lost"):
        wait_all([lost], "actor: training", timeout=150)


@ray.remote
def lose_peer() -> None:
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711")


@ray.remote
class Victim:
    def pid(self) -> int:
        return os.getpid()

    def die(self, number: int, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), number)


def test_a_killed_process_is_named_with_its_rank() -> None:
    victim = Victim.remote()
    pid = ray.get(victim.pid.remote())
    named = rf"training: rank 1 \(process {pid} on [\d.]+\) left no trace, as after SIGKILL"
    with pytest.raises(ProcessDied, match=named):
        wait_all([answer.remote(1), victim.die.remote(signal.SIGKILL)], "training", timeout=150)


def test_a_crash_is_told_by_its_signal() -> None:
    crashed = r"rank 0 \(process \d+ on [\d.]+\) (was killed by SIGSEGV|ended: Segmentation fault); its log"
    with pytest.raises(ProcessDied, match=crashed):
        wait_all([Victim.remote().die.remote(signal.SIGSEGV)], "training", timeout=150)


def test_the_rank_that_ended_is_told_though_its_peer_fails_first() -> None:
    victim = Victim.remote()
    ray.get(victim.pid.remote())
    refs = [lose_peer.remote(), victim.die.remote(signal.SIGKILL, 1.0)]
    with pytest.raises(ProcessDied, match=r"training: rank 1 \(process "):
        wait_all(refs, "training", timeout=150)


def test_a_peer_that_fails_alone_is_told() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait_all([lose_peer.remote(), answer.remote(1)], "training", timeout=150)


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
