"""Each fault is told with the step in which it began, and runs that do well are told of none."""

import re
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from slime.arguments.registry import documented_groups
from slime.observability.alerts import RULES, STEP_RULES, Alert, AlertWatch, Rule, alerts_of
from slime.observability.console import RESULT_COLUMNS
from slime.observability.metric_table import every_metric, undescribed
from slime.observability.policy_log import of_policy
from slime.observability.policy_rows import PolicyRows
from slime.observability.silent_steps import LARGEST_GAP

Rows = list[tuple[str, int, dict[str, Any]]]
EVERY_RULE = (*RULES, *STEP_RULES.values())


def curve(name: str, values: Iterable[Any]) -> Rows:
    return [(axis_of(name), step, {name: value}) for step, value in enumerate(values)]


def axis_of(name: str) -> str:
    return "train" if name.startswith("train/") else "rollout"


def fired(rows: Rows, max_staleness: int | None = None) -> list[tuple[str, int, bool]]:
    return [(alert.rule, alert.step, alert.is_over) for alert in alerts_of(rows, max_staleness)]


def noisy(count: int, mean: float, noise: float = 0.05) -> list[float]:
    draw = Random(count).gauss
    return [draw(mean, noise) for _ in range(count)]


REWARD, GAP = "rollout/raw_reward", "train/train_rollout_logprob_abs_diff"


def test_a_reward_that_collapses_is_told_with_the_step_where_it_began() -> None:
    rows = curve(REWARD, [*noisy(30, 0.7), *noisy(20, 0.02, 0.01)])
    (alert,) = alerts_of(rows, None)
    assert (alert.rule, alert.step, alert.last, alert.is_over) == ("reward collapse", 30, 49, False)
    assert alert.found.startswith("the reward has fallen from 0.7") and alert.when == "since rollout 30"


@pytest.mark.parametrize(
    "rewards",
    [
        noisy(200, 0.5),
        noisy(200, 0.0, 0.2),
        [step / 100 for step in range(100)],
        [*noisy(20, 0.6), 0.0, 0.0, *noisy(20, 0.6)],  # two bad rollouts are no collapse
        [-2.0 + step / 200 for step in range(200)],
        [0.0] * 50,
        [*[0.7] * 5, *[0.0] * 4],  # too short a time to say
        [*[1.0] * 20, *[0.6] * 9],  # more than half of the best
    ],
)
def test_rewards_that_rise_or_vary_are_no_collapse(rewards: list[float]) -> None:
    assert fired(curve(REWARD, rewards)) == []


def test_less_than_half_of_the_best_reward_is_a_collapse() -> None:
    assert fired(curve(REWARD, [*[1.0] * 20, *[0.4] * 5])) == [("reward collapse", 20, False)]


def test_negative_rewards_collapse_as_well() -> None:
    assert fired(curve(REWARD, [*[-1.0] * 20, *[-3.0] * 5])) == [("reward collapse", 20, False)]


def test_a_gap_that_grows_is_told_before_it_is_large() -> None:
    values = [1e-3] * 10 + [0.02] * 5
    assert max(values) < LARGEST_GAP
    assert fired(curve(GAP, values)) == [("gap growing", 10, False)]
    assert fired(curve(GAP, [1e-7] * 10 + [1e-5] * 10)) == [], "of a float32 run, and below what is usual"
    assert {rule for rule, _, _ in fired(curve(GAP, [1e-3] * 10 + [0.3] * 5))} == {
        "gap growing",
        "log-prob gap",
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (GAP, [0.008] * 10 + [0.05] * 10),
        ("train/grad_norm", [1e-6] * 10),
        ("fleet/default/engines", [4, 4, 2, 2]),
        (REWARD, [*[0.1] * 12, 1.0, *[0.1] * 12]),
    ],
    ids=["gap of few times the first", "small gradients", "a resume with fewer engines", "one lucky rollout"],
)
def test_what_is_usual_of_a_run_is_no_fault(name: str, values: list[float]) -> None:
    assert fired(curve(name, values)) == []


@pytest.mark.parametrize(
    ("name", "good", "bad", "rule", "rows"),
    [
        ("rollout/flat_groups", 0.5, 1.0, "groups without signal", 3),
        ("rollout/truncated_ratio", 0.1, 0.6, "truncation", 3),
        ("rollout/spec_accept_length", 2.5, 1.0, "accepted length 1", 3),
        ("rollout/response_len/max", 12.0, 0.0, "everything masked", 1),
        ("train/grad_norm", 0.3, 0.0, "no gradient", 3),
        ("train/ppo_kl", 0.01, -0.9, "policy moves too far", 1),
        ("fleet/default/replaced", 0, 1, "engine died", 1),
        ("rollout/ledger/unbalanced", 0, 1, "books do not balance", 1),
    ],
)
def test_a_fault_is_told_after_its_rows(name: str, good: float, bad: float, rule: str, rows: int) -> None:
    before = [good] * 8
    assert fired(curve(name, [*before, *[bad] * (rows - 1)])) == []
    assert fired(curve(name, [*before, *[bad] * rows])) == [(rule, 8, False)]
    assert fired(curve(name, before)) == []


def test_entropy_that_falls_is_told_unless_the_reward_rises() -> None:
    def rows(last: float) -> Rows:
        first = curve(REWARD, [0.5]) + curve("train/entropy_loss", [0.8])
        return [*first, ("rollout", 1, {REWARD: last}), ("train", 1, {"train/entropy_loss": 0.02})]

    assert fired(rows(0.5)) == [("entropy collapse", 1, False)] and fired(rows(0.9)) == []


def test_staleness_is_held_against_the_bound_of_the_run() -> None:
    rows = curve("rollout/fully_async/staleness/max", [1, 2, 2, 2, 2, 2])
    assert fired(rows, max_staleness=2) == [("staleness at its bound", 1, False)]
    assert fired(rows, max_staleness=3) == fired(rows) == []


def test_an_engine_that_is_missing_and_each_that_is_replaced_are_told() -> None:
    rows = curve("fleet/judge/missing", [0, 0, 1, 0]) + curve("fleet/judge/replaced", [0, 0, 0, 1])
    missing, died = sorted(alerts_of(rows, None), key=lambda alert: alert.rule, reverse=True)
    assert (missing.rule, missing.step, missing.is_over) == ("engine missing", 2, True)
    assert missing.found == "1 died and got no successor yet" and died.metric == "fleet/judge/replaced"
    assert (died.rule, died.step) == ("engine died", 3)


def test_an_engine_is_missing_no_more_in_a_run_that_resumes_without_it() -> None:
    """It has lost none, and so says nothing of its engines; other rows of a step never do."""
    missing = curve("fleet/default/missing", [0, 1, 1])
    assert fired([*missing, ("rollout", 2, {"perf/step_time": 1.0})]) == [("engine missing", 1, False)]
    resumed = [("rollout", step, {"rollout/step": step, REWARD: 0.5}) for step in (2, 3)]
    assert fired([*missing, *resumed]) == [("engine missing", 1, True)]
    assert fired([*curve("fleet/default/missing", [0, 0, 1]), *resumed]) == []


def test_what_comes_again_is_counted_and_what_is_over_comes_last() -> None:
    masked = curve("rollout/response_len/max", [9, 0, 0, 9, 0, 9])
    cut = curve("rollout/truncated_ratio", [0, 0, 0, 1, 1, 1])
    still, over = alerts_of([*masked, *cut], None)
    assert (still.rule, still.when) == ("truncation", "since rollout 3")
    assert (over.step, over.last, over.times, over.when) == (1, 4, 2, "rollout 1 to 4, 2 times")
    assert str(over).startswith("everything masked (rollout 1 to 4, 2 times): no answer has a token")


def test_a_fault_begins_where_it_stays() -> None:
    cut = curve("rollout/truncated_ratio", [0, 1, 1, 0, 1, 1, 1])
    assert fired(cut) == [("truncation", 4, False)]


def test_what_a_resumed_run_does_better_is_forgotten() -> None:
    bad = curve("rollout/response_len/max", [9, 9, 0, 0])
    assert fired(bad) == [("everything masked", 2, False)]
    assert fired([*bad, ("rollout", 2, {"rollout/response_len/max": 9})]) == []
    collapse = curve(REWARD, [0.7] * 20 + [0.0] * 5)
    resumed = [("rollout", step, {REWARD: 0.7}) for step in range(18, 24)]
    assert fired(collapse) == [("reward collapse", 20, False)] and fired([*collapse, *resumed]) == []


def test_a_resumed_run_counts_its_engines_anew() -> None:
    rows = curve("fleet/default/replaced", [0, 0, 1])
    assert fired([*rows, ("rollout", 2, {"fleet/default/replaced": 1})]) == [("engine died", 2, False)]


def test_the_critics_row_of_a_step_is_not_the_actors() -> None:
    rows = curve("train/ppo_kl", [0.9] * 3)
    critics = [("train", step, {"train/critic-loss": 1.0}) for step in range(3)]
    beside = [row for pair in zip(rows, critics, strict=True) for row in pair]
    assert fired(beside) == [("policy moves too far", 0, False)]


def test_values_that_are_no_finite_numbers_are_passed_over() -> None:
    for value in ("nan", float("nan"), True, None, "text"):
        assert fired(curve("rollout/response_len/max", [value])) == []
        assert fired(curve(GAP, [value])) == []


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)
def test_rules_speak_of_metrics_and_flags_that_exist(rule: Rule) -> None:
    assert undescribed([rule.metric]) == set()
    ours = {name for group in documented_groups() for flag in group.flags for name in flag.names}
    named = set(re.findall(r"--[a-z][a-z-]+", rule.advice))
    assert {name for name in named if not name.startswith("--sglang-")} <= ours


def test_names_of_rules_differ() -> None:
    assert len({rule.name for rule in EVERY_RULE}) == len(EVERY_RULE)


def test_a_rank_that_is_always_the_slow_one_is_told() -> None:
    (alert,) = alerts_of(curve("perf/slow_rank", [-1, 2, 2, 2, 2]), None)
    assert (alert.rule, alert.step, alert.is_over) == ("slow rank", 1, False)
    assert alert.found.startswith("rank 2 takes over 1.5 times")
    assert fired(curve("perf/slow_rank", [2, 2, 2, -1])) == [("slow rank", 0, True)]
    for uneven in ([0, 1] * 10, [-1] * 10, [2, 2, -1] * 5):
        assert fired(curve("perf/slow_rank", uneven)) == []
    assert fired(curve("perf/critic-slow_rank", [1, 1, 1, -1])) == [("slow critic rank", 0, True)]


def test_a_watch_is_a_sink() -> None:
    watch = AlertWatch()
    watch.write("rollout", 0, {"rollout/response_len/max": 0.0})
    watch.close()
    (alert,) = watch.alerts()
    assert isinstance(alert, Alert) and alert.found.endswith("every loss mask is 0")


def beside_one_that_does_well(rows: Rows) -> Rows:
    """Rows of the policy ``solver``, and after each that of ``rewriter``."""
    return [
        (axis, step, of_policy(policy, own))
        for axis, step, metrics in rows
        for policy, own in (("solver", metrics), ("rewriter", dict.fromkeys(metrics, 0.7)))
    ]


@pytest.mark.parametrize(
    ("name", "values", "rule", "step"),
    [
        (REWARD, [*[0.7] * 12, *[0.0] * 5], "reward collapse", 12),
        ("rollout/flat_groups", [0.5] * 4 + [1.0] * 3, "groups without signal", 4),
        ("rollout/response_len/max", [9.0, 9.0, 0.0], "everything masked", 2),
        ("train/grad_norm", [0.3, 0.0, 0.0, 0.0], "no gradient", 1),
    ],
)
def test_each_of_several_policies_is_looked_at_for_itself(
    name: str, values: list[float], rule: str, step: int
) -> None:
    axis, _, rest = name.partition("/")
    rows = beside_one_that_does_well(curve(name, values))
    (alert,) = alerts_of(rows, None)
    assert (alert.rule, alert.step, alert.metric) == (rule, step, f"{axis}/solver/{rest}")
    assert alert.found.startswith("policy solver: ")
    assert alert.when.startswith("since optimizer step" if axis == "train" else "since rollout")


def test_steps_of_a_policy_that_go_wrong_are_alerts() -> None:
    rows: Rows = [("train", step, {"train/b/ppo_kl": 0.9, "train/step": step}) for step in range(3)]
    rows += [("train", step, {"train/a/ppo_kl": 0.01, "train/step": step}) for step in range(3)]
    (alert,) = alerts_of(rows, None)
    assert (alert.rule, alert.metric, alert.step) == ("policy moves too far", "train/b/ppo_kl", 0)


def test_what_all_policies_show_is_told_by_them_alone() -> None:
    cut = "rollout/truncated_ratio"
    rows = [("rollout", step, {cut: 1.0} | of_policy("a", {cut: 1.0})) for step in range(4)]
    (alert,) = alerts_of(rows, None)
    assert alert.metric == "rollout/a/truncated_ratio"


def test_staleness_of_a_policy_is_held_against_the_bound() -> None:
    rows = curve("rollout/a/fully_async/staleness/max", [2] * 5)
    assert fired(rows, max_staleness=2) == [("staleness at its bound", 0, False)]


def test_no_metric_of_a_run_is_taken_for_one_of_a_policy() -> None:
    names = {name for metric in every_metric() for name in spelled(metric.name)}
    wanted = {rule.metric for rule in EVERY_RULE} | {
        column for _, names, _ in RESULT_COLUMNS for column in names
    }
    assert len(names) > 100 and PolicyRows(wanted).split(dict.fromkeys(names, 0.0)) == {}
    adapters = {"rollout/adapter/a/raw_reward": 1, "train/adapter/a/loss": 1}
    assert PolicyRows(wanted).split(adapters) == {}


def spelled(name: str) -> list[str]:
    """The names that a row of the table stands for, with a word for what may be any."""
    name = re.sub(r"<[^>]*>", "word", name)
    if (found := re.search(r"\{([^}]*)\}", name)) is None:
        return [name]
    return [one for word in found[1].split(",") for one in spelled(name.replace(found[0], word, 1))]
