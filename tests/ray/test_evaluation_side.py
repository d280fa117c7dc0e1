"""Who evaluates: the engines of rollouts, or others beside training."""

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.observability.run_log import RunLog
from slime.observability.tracking import Tracker
from slime.ray import evaluation_side
from slime.ray.evaluation_side import EvaluationSide
from slime.ray.losses import RolloutSideLost
from slime.ray.waiting import ProcessDied
from tests.run_args import config_with


class Rows:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self, axis: str, step: int, metrics: Any) -> None:
        self.rows.append((axis, step, dict(metrics)))

    def close(self) -> None:
        return


class Side:
    """A rollout side that notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.starts, self.num_rollout_per_epoch = 1, None
        self.engines, self.lost = ["http://engine1"], False

    def eval(self, rollout_id: int) -> None:
        self.calls.append(("eval", rollout_id))

    def want_evaluation(self) -> None:
        self.calls.append("want")

    def beside(self) -> Any:
        if self.lost:
            raise RolloutSideLost("the rollout manager ended")
        return SimpleNamespace(config=None, version="3", engines=self.engines)

    def check(self) -> None:
        return


class Beside:
    """Evaluations by a stand-in for the actor.

    Attributes:
        done: whether the one under way has ended.
        failure: how; None for well.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
        self.sink, self.side, self.evaluators = Rows(), Side(), 0
        self.done, self.failure = False, None
        monkeypatch.setattr(evaluation_side, "ray", SimpleNamespace(wait=self._wait, kill=lambda actor: None))
        monkeypatch.setattr(evaluation_side, "wait_one", self._answer)
        monkeypatch.setattr(EvaluationSide, "_start", self._start)
        given = dict(eval_interval=2, eval_model="judged", eval_datasets=[SimpleNamespace(name="sums")])
        config = config_with(**given | flags)
        self.evaluation = EvaluationSide(config, self.side, RunLog(Tracker([self.sink])))  # type: ignore[arg-type]

    @property
    def rows(self) -> list[Any]:
        return [(step, metrics) for axis, step, metrics in self.sink.rows if axis == "eval"]

    def _start(self, config: Any) -> None:
        self.evaluators += 1
        ask = SimpleNamespace(remote=lambda rollout_id, served: rollout_id)
        self.evaluation._evaluator = SimpleNamespace(eval=ask)
        self.evaluation._evaluator_start = self.side.starts

    def _wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (refs, []) if self.done else ([], refs)

    def _answer(self, ref: Any, what: str, timeout: float, meanwhile: Any) -> Any:
        assert what == f"evaluation at rollout {ref} by model judged"
        if self.failure:
            raise self.failure
        return {"eval/sums": float(ref)}, []


def test_without_a_model_of_its_own_it_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Beside(monkeypatch, eval_model=None)
    run.evaluation.prepare()
    run.evaluation.evaluate(2)
    run.evaluation.look()
    run.evaluation.finish()
    assert run.side.calls == [("eval", 2)] and not run.evaluators


def test_the_row_is_written_as_soon_as_it_is_known_and_at_its_number(monkeypatch) -> None:
    run = Beside(monkeypatch)
    run.evaluation.prepare()
    run.evaluation.evaluate(2)
    run.evaluation.look()
    assert run.rows == []
    run.done = True
    run.evaluation.look()
    assert run.rows == [(2, {"eval/sums": 2.0})]


def test_one_is_waited_for_before_the_next_one_and_at_the_end(monkeypatch) -> None:
    run = Beside(monkeypatch)
    run.evaluation.evaluate(2)
    run.evaluation.prepare()
    assert run.rows == [(2, {"eval/sums": 2.0})] and run.side.calls == ["want"]
    run.evaluation.evaluate(4)
    run.evaluation.finish()
    run.evaluation.finish()
    assert [step for step, _ in run.rows] == [2, 4] and run.evaluators == 1


def test_one_that_is_overdue_is_not_left_until_the_next_one(monkeypatch) -> None:
    run = Beside(monkeypatch, rollout_timeout=10.0)
    run.evaluation.evaluate(2)
    run.failure = TimeoutError("no answer")
    run.evaluation.look()
    now = time.monotonic()
    monkeypatch.setattr(evaluation_side.time, "monotonic", lambda: now + 10 + evaluation_side._GRACE + 1)
    with pytest.raises(TimeoutError):
        run.evaluation.look()


@pytest.mark.parametrize("tolerant", [False, True])
def test_one_that_fails_ends_the_run(monkeypatch, tolerant: bool) -> None:
    run = Beside(monkeypatch, use_fault_tolerance=tolerant)
    run.evaluation.evaluate(2)
    run.done, run.failure = True, RuntimeError("the reward is broken")
    with pytest.raises(RuntimeError, match="the reward is broken"):
        run.evaluation.look()
    assert run.rows == []


LOSSES = [
    (ProcessDied("the evaluator ended"), ["http://engine1"], "the evaluator ended"),
    (RuntimeError("no answer"), [], "model judged: no engine is left"),
]


@pytest.mark.parametrize(("failure", "engines", "reason"), LOSSES)
def test_one_that_has_lost_what_answers_it_is_missing_by_name(
    monkeypatch, caplog, failure: Exception, engines: list[str], reason: str
) -> None:
    run = Beside(monkeypatch, use_fault_tolerance=True)
    run.evaluation.evaluate(2)
    run.failure, run.side.engines = failure, engines
    run.evaluation.finish()
    assert run.rows == [(2, {"eval/missing": 1})]
    assert caplog.messages == [f"evaluation at rollout 2 of sums is missing: {reason}"]
    run.failure = None
    run.evaluation.evaluate(4)
    run.evaluation.finish()
    assert run.rows[1:] == [(4, {"eval/sums": 4.0})]


def test_a_loss_that_is_not_tolerated_ends_the_run(monkeypatch) -> None:
    run = Beside(monkeypatch)
    run.evaluation.evaluate(2)
    run.failure = ProcessDied("the evaluator ended")
    with pytest.raises(ProcessDied):
        run.evaluation.finish()


def test_one_is_missing_whose_engines_were_started_again_with_the_rollout_side(monkeypatch) -> None:
    run = Beside(monkeypatch, use_fault_tolerance=True)
    run.evaluation.evaluate(2)
    run.side.starts = 2
    run.evaluation.finish()
    assert run.rows == [(2, {"eval/missing": 1})]
    run.evaluation.evaluate(4)
    assert run.evaluators == 2  # routers are elsewhere now


def test_the_rollout_side_may_be_lost_with_ranks(monkeypatch) -> None:
    run = Beside(monkeypatch, use_fault_tolerance=True)
    run.evaluation.evaluate(2)
    run.failure, run.side.lost = RuntimeError("no answer"), True
    with pytest.raises(RolloutSideLost):
        run.evaluation.finish()
    run.evaluation.settle()
    assert run.rows == [(2, {"eval/missing": 1})]


def test_a_resumed_run_tells_what_was_under_way(monkeypatch, caplog, tmp_path: Path) -> None:
    places = {"save": str(tmp_path), "load": str(tmp_path)}
    ended = Beside(monkeypatch, **places)
    ended.evaluation.evaluate(2)  # and is killed

    begun = Beside(monkeypatch, **places)
    begun.evaluation.tell_unfinished(2)  # done again
    assert begun.rows == []
    with caplog.at_level(logging.WARNING):
        begun.evaluation.tell_unfinished(3)
    assert begun.rows == [(2, {"eval/missing": 1})]
    assert "evaluation at rollout 2 of sums is missing: it was under way" in caplog.text
    begun.evaluation.evaluate(4)
    begun.evaluation.finish()

    again = Beside(monkeypatch, **places)
    again.evaluation.tell_unfinished(5)
    assert again.rows == [] and [*tmp_path.iterdir()] == []
