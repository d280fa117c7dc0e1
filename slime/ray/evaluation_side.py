"""Who evaluates, as the loop sees them: the engines of rollouts, in its place, or others beside training.

side.prepare()              # before the weight update that an evaluation follows
side.evaluate(rollout_id)   # after it
side.look()                 # at the end of each step
side.finish()               # at the end of the run

With ``--eval-model`` ``evaluate`` returns at once: engines of their own answer, which keep their weights
until the next evaluation is prepared. Each is waited for before the next one, and at the end of the run.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from slime.config.run import RunConfig
from slime.observability.run_log import RunLog
from slime.ray.actor_classes import Evaluator
from slime.ray.ending import cause
from slime.ray.losses import RolloutSideLost
from slime.ray.node import process_env, runtime_env
from slime.ray.process_watch import ProcessStopped, ProcessWatch
from slime.ray.rollout_group import RolloutGroup
from slime.ray.unfinished_evaluation import UnfinishedEvaluation
from slime.ray.waiting import ProcessDied, wait_one

logger = logging.getLogger(__name__)

_GRACE = 60.0  # seconds beyond an evaluation's own deadline: the start of its process, metrics
_LEAST = 5.0  # seconds to fetch what is there


@dataclass(frozen=True)
class _UnderWay:
    """An evaluation that goes on: its number, its answer, when it is overdue, and by which rollout side."""

    rollout_id: int
    ref: ray.ObjectRef
    deadline: float
    start: int


class EvaluationSide:
    """Evaluates after so many rollouts of training, and logs each at their number.

    An evaluation beside training that fails ends the run, as any other. One that has lost its engines or its
    process is told as missing where ``--use-fault-tolerance`` says so, since the trainer has other weights by
    then.
    """

    def __init__(self, config: RunConfig, rollout: RolloutGroup, log: RunLog) -> None:
        self._config, self._rollout, self._log = config, rollout, log
        self._model = config.evaluation.eval_model
        self._under_way: _UnderWay | None = None
        self._evaluator: Any = None
        self._evaluator_start, self._watch = 0, ProcessWatch()
        self._unfinished = UnfinishedEvaluation(config.checkpoints if self._model else None)

    def tell_unfinished(self, start: int) -> None:
        """Tells which one the run has not finished that is resumed before rollout ``start``."""
        rollout_id = self._unfinished.found()
        if self._model and rollout_id is not None and rollout_id < start:
            self._miss(rollout_id, "it was under way when the run ended that is resumed")
            self._unfinished.end()

    def prepare(self) -> None:
        """Has the engines that will evaluate take the weight update that comes now."""
        if self._model:
            self.finish()
            self._rollout.want_evaluation()

    def evaluate(self, rollout_id: int) -> None:
        """Evaluates after ``rollout_id`` rollouts of training, or begins to."""
        if self._model:
            self._begin(rollout_id)
        else:
            self._rollout.eval(rollout_id)

    def look(self) -> None:
        """Writes the row of the one under way, if it is done; raises if it has failed, or is overdue."""
        if self._under_way is None:
            return
        done, _ = ray.wait([self._under_way.ref], timeout=0)
        if done or time.monotonic() > self._under_way.deadline:
            self.finish()

    def finish(self) -> None:
        """Waits for the one under way, and writes its row."""
        if self._under_way is None:
            return
        found = self._result(self._under_way)
        rollout_id, self._under_way = self._under_way.rollout_id, None
        if found is not None:
            self._log.spans("evaluations", found[1])
            self._log.eval(rollout_id, found[0])
        self._unfinished.end()

    def settle(self) -> None:
        """Waits for the one under way, before the rollout side ends."""
        try:
            self.finish()
        except RolloutSideLost as lost:
            assert self._under_way is not None
            rollout_id, self._under_way = self._under_way.rollout_id, None
            self._miss(rollout_id, str(lost))

    def close(self) -> None:
        """Ends the process that evaluates, at the end of the run."""
        if self._evaluator is not None:
            ray.kill(self._evaluator)
            self._evaluator = None

    def _begin(self, rollout_id: int) -> None:
        served, limit = self._rollout.beside(), self._config.cluster.rollout_timeout + _GRACE
        if self._evaluator is None or self._evaluator_start != self._rollout.starts:
            self.close()
            self._start(served.config)
        self._unfinished.begin(rollout_id)
        ref = self._evaluator.eval.remote(rollout_id, served)
        self._under_way = _UnderWay(rollout_id, ref, time.monotonic() + limit, self._rollout.starts)

    def _start(self, config: RunConfig) -> None:
        self._evaluator = (
            ray.remote(Evaluator)
            .options(num_cpus=0, num_gpus=0, max_concurrency=2, runtime_env=runtime_env(process_env()))
            .remote(config)
        )
        self._evaluator_start, self._watch = self._rollout.starts, ProcessWatch()
        self._watch.add("the evaluator", self._evaluator)

    def _result(self, pending: _UnderWay) -> tuple[Mapping[str, Any], Any] | None:
        """What it has found; None if it is missing."""
        rollout_id, left = pending.rollout_id, pending.deadline - time.monotonic()
        if pending.start != self._rollout.starts:
            self._miss(rollout_id, "the rollout side was started again")
            return None
        what = f"evaluation at rollout {rollout_id} by model {self._model}"
        try:
            with self._log.phase("eval_wait", rollout=rollout_id):
                return wait_one(pending.ref, what, max(left, _LEAST), self._check)
        except Exception as error:
            reason = self._loss(error)
            if reason is None:
                raise
            self._miss(rollout_id, reason)
            return None

    def _check(self) -> None:
        self._watch.check()
        self._rollout.check()

    def _loss(self, error: Exception) -> str | None:
        """What was lost, if that is tolerated and why the evaluation failed."""
        if not self._config.fault_tolerance.use_fault_tolerance:
            return None
        if isinstance(error, ProcessDied | ProcessStopped):
            self.close()
            return cause(error)
        return None if self._rollout.beside().engines else f"model {self._model}: no engine is left"

    def _miss(self, rollout_id: int, reason: str) -> None:
        names = ", ".join(one.name for one in self._config.evaluation.eval_datasets)
        logger.warning("evaluation at rollout %d of %s is missing: %s", rollout_id, names, reason)
        self._log.eval(rollout_id, {"eval/missing": 1})
