"""One line per step that a person can read."""

import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from numbers import Real
from statistics import fmean
from typing import Any, TextIO

from slime.config.metrics import MetricsConfig
from slime.observability.policy_rows import PolicyRows
from slime.processes.termination import was_terminated

_RECENT, _ENOUGH = 10, 3  # steps by which the time left is told: the last ones, once there are so many
Column = tuple[str, tuple[str, ...], Callable[[float], str]]


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _plain(value: float) -> str:
    return f"{value:.3f}"


def _loss(value: float) -> str:
    return f"{round(value, 4) + 0.0:.4f}"  # what rounds to zero has no sign


def duration(seconds: float) -> str:
    """Seconds for people: ``1:05:09``, ``3:20``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _seconds(value: float) -> str:
    return f"{value:.1f}s"


# Heading, the metrics that can fill it (first one present wins), format.
RESULT_COLUMNS: tuple[Column, ...] = (
    ("reward", ("rollout/raw_reward",), _plain),
    ("len", ("rollout/response_len/mean",), lambda value: f"{value:.1f}"),
    ("loss", ("train/loss",), _loss),
    ("critic", ("train/critic-value_loss",), _loss),
    ("ppo_kl", ("train/ppo_kl",), _small),
    ("kl", ("train/kl_loss",), _small),
    ("grad", ("train/grad_norm",), _plain),
    ("logp gap", ("train/train_rollout_logprob_abs_diff",), _small),
    ("lr", ("train/lr-pg_0",), _small),
)
TIME_COLUMNS: tuple[Column, ...] = (
    ("rollout", ("perf/rollout_time",), _seconds),
    ("logp", ("perf/log_probs_time",), _seconds),
    ("ref", ("perf/ref_log_probs_time",), _seconds),
    ("train", ("perf/actor_train_time", "perf/train_time"), _seconds),
    ("sync", ("perf/update_weights_time",), _seconds),
    ("save", ("perf/save_model_time",), _seconds),
    ("step", ("perf/step_time",), _seconds),
)
# Of runs on GPUs.
DEVICE_COLUMNS: tuple[Column, ...] = (
    ("mem", ("perf/memory_allocated_gib",), lambda value: f"{value:.1f}GiB"),
    ("mfu", ("perf/actor_train_mfu",), lambda value: f"{value:.0%}"),
)

_POLICY_ROWS = PolicyRows(name for _, names, _ in RESULT_COLUMNS for name in names)
_SYNC_TOTALS = ("wire_bytes", "transfer_time", "floor_time", "pause_time")


class ConsoleSink:
    """Prints a line per rollout and per evaluation.

    The rows of a rollout, and those of the optimizer steps since the last line, are collected until the row
    that ends the step, the one with ``perf/step_time``: in the asynchronous loop the next rollout may be
    there first. Ten optimizer steps are still one line, showing the last of the ten.
    """

    def __init__(self, config: MetricsConfig, stream: TextIO | None = None) -> None:
        self._num_rollout: int | None = config.data.num_rollout
        self._hidden = {"rollout/raw_reward"} if config.loss.loss_type == "sft_loss" else set()
        self._stream = stream or sys.stdout
        self._rollouts: dict[int, dict[str, Any]] = {}
        self._train: dict[str, Any] = {}
        self._evals: list[str] = []
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._synced: Counter[str] = Counter()

    def write(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None:
        if axis == "train":
            self._train.update(metrics)
            return
        if axis == "eval":
            self._evals.append(format_eval_line(step, metrics))
            if not self._rollouts and not self._train:
                self._print_evals()
            return
        row = self._rollouts.setdefault(step, {})
        row.update({name: value for name, value in metrics.items() if name not in self._hidden})
        for name in _SYNC_TOTALS:
            self._synced[name] += metrics.get(f"perf/update_weights_{name}", 0)
        if "perf/step_time" in metrics:
            self._end(step)

    def close(self) -> None:
        """Print what a failed step has left, and what weight updates took; one told to end has not failed."""
        if was_terminated():
            return
        self._end(max(self._rollouts, default=0))
        if self._train:
            self._print(format_rollout_line(None, self._num_rollout, self._train))
        if self._synced["wire_bytes"]:
            self._print(format_sync_line(self._synced))

    def _end(self, step: int) -> None:
        """The lines of this rollout and of earlier ones that never ended, then those of evaluations."""
        for ended in sorted(rollout for rollout in self._rollouts if rollout <= step):
            train, self._train = self._train, {}
            metrics = self._rollouts.pop(ended) | train
            self._print(format_rollout_line(ended, self._num_rollout, metrics) + self._left(ended, metrics))
        self._print_evals()

    def _left(self, step: int, metrics: Mapping[str, Any]) -> str:
        """How long the run still takes, by its last steps; nothing before there are enough of them."""
        if isinstance(seconds := metrics.get("perf/step_time"), Real):
            self._recent.append(float(seconds))
        rest = (self._num_rollout or 0) - step - 1
        if rest <= 0 or len(self._recent) < _ENOUGH:
            return ""
        return f"  left {duration(rest * fmean(self._recent))}"

    def _print_evals(self) -> None:
        for line in self._evals:
            self._print(line)
        self._evals = []

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")  # as a whole: a signal may end the run between two writes
        self._stream.flush()


def format_rollout_line(step: int | None, num_rollout: int | None, metrics: Mapping[str, Any]) -> str:
    """Counts from one, because "15/15" is what a reader expects of the last line."""
    total = f"/{num_rollout}" if num_rollout else ""
    heading = "train" if step is None else f"rollout {step + 1:>3}{total}"
    parts = [heading, _format_columns(RESULT_COLUMNS, metrics)]
    further = [
        *(
            f"{policy} {_format_columns(RESULT_COLUMNS, own)}"
            for policy, own in _POLICY_ROWS.split(metrics).items()
        ),
        *(_format_columns(columns, metrics) for columns in (TIME_COLUMNS, DEVICE_COLUMNS)),
    ]
    return "".join(["  ".join(filter(None, parts)), *(f"  | {cells}" for cells in further if cells)])


def format_eval_line(step: int, metrics: Mapping[str, Any]) -> str:
    """Formats the mean reward of each dataset; the rest is in the metrics file."""
    scores = {
        name.removeprefix("eval/"): value
        for name, value in metrics.items()
        if name.count("/") == 1 and name.startswith("eval/") and "-" not in name and isinstance(value, Real)
    }
    text = "  ".join(f"{name} {_plain(float(value))}" for name, value in scores.items())
    return f"eval at {step:>3}  {text}"


def format_sync_line(totals: Mapping[str, float]) -> str:
    """The bytes and seconds of all weight updates of a run, and how long engines stood still for them."""
    sent, taken = totals["wire_bytes"] / 1e9, totals["transfer_time"]
    least = totals["floor_time"]
    share = f", {least / taken:.2g} of what its path can" if taken and least else ""
    speed = f" ({sent / taken:.3g} GB/s{share})" if taken else ""
    return f"weight sync: {sent:.3g} GB in {taken:.1f}s{speed}, engines paused {totals['pause_time']:.1f}s"


def _format_columns(columns: tuple[Column, ...], metrics: Mapping[str, Any]) -> str:
    cells = []
    for heading, names, show in columns:
        value = next((metrics[name] for name in names if name in metrics), None)
        if isinstance(value, Real):
            cells.append(f"{heading} {show(float(value))}")
    return "  ".join(cells)
