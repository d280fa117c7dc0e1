"""What the first rank of the log-prob server tells the others to do, and when it gives up."""

import contextlib
import queue

import pytest
import torch.distributed as dist

from slime.backends.megatron_utils.server import launch
from slime.backends.megatron_utils.server.app import Work
from slime.backends.megatron_utils.server.model import Question


class StandInModel:
    """Notes what it is told, and loads nothing from a directory that it is told not to."""

    def __init__(self):
        self.heard = []

    def answer(self, question):
        self.heard.append(question)
        return {"log_probs": [-1.0] * (len(question.ids) - 1)}

    def load(self, path):
        self.heard.append(path)
        if path == "/none":
            raise ValueError("no tensors in /none")


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_ranks_do_what_is_waiting_in_its_order(alone, monkeypatch):
    monkeypatch.setattr(launch, "_IDLE_S", 0.01)
    model, waiting = StandInModel(), queue.Queue()
    works = [Work("answer", {"ids": [1, 2]}), Work("load", "/none"), Work("load", "/some")]
    gone = Work("answer", {"ids": [3]})
    gone.outcome.cancel()
    for work in (*works, gone):
        waiting.put(work)
    for _ in range(5):  # the last time nothing waits
        launch._lead(model, waiting)
    found = [work.outcome.result(timeout=0) for work in works]
    assert found == [{"log_probs": [-1.0]}, "no tensors in /none", None]
    assert model.heard == [Question([1, 2]), "/none", "/some", Question([3])]


@pytest.mark.parametrize(("took", "late"), [(2.0, False), (2.5, True)])
def test_a_warm_up_may_take_its_time_and_no_longer(alone, monkeypatch, took, late):
    times = iter([10.0, 10.0 + took])
    monkeypatch.setattr(launch.time, "monotonic", lambda: next(times))
    model = StandInModel()
    expected = pytest.raises(TimeoutError, match="--teacher-warmup-timeout-s 2: the warm-up took 2 s")
    with expected if late else contextlib.nullcontext():
        launch._warm_up(model, 2.0)
    assert model.heard == [Question([0, 0])]
