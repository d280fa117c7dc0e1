"""What has gone wrong in a run that goes on all the same: rules over the rows of its metrics.

watch = AlertWatch(max_staleness=2)
for axis, step, metrics in read_rows(path):
    watch.write(axis, step, metrics)
for alert in watch.alerts():
    print(alert)
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

from slime.observability.alert import FAULTY_PART, Alert, Rule, RuleState
from slime.observability.metric import Metric
from slime.observability.policy_rows import PolicyRows
from slime.observability.series import Series
from slime.observability.silent_steps import ADVICE, CURVES, USUAL_GAP, SilentSteps
from slime.observability.slow_ranks import NO_RANK

_ENOUGH = 10  # steps before a reward is held against the best so far
_LOST = 0.5  # of the best reward
_CHANGES = 4.0  # usual changes of a step below the best: no noise
_GROWN = 10.0  # times the gap of the first steps
_CUT = 0.5  # of the answers
_ALONE = 1.05  # tokens per verification, of which one is there without a draft


def _collapsed(reward: float, series: Series) -> str | None:
    best, change = series.best, series.change_at_best
    if series.count < _ENOUGH or reward >= best - max(_LOST * abs(best), _CHANGES * change):
        return None
    return f"the reward has fallen from {best:.3g} to {reward:.3g}"


def _grown(gap: float, series: Series) -> str | None:
    if series.early is None or gap <= max(USUAL_GAP, _GROWN * series.early):
        return None
    return f"trainer and engines are {gap:.2g} nats per token apart, at first {series.early:.2g}"


def _flat(part: float, series: Series) -> str | None:
    return f"{part:.0%} of the groups have one reward throughout" if part >= FAULTY_PART else None


def _cut_off(part: float, series: Series) -> str | None:
    return f"{part:.0%} of the answers were cut off at their longest length" if part >= _CUT else None


def _not_accepted(length: float, series: Series) -> str | None:
    if length > _ALONE:
        return None
    return f"{length:.3g} tokens are accepted at once: what the draft proposes is thrown away"


def _masked(longest: float, series: Series) -> str | None:
    return "no answer has a token that is trained on: every loss mask is 0" if longest <= 0 else None


def _no_gradient(norm: float, series: Series) -> str | None:
    return "the gradient is exactly 0: nothing is learned" if norm == 0 else None


def _replaced(count: float, series: Series) -> str | None:
    before = series.previous or 0.0
    if count <= before:
        return None
    return f"{count - before:.0f} died and got a successor, {count:.0f} so far"


def _slow(rank: float, series: Series) -> str | None:
    """Work may be shared out unevenly, but then it is another rank each time."""
    if rank < 0 or series.previous not in (None, NO_RANK, rank):
        return None
    return f"rank {rank:.0f} takes over 1.5 times what the others take where they do not wait for one another"


def _missing(engines: float, series: Series) -> str | None:
    return f"{engines:.0f} died and got no successor yet" if engines > 0 else None


def _unbalanced(groups: float, series: Series) -> str | None:
    return f"{groups:.0f} groups of samples have no place, or more than one" if groups else None


def _stale(bound: int, age: float, series: Series) -> str | None:
    if age < bound:
        return None
    return f"the oldest tokens are {age:.0f} versions old, and no more than {bound} are allowed"


_LOOK_AT_LOGS = (
    "Its log, which the run's output names, says why; memory is the usual cause "
    "(--sglang-mem-fraction-static)."
)
SLOW_RANK = Rule(
    "slow rank",
    "perf/slow_rank",
    "All others wait for it in every step: look at its machine (other processes, clocks, a broken link), or "
    "let work be shared out by --balance-data.",
    _slow,
    rows=3,
)
"""The trace of ``--trace`` shows it too, with what the rank takes and what the others do."""
_SLOW_CRITIC_RANK = replace(SLOW_RANK, name="slow critic rank", metric="perf/critic-slow_rank")
RULES = (
    Rule(
        "reward collapse",
        "rollout/raw_reward",
        "Look at the samples of that step: answers that are empty, alike or cut off, or a grader that fails. "
        "If the policy itself broke, resume from a checkpoint before it with a smaller --lr or with "
        "--use-kl-loss.",
        _collapsed,
        rows=3,
    ),
    Rule(
        "gap growing",
        "train/train_rollout_logprob_abs_diff",
        "Look whether weights arrive whole (--check-weight-update-equal) and at low precision; --use-tis "
        "corrects the loss for what is left.",
        _grown,
        rows=3,
    ),
    Rule(
        "groups without signal",
        "rollout/flat_groups",
        "Prompts are too easy or too hard, or the grader gives all answers one reward: look at samples. "
        "--dynamic-sampling-filter-path leaves such groups out.",
        _flat,
        rows=3,
    ),
    Rule(
        "truncation",
        "rollout/truncated_ratio",
        "A reward that reads the end of an answer finds nothing: a larger --rollout-max-response-len, or "
        "prompts and rewards that ask for shorter answers.",
        _cut_off,
        rows=3,
    ),
    Rule(
        "accepted length 1",
        "rollout/spec_accept_length",
        "Look whether the draft (--sglang-speculative-draft-model-path) is one of this model, and whether it "
        "is trained along (--enable-mtp-training).",
        _not_accepted,
        rows=3,
    ),
    Rule(
        "everything masked",
        "rollout/response_len/max",
        "Look at the code that makes loss masks: --custom-generate-function-path, an agent of yours, or of "
        "chats --loss-mask-type.",
        _masked,
    ),
    Rule(
        "no gradient",
        "train/grad_norm",
        "Loss masks that are all 0, samples that a filter removes (remove_sample), or rewards that are alike "
        "in each group: look at the masks and advantages of samples.",
        _no_gradient,
        rows=3,
    ),
    Rule(
        "books do not balance",
        "rollout/ledger/unbalanced",
        "Samples are lost or trained twice: look at your own code that takes groups, hands them back or "
        "keeps them (--data-source-path, --rollout-function-path, --buffer-filter-path).",
        _unbalanced,
    ),
    Rule("engine died", "fleet/<model>/replaced", _LOOK_AT_LOGS, _replaced),
    Rule("engine missing", "fleet/<model>/missing", _LOOK_AT_LOGS, _missing),
    SLOW_RANK,
    _SLOW_CRITIC_RANK,
)
"""What is looked for in every run, by one metric each."""
STEP_RULES = {
    kind: Rule(name, CURVES[kind], f"{ADVICE[kind][0].upper()}{ADVICE[kind][1:]}.")
    for kind, name in (
        ("gap", "log-prob gap"),
        ("kl", "policy moves too far"),
        ("entropy", "entropy collapse"),
    )
}
"""What `SilentSteps` looks for, by its names."""


def _staleness(bound: int) -> Rule:
    return Rule(
        "staleness at its bound",
        "rollout/fully_async/staleness/max",
        "Groups are as old as they may be, and older ones are thrown away: more engines, fewer groups under "
        "way, or a larger --max-staleness with a correction (--use-tis).",
        partial(_stale, bound),
        rows=5,
    )


class AlertWatch:
    """Looks at a run's rows as they are written; a sink that tells when it is asked.

    Where several policies are trained each is looked at for itself.
    """

    def __init__(self, max_staleness: int | None = None) -> None:
        self._max_staleness = max_staleness
        rules = RULES if max_staleness is None else (*RULES, _staleness(max_staleness))
        self._rules = [(rule, rule.metric) for rule in rules if "<" not in rule.metric]
        self._wide = [(rule, Metric(rule.metric, "").pattern) for rule in rules if "<" in rule.metric]
        self._beginnings = tuple({rule.metric.partition("<")[0] for rule, _ in self._wide})
        self._series: dict[str, Series] = defaultdict(Series)
        self._seen: dict[tuple[str, str], RuleState] = {}
        self._steps = SilentSteps()
        self._rows = PolicyRows({*(name for _, name in self._rules), *CURVES.values()})
        self._policies: dict[str, AlertWatch] = {}

    def write(self, axis: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Looks at one row; what is no finite number in it is left out."""
        if _FIRST_OF_ROLLOUT in metrics:
            self._end_what_is_not_told(step, metrics)
        for rule, name in self._all_of(metrics):
            if (value := _number(metrics[name])) is not None:
                self._look(rule, name, step, value)
        found = {name: _number(metrics[name]) for name in _OF_STEPS if name in metrics}
        numbers = {name: value for name, value in found.items() if value is not None}
        for kind, text in self._steps.look(axis, numbers).items():
            if CURVES[kind] in numbers:  # several roles have rows of the same step
                self._judge(STEP_RULES[kind], CURVES[kind], step, text)
        for policy, own in self._rows.split(metrics).items():
            watch = self._policies.setdefault(policy, AlertWatch(self._max_staleness))
            watch.write(axis, step, own)

    def alerts(self) -> list[Alert]:
        """Returns what has fired: what is still so first, then by its step.

        What all policies together show is left out where one of them shows it.
        """
        of_policies = [_of(policy, alert) for policy, own in self._policies.items() for alert in own.alerts()]
        told = {alert.rule for alert in of_policies}
        of_all = [seen.alert for seen in self._seen.values() if seen.alert and seen.alert.rule not in told]
        found = of_all + of_policies
        return sorted(found, key=lambda alert: (alert.is_over, alert.step, alert.rule, alert.metric))

    def close(self) -> None:
        """Nothing is open."""

    def _all_of(self, metrics: Mapping[str, Any]) -> Iterator[tuple[Rule, str]]:
        yield from (pair for pair in self._rules if pair[1] in metrics)
        for name in metrics:
            if name.startswith(self._beginnings):
                yield from ((rule, name) for rule, pattern in self._wide if pattern.fullmatch(name))

    def _end_what_is_not_told(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A run that has lost no engine says nothing of engines, as one that resumes after another's loss."""
        for seen in self._seen.values():
            if seen.metric.startswith(_FLEET) and seen.metric not in metrics:
                seen.judge(step, None)

    def _look(self, rule: Rule, name: str, step: int, value: float) -> None:
        series = self._series[name]
        if step <= series.last_step:
            series.go_back_to(step)
        if rule.look is not None:
            self._judge(rule, name, step, rule.look(value, series))
        series.add(step, value)

    def _judge(self, rule: Rule, name: str, step: int, found: str | None) -> None:
        key = rule.name, name
        if key in self._seen or found is not None:
            self._seen.setdefault(key, RuleState(rule, name)).judge(step, found)


def _of(policy: str, alert: Alert) -> Alert:
    """A policy's alert, as one of the run."""
    axis, _, name = alert.metric.partition("/")
    return replace(alert, metric=f"{axis}/{policy}/{name}", found=f"policy {policy}: {alert.found}")


_FIRST_OF_ROLLOUT, _FLEET = "rollout/step", "fleet/"
_OF_STEPS = ("rollout/raw_reward", *CURVES.values())


def alerts_of(rows: Iterable[tuple[str, int, Mapping[str, Any]]], max_staleness: int | None) -> list[Alert]:
    """Returns the alerts of rows of metrics: axis, step and values, as they were written."""
    watch = AlertWatch(max_staleness)
    for axis, step, metrics in rows:
        watch.write(axis, step, metrics)
    return watch.alerts()


def _number(value: Any) -> float | None:
    """Numbers that are finite; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) else None
