"""The original's graders under the original's names."""

import pytest

from slime.rollout.base_types import GradingFailed
from slime.rollout.rm_hub import (
    async_rm,
    extract_boxed_answer,
    get_deepscaler_rule_based_reward,
    grade_answer_verl,
    math_dapo_utils,
)
from slime.rollout.rm_hub.gpqa import DEFAULT_VALID_LETTERS, _extract_letter_from_response
from slime.rollout.rm_hub.math_utils import (
    _strip_string,
    extract_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    last_boxed_only_string,
    mathd_normalize_answer,
    remove_boxed,
)
from slime.utils.grading.latex_text import latex_to_text
from slime.utils.types import Sample


@pytest.mark.parametrize(
    ("text", "box", "answer"),
    [
        ("so \\boxed{1} no \\boxed{\\frac{1}{2}}.", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\fbox{3}", "\\fbox{3}", None),
        ("\\boxed{1", None, None),
        ("none", None, None),
        ("\\boxed{}", "\\boxed{}", ""),
    ],
)
def test_the_last_box(text, box, answer):
    assert last_boxed_only_string(text) == box
    assert remove_boxed(box) == extract_boxed_answer(text) == answer
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("\\frac12", "\\frac{1}{2}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("\\frac1", "\\frac1"),
        ("\\frac", "\\frac"),
        ("3/4", "\\frac{3}{4}"),
        ("03/4", "03/4"),
        ("x/4", "x/4"),
        ("0.5", "\\frac{1}{2}"),
        (".5", "\\frac{1}{2}"),
        (".25", "0.25"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("\\sqrt{3}", "\\sqrt{3}"),
        ("x = 5", "5"),
        ("abc = 5", "abc=5"),
        ("5 \\text{ cm}", "5"),
        ("\\text{ a} \\text{ b}", "a}"),
        ("90^\\circ", "90"),
        ("50\\%", "50"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\text{yes}", "yes"),
        ("\\$5", "5"),
        ("", ""),
        (None, None),
    ],
)
def test_answers_are_normalised_as_in_the_math_data_set(raw, normal):
    assert mathd_normalize_answer(raw) == normal


def test_strings_are_stripped_without_the_guards():
    assert _strip_string("\\tfrac{1}{2}") == "\\frac{1}{2}"
    with pytest.raises(IndexError):
        _strip_string("\\sqrt")


@pytest.mark.parametrize(
    ("given", "truth", "equal"),
    [
        ("x^2-1", "(x-1)(x+1)", True),
        ("\\frac{2}{4}", "\\frac{1}{2}", False),
        ("0.5", "\\frac{1}{2}", True),
        ("5.0", "5", True),
        ("10/2", "5", False),
        ("(1,2)", "(1, 2)", True),
        ("[1,2)", "(1,2)", False),
        ("(1,2,3)", "(1,2)", False),
        ("1,000", "1000", True),
        ("7 \\text{ hours}", "7", True),
        ("1\\frac{1}{2}", "1.5", True),
        ("x^{2}+1", "1+x^2", True),
        ("a+b+c", "c+b+a", False),
        ("TRUE", "true", True),
        ("", "5", False),
        ("5", None, False),
        ("2 million", "2000000", False),
        ("\\sqrt{12}", "2\\sqrt{3}", True),
        ("2 or 3", "2 and 3", True),
        ("\\frac" + "{" * 5000, "5", False),
    ],
)
def test_answers_are_compared_by_the_rules_of_prm800k(given, truth, equal):
    assert grade_answer_sympy(given, truth) is equal


def test_sympy_that_never_ends_does_not_hang_the_caller(monkeypatch):
    from slime.rollout.rm_hub import grading_pool

    pool = grading_pool.GradingPool(1, limit_s=2)
    monkeypatch.setattr(grading_pool, "_pool", lambda: pool)
    with pytest.raises(GradingFailed, match="no verdict within 2 s"):
        grade_answer_sympy("((((x+y)^9+x)^9+y)^9+x)^9", "x+1")
    pool.close()


@pytest.mark.parametrize(
    ("solution", "truth", "right"),
    [
        ("so \\boxed{\\dfrac{1}{2}}", "\\frac12", True),
        ("so \\boxed{2}", "\\boxed{2}", True),
        ("so 2", "2", False),
        ("so \\boxed{2}", "", False),
        ("so \\boxed{2}", 2, True),
        ("so \\boxed{2}", "\\boxed{2", False),
    ],
)
def test_whole_solutions_are_graded(solution, truth, right):
    assert grade_answer_verl(solution, truth) is right


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("<think>\\boxed{1}</think> \\boxed{2}", "2", 1),
        ("<think></think> \\boxed{2}", 2, 1),
        ("###Response \\boxed{2}", "\\boxed{2}", 1),
        ("\\boxed{2}", "2", 0),
        ("</think> 2", "2", 0),
        ("</think> \\boxed{2}", "", 0),
        ("</think> \\boxed{2}", "\\boxed{2", 0),
        ("</think> \\boxed{2}", "3", 0),
    ],
)
def test_deepscaler(response, label, reward):
    assert get_deepscaler_rule_based_reward(response, label) == reward
    assert grade_answer_mathd("2", "2")


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("x = $1,000$", "1000"),
        ("the answer is \\boxed{\\frac12}", "theansweris\\frac{1}{2}"),
        ("5 \\text{cm}", "5"),
        ("90 degrees", "90"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("3,4", "34"),
        ("a = b = 3", "3"),
        ("x,4", "x,4"),
        ("a cat", "cat"),
    ],
)
def test_dapo_normalises_as_minerva(raw, normal):
    assert math_dapo_utils.normalize_final_answer(raw) == normal


async def test_answers_outside_of_what_is_looked_at_are_wrong(make_args):
    """The box after the reasoning; the end of the text."""
    for rm_type in ("deepscaler", "deepscaler_compat"):
        assert await async_rm(make_args(custom_rm_path=None, rm_type=rm_type), answer("\\boxed{2}")) == 0.0
    dapo = make_args(custom_rm_path=None, rm_type="dapo", reward_key="score")
    assert await async_rm(dapo, answer("Answer: 2")) == {"score": 1.0, "acc": True, "pred": "2"}


def answer(text):
    return Sample(response=text, label="2", response_length=1)


def test_dapo_looks_at_the_end():
    score = math_dapo_utils.compute_score
    assert score("Answer: 1\nAnswer: 34", "34") == {"score": 1.0, "acc": True, "pred": "34"}
    assert score("Answer: 1\nAnswer: 2\nAnswer: 3", "3")["pred"] == "3"
    assert score("Answer: 34" + " " * 290, "34")["pred"] == "34"
    assert score("Answer: 34" + " " * 291, "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert score("\\boxed{34}", "34", strict_box_verify=True)["acc"]
    assert score("\\boxed{34}" + " " * 90, "34", strict_box_verify=True)["acc"]
    assert not score("\\boxed{34}" + " " * 91, "34", strict_box_verify=True)["acc"]
    assert math_dapo_utils.is_correct_minerva("Answer: 3", "\\boxed{3}", gt_need_extract=True) == (True, "3")
    assert math_dapo_utils.is_correct_minerva("Answer: 3", "3") == (True, "3")
    assert math_dapo_utils.is_correct_strict_box("x \\boxed{3}", "3") == (1, "3")
    assert math_dapo_utils.is_correct_strict_box("\\boxed{3}" + " " * 200, "3", [0, 0, 0, 100]) == (1, "3")
    assert math_dapo_utils.is_correct_strict_box("\\boxed{3}" + " " * 200, "3", [0, 0, 0, 50]) == (1, "3")
    assert math_dapo_utils.is_correct_strict_box("\\boxed{3}" + " " * 200, "3", [0, 0, 0, 101]) == (-1, None)
    assert math_dapo_utils.is_correct_strict_box("\\boxed{4}", "3") == (-1, "4")
    assert math_dapo_utils.verify("Answer: 3", "4") == (False, "3")
    for wrong in ("3", "\\boxed{3", "3}"):
        with pytest.raises(AssertionError, match="is no"):
            math_dapo_utils.remove_boxed(wrong)


def test_letters():
    assert list("ABCDEFGH") == DEFAULT_VALID_LETTERS
    assert _extract_letter_from_response("<think>A</think>The answer is c", "ABC") == "C"
    assert _extract_letter_from_response("nothing", "ABC") is None


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        ("\\frac{1}{2}", "1/2"),
        ("3\\tfrac12", "3 1/2"),
        ("2\\sqrt{3}", "2sqrt(3)"),
        ("\\sqrt[3]{8}", "root(3)(8)"),
        ("x^{2}", "x^2"),
        ("\\left(1,\\infty\\right)", "(1,inf)"),
        ("\\text{yes}", "yes"),
        ("5\\,\\%", "5 %"),
        ("\\sin x\\cdot\\pi", "sinx*pi"),
        ("\\frac{1", "1/"),
        ("\\begin{pmatrix}1&\\frac12\\\\3&4\\end{pmatrix}", "[ 1 1/2; 3 4 ]"),
        ("\\begin{cases}x\\end{cases}y", "xy"),
        ("\\", "\\"),
    ],
)
def test_latex_becomes_text(latex, text):
    assert latex_to_text(latex) == text
