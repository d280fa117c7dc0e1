"""What the loops report: metrics as they come, and the seconds of each phase.

A rollout has several rows with the same step. Its results are written as soon as they are known, so
that a crash during the save that follows loses none; the row that ends the step holds the phase times.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slime.observability.spans import DRIVER, END, START, STEP, Span, SpanList, SpanSink
from slime.observability.tracking import Tracker


class RunLog:
    """The driver's log of one run.

    Attributes:
        tracker: where rows go.
        sinks: where spans go.
        trained_steps: optimizer steps of the run so far, those before a resume included. Roles that train on
            one rollout take theirs side by side, under the same numbers.
    """

    def __init__(self, tracker: Tracker, sinks: Sequence[SpanSink] = ()) -> None:
        self.tracker, self.sinks = tracker, sinks
        self._spans, self._part = SpanList(), START
        self.trained_steps = 0
        self._last_trained = -1, 0  # a rollout, and its first step
        self._last_rollout = -1
        self._of_step: dict[str, float] = defaultdict(float)
        self._step_start, self._step_began = time.monotonic(), time.time()

    @property
    def traces(self) -> bool:
        """Whether spans go anywhere."""
        return bool(self.sinks)

    @contextmanager
    def span(self, name: str, **attrs: Any) -> Iterator[None]:
        """Measures the block as a span of the driver."""
        try:
            with self._spans.measure(name, **attrs):
                yield
        finally:
            self.spans(DRIVER, self._spans.take())

    @contextmanager
    def phase(self, name: str, **attrs: Any) -> Iterator[None]:
        """Adds the wall seconds of the block to ``perf/<name>_time`` of the current step."""
        start = time.monotonic()
        try:
            with self.span(name, **attrs):
                yield
        finally:
            self.count(f"{name}_time", time.monotonic() - start)

    def spans(self, process: str, spans: Iterable[Span]) -> None:
        """What a process did when."""
        for sink in self.sinks:
            sink.write(process, spans)

    def count(self, name: str, amount: float) -> None:
        """Adds to ``perf/<name>`` of the current step."""
        self._of_step[f"perf/{name}"] += amount

    def rollout(self, rollout_id: int, metrics: Mapping[str, Any]) -> None:
        """A row of a rollout. ``rollout/step``, in its first one, is for sinks that count steps otherwise."""
        if rollout_id != self._last_rollout:
            self._last_rollout, metrics = rollout_id, {"rollout/step": rollout_id, **metrics}
        self.tracker.log(metrics, axis="rollout", step=rollout_id)

    def eval(self, rollout_id: int, metrics: Mapping[str, Any]) -> None:
        """Scores after ``rollout_id`` rollouts of training."""
        self.tracker.log(metrics, axis="eval", step=rollout_id)

    def go_on_after(self, steps: int) -> None:
        """Counts on from a checkpoint; of several the furthest."""
        self.trained_steps = max(self.trained_steps, steps)

    def go_back_to(self, steps: int) -> None:
        """Counts on from a checkpoint of this run; what came after it is trained on again."""
        self.count("rebuild_lost_steps", max(self.trained_steps - steps, 0))
        self.trained_steps, self._last_trained = steps, (-1, 0)

    def train(self, rollout_id: int, report: Mapping[str, Any]) -> None:
        """A role's report: ``train`` (one row per optimizer step), ``rollout`` and ``perf``."""
        if self._last_trained[0] != rollout_id:
            self._last_trained = rollout_id, self.trained_steps
        steps, first = report.get("train", []), self._last_trained[1]
        for number, metrics in enumerate(steps, start=first):
            self._train_row(number, metrics)
        self.trained_steps = max(self.trained_steps, first + len(steps))
        self.rollout(rollout_id, {**report.get("rollout", {}), **report.get("perf", {})})

    def _train_row(self, number: int, metrics: Mapping[str, Any]) -> None:
        self.tracker.log({**metrics, "train/step": number}, axis="train", step=number)

    def start_loop(self) -> None:
        """Forgets what the start took, so that the first step counts only its own."""
        self._of_step.clear()
        self._end_part()
        self._part = END
        self._step_start = time.monotonic()

    def close(self) -> None:
        """Ends the last part of the run, and closes what spans go to."""
        self._end_part()
        for sink in self.sinks:
            sink.close()

    def _end_part(self, part: str = "", **attrs: Any) -> None:
        now = time.time()
        self.spans(DRIVER, [Span(part or self._part, self._step_began, now, attrs=attrs)])
        self._step_began = now

    def end_step(self, rollout_id: int) -> None:
        """Writes the phase times of the step, ``perf/step_time`` among them, and starts the next.

        ``perf/wait_time_ratio`` is the part of the step in which the trainer had nothing to train on,
        ``perf/update_weights_gb_per_s`` the speed at which weights were handed over, and
        ``perf/update_weights_floor_share`` that of the path alone over it.
        """
        now = time.monotonic()
        seconds = now - self._step_start
        waited = self._of_step.get("perf/rollout_wait_time", 0.0) / seconds if seconds else 0.0
        whole = {"perf/step_time": seconds, "perf/wait_time_ratio": waited}
        if taken := self._of_step.get("perf/update_weights_transfer_time"):
            sent = self._of_step["perf/update_weights_wire_bytes"]
            whole["perf/update_weights_gb_per_s"] = sent / taken / 1e9
            if least := self._of_step.get("perf/update_weights_floor_time"):
                whole["perf/update_weights_floor_share"] = least / taken
        self.rollout(rollout_id, {**self._of_step, **whole})
        self._of_step.clear()
        self._end_part(STEP, rollout=rollout_id)
        self._step_start = now
