"""Nothing that a model writes is run by its grader, and nothing keeps a grader past its limit."""

import ast
import json
import time
from itertools import islice
from pathlib import Path

import pytest

from slime.arguments.groups.rewards import RM_TYPES
from slime.rollout.base_types import GradingFailed
from slime.rollout.rm_hub import f1_score, math_dapo_utils
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.grading_pool import GRADING_LIMIT_S, GradingProcess
from slime.rollout.rm_hub.math_utils import grade_answer_mathd
from slime.utils.grading import boxes
from tests.rollout.graders import hostile, watched

ROOT = Path(__file__).parents[2]
LABELS = ("2/3", "x^2-1", "\\frac{1}{2}")
GRADERS = watched.GRADERS
LIMIT_S = 10
# A call waits for the process to start, or to be found dead, on a machine whose cores are all busy.
SLACK_S = 130


@pytest.fixture(scope="module")
def process():
    process = GradingProcess(LIMIT_S)
    yield process
    process.stop()


def test_every_reward_consists_of_graders_that_see_hostile_answers():
    assert set(watched.OF_REWARD) == set(RM_TYPES)
    assert set().union(*watched.OF_REWARD.values()) == set(GRADERS)


def grade(process, grader, label, answer):
    """What was run, and whether it was called equal; nothing where there was no verdict in time."""
    start = time.monotonic()
    try:
        equal, run = process.call(watched.HERE, grader, label, answer)
    except GradingFailed as failure:
        equal, run = False, []
        assert "no verdict within" in str(failure) or "MemoryError" in str(failure), str(failure)
    assert time.monotonic() - start < LIMIT_S + SLACK_S
    return equal, run


@pytest.mark.parametrize("payload", ["open('c','w')", "print(1)"])
@pytest.mark.parametrize("grader", ["math", "math_compat", "sympy alone"])
def test_a_text_made_of_docstrings_is_not_evaluated(process, grader, payload):
    answer = hostile.built_of_a_docstring(payload)
    assert grade(process, grader, "1/2", answer) == (False, [])


def look_through(process, answers, graders):
    for number, answer in enumerate(answers):
        label = LABELS[number % len(LABELS)]
        for grader in graders:
            _equal, run = grade(process, grader, label, answer)
            assert not run, (grader, label, answer)


def test_hostile_answers_run_nothing(process):
    look_through(process, islice(hostile.answers(0, hostile.CODE), 150), GRADERS)


def test_costly_answers_come_to_an_end(process):
    look_through(process, islice(hostile.answers(0, hostile.COSTLY), 60), GRADERS)


DEEP = ["((((((((((1))))))))))", *(o * 40 + "1" + c * 40 for o, c in ("()", "[]", "{}", "||", "-!"))]
DEEP += [
    "x_" * 200 + "1",
    "2^" * 200 + "2",
    "\\begin{pmatrix}" * 20 + "1",
    "\\frac{1}{" * 20 + "1" + "}" * 20,
]


def test_levels_beyond_those_of_answers_take_no_time(process):
    assert grade(process, "math", "1", DEEP[0]) == (True, [])
    for answer in [*DEEP[1:], "1+" * 1500 + "1"]:
        start = time.monotonic()
        assert process.call(watched.HERE, "math", "1/2", answer) == [False, []], answer
        assert time.monotonic() - start < LIMIT_S / 2, answer


def test_sums_of_powers_of_sums_take_no_time(process):
    answer = "+".join(f"(x+y)**{power}" for power in range(42))
    for grader in ("math_compat", "sympy alone"):
        start = time.monotonic()
        assert process.call(watched.HERE, grader, "2/3", answer) == [False, []]
        assert time.monotonic() - start < LIMIT_S / 2


def test_answers_as_deep_and_long_as_their_labels_are_read(process):
    nested = "1+\\frac{1}{" * 18 + "2" + "}" * 18
    for label, answer in ((nested, nested), ("1+" * 1100 + "1", "1+" * 1100 + "1")):
        assert grade(process, "math", label, answer) == (True, [])


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_hostile_answers_run_nothing(process, seed):
    look_through(process, islice(hostile.answers(seed), 1000), GRADERS)


def test_ten_thousand_are_on_record_for_each_grader():
    record = json.loads((ROOT / "benchmarks/results/hostile_answers.json").read_text())
    seeds = record["seeds"].values()
    assert record["limit_s"] == GRADING_LIMIT_S and len(seeds) >= 10
    for rows in seeds:
        assert rows.keys() == set(GRADERS)
        for grader, row in rows.items():
            assert (row["answers"], row["ran"], row["no_verdict"]) == (1000, [], []), grader
            assert row["longest_s"] < GRADING_LIMIT_S, grader


def test_graders_without_a_process_of_their_own_are_done_at_once():
    for answer in islice(hostile.answers(2), 200):
        start = time.process_time()
        f1_score(answer, "x")
        compute_gpqa_reward(answer, "A")
        math_dapo_utils.compute_score(answer, "1")
        math_dapo_utils.compute_score(answer, "1", strict_box_verify=True)
        grade_answer_mathd(answer, "1")
        boxes.boxed_answer(f"\\boxed{{{answer}")
        assert time.process_time() - start < 2, answer[:100]


@pytest.mark.parametrize(
    "text",
    ["answer" + " " * 50_000, "\\boxed{" + " " * 50_000, "answer *" + "*" * 50_000, "A" + ")" * 50_000],
)
def test_a_choice_is_found_in_linear_time(text):
    start = time.process_time()
    assert compute_gpqa_reward(text, "B") == 0.0
    assert time.process_time() - start < 2


RUNS_TEXT = {
    "eval",
    "exec",
    "parse_expr",
    "sympify",
    "parse_latex",
    "parse_mathematica",
    "__import__",
    "lambdify",
}
# The types and defaults of megatron-core's dataclasses, out of its source.
ALLOWED = {"slime/arguments/groups/megatron_source.py"}


def test_no_code_of_ours_evaluates_text():
    files = [
        file for folder in ("slime", "slime_plugins", "examples") for file in ROOT.glob(f"{folder}/**/*.py")
    ]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNS_TEXT
            )
            imported = isinstance(node, ast.ImportFrom) and RUNS_TEXT & {alias.name for alias in node.names}
            if called or imported:
                found.add(str(file.relative_to(ROOT)))
    assert len(files) > 400
    assert found == ALLOWED
