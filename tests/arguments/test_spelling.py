"""A guess is made only where it is near."""

import pytest

from slime.arguments import UsageError
from slime.arguments.core.parser import parse
from slime.arguments.core.spelling import nearest

REQUIRED = ["--hf-checkpoint", "model", "--rollout-batch-size", "4"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--global-batchsize", "--global-batch-size"),
        ("--global_batch_size", "--global-batch-size"),
        ("--rolout-batch-size", "--rollout-batch-size"),
        ("--rollout-bathc-size", "--rollout-batch-size"),
        ("--n-sample-per-prompt", "--n-samples-per-prompt"),
        ("--num-rollouts", "--num-rollout"),
        ("--colocated", "--colocate"),
        ("--rollout-temp", "--rollout-temperature"),
        ("--Seed", "--seed"),
    ],
)
def test_a_slip_is_guessed(word, meant):
    with pytest.raises(UsageError, match=rf"^{word}: unknown flag \(did you mean {meant}\?\)$"):
        parse([*REQUIRED, word, "1"], None)


@pytest.mark.parametrize(
    ("word", "meant"), [("--lora-alhpa", "--lora-alpha"), ("--lora_dropout", "--lora-dropout")]
)
def test_flags_of_adapters_are_guessed_too(word, meant):
    with pytest.raises(UsageError, match=rf"^{word}: unknown flag \(did you mean {meant}\?\)$"):
        parse([*REQUIRED, word, "8"], None)


def test_a_word_more_or_less_is_no_slip_however_short():
    assert nearest("--lora-rank", ["--q-lora-rank"]) is None
    assert nearest("--top-p-k", ["--top-p"]) is None
    assert nearest("--loraa-rank", ["--lora-rank"]) == "--lora-rank"


# Nobody's flags, and ours that are nearest mean something else.
FOREIGN = [
    "--learning-rate",
    "--eval-max-new-tokens",
    "--save-retain-intervals",
]


@pytest.mark.parametrize("word", FOREIGN)
def test_a_foreign_flag_is_not_taken_for_one_of_ours(word):
    with pytest.raises(UsageError, match=rf"^{word}: unknown flag$"):
        parse([*REQUIRED, word, "1"], None)


def test_short_names_and_long_detours_are_no_slips():
    assert nearest("--lb", ["--lr"]) is None
    assert nearest("--save-interval", ["--eval-interval"]) is None
    assert nearest("", ["--lr"]) is None
