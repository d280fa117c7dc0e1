"""The loss, as the command line names it."""

import pytest

from slime.arguments import validated_args
from slime.config.loss import SURROGATES


@pytest.mark.parametrize(
    ("flags", "surrogate"),
    [
        ({}, "ppo"),
        ({"advantage_estimator": "gspo"}, "gspo"),
        ({"advantage_estimator": "cispo"}, "cispo"),
        ({"advantage_estimator": "cispo", "surrogate": "cispo"}, "cispo"),
        ({"advantage_estimator": "rloo", "surrogate": "gspo"}, "gspo"),
    ],
    ids=str,
)
def test_the_surrogate_is_the_flags_or_the_estimators(words, flags, surrogate) -> None:
    args = validated_args(words(**flags))
    assert (args.surrogate, args.surrogate_function_path) == (surrogate, SURROGATES[surrogate])


def test_two_surrogates_are_refused(refusal, words) -> None:
    message = refusal(words(advantage_estimator="gspo", surrogate="ppo"))
    assert message.startswith("--surrogate ppo and --advantage-estimator gspo: the estimator names the surr")


def test_imitation_has_no_use_for_a_surrogate(notes, words) -> None:
    flags = {"loss_type": "sft_loss", "disable_compute_advantages_and_returns": None, "surrogate": "cispo"}
    assert "--surrogate: has no effect with --loss-type sft_loss" in notes(words(**flags))
