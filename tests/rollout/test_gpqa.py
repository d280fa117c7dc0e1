"""Multiple choice is judged by the letter that an answer settles on, in whatever form it comes."""

import pytest

from slime.rollout.rm_hub.gpqa import compute_gpqa_reward

COLOURS = {"choices": ["red light", "green light", "blue light", "no light"]}
LETTERED = {"choices": {"A": "red light", "B": "green light", "C": "blue light", "D": "no light"}}


@pytest.mark.parametrize(
    "response",
    [
        "(C)",
        "So C.",
        "**C**",
        "C",
        "The answer is C",
        "the answer is c",
        "Answer: C",
        "Final answer: **C**",
        "The answer is: C.",
        "Option C",
        "I choose choice (C).",
        "C is correct",
        "C) is the correct one",
        "\\boxed{C}",
        "\\boxed{\\text{C}}",
        "\\boxed{(C)}",
        "Option A is wrong. The answer is C.",
        "First B, then A, hence C",
        "<think>The answer is A</think>C",
        "A or B? No: $\\mathbf{C}$",
    ],
)
def test_every_form_of_a_letter_is_read(response):
    assert compute_gpqa_reward(response, "C") == 1.0
    assert compute_gpqa_reward(response, "B") == 0.0


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("(C)", "c", {}, 1.0),
        ("(C)", " C ", {}, 1.0),
        ("(H)", "H", {}, 1.0),
        ("(C)", 2, {}, 1.0),
        ("(C)", 2.0, {}, 1.0),
        ("(C)", 1, {}, 0.0),
        ("(A)", 0, {}, 1.0),
        ("(A)", -1, {}, 0.0),
        ("(H)", 7, {}, 1.0),
        ("(H)", 8, {}, 0.0),
        ("(C)", "blue light", COLOURS, 1.0),
        ("(C)", "Blue  light!", COLOURS, 1.0),
        ("(C)", "red light", COLOURS, 0.0),
        ("(C)", "blue light", LETTERED, 1.0),
        ("(C)", "B", LETTERED, 0.0),
        ("(C)", None, {"correct_letter": "C"}, 1.0),
        ("(C)", "B", {"correct_letter": "c "}, 1.0),
        ("(C)", "B", {"correct_letter": "B"}, 0.0),
        ("(Z)", "Z", {"valid_letters": ["Y", "Z"]}, 1.0),
        ("(Y)", 1, {"valid_letters": "YZ"}, 0.0),
    ],
)
def test_the_right_letter_is_found(response, label, metadata, reward):
    assert compute_gpqa_reward(response, label, metadata) == reward


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("it must be the blue light.", "C", COLOURS, 1.0),
        ("it must be the BLUE-light", 2, LETTERED, 1.0),
        ("it must be the red light", "C", COLOURS, 0.0),
        ("mitochondria, of course", "the Mitochondria", {}, 0.0),
        ("the mitochondria, of course", "the Mitochondria", {}, 1.0),
        ("it is 12", "2", {}, 0.0),
        ("it is 2", "2", {}, 1.0),
        ("it is 1234", "123", {}, 0.0),
        ("it is 12 345", "2 34", {}, 0.0),
        ("a bobcat", "cat", {}, 1.0),
        ("a bobcat", "at", {}, 0.0),
        ("nothing to see", "C", {}, 0.0),
        ("nothing to see", "no such choice", COLOURS, 0.0),
        ("nothing to see", 17, COLOURS, 0.0),
        ("vitamin b", "B", {"correct_letter": "C"}, 0.0),
    ],
)
def test_without_a_letter_the_text_decides_and_an_odd_label_is_no_error(response, label, metadata, reward):
    assert compute_gpqa_reward(response, label, metadata) == reward


def test_a_missing_label_is_an_error():
    with pytest.raises(ValueError, match="the sample has no label"):
        compute_gpqa_reward("C", None)


def test_no_answer_is_not_right():
    assert compute_gpqa_reward(None, "C") == 0.0
