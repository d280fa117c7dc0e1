"""Rewards that can teach nothing are told, with an answer that shows why."""

from typing import Any

import pytest

from slime.config.run import run_config
from slime.observability.silent_rollouts import flat_rewards
from slime.utils.types import Sample
from tests.run_args import run_args


def told(*groups: list[Any], response: str = "4<|im_end|>", **flags: Any) -> str | None:
    samples = [
        Sample(group_index=number, reward=reward, response=response, label="4")
        for number, group in enumerate(groups)
        for reward in group
    ]
    return flat_rewards(run_config(run_args(**flags)), samples)


def test_a_comparison_that_never_holds_is_told_with_the_answer_and_the_flag() -> None:
    text = told([-0.5, -0.5], [-0.5, -0.5])
    assert text is not None and text.startswith("all 4 rewards of this rollout are -0.5")
    assert "response '4<|im_end|>', label '4'" in text and "--rollout-skip-special-tokens" in text


def test_prompts_whose_samples_all_earn_the_same_are_told_where_they_are_compared() -> None:
    text = told([1.0, 1.0], [0.0, 0.0])
    assert text is not None and "equal within each of the 2 prompts" in text
    assert told([1.0, 1.0], [0.0, 0.0], advantage_estimator="ppo") is None
    assert told([1.0, 1.0], [0.0, 0.0], rewards_normalization=False) is None
    assert told([1.0, 1.0], [1.0, 1.0], advantage_estimator="ppo") is not None


def test_rewards_that_differ_are_not_told() -> None:
    assert told([1.0, 0.0], [0.0, 0.0]) is None
    assert told([1.0], [0.0]) is None, "prompts of one sample are compared with nothing"


@pytest.mark.parametrize(
    "flags",
    [
        {"loss_type": "sft_loss"},
        {"use_opd": True},
        {"compute_advantages_and_returns": False},
        {"custom_advantage_function_path": "mine.advantages"},
        {"custom_reward_post_process_path": "mine.rewards"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_equal_rewards_are_nothing_to_tell_where_something_else_teaches(flags: dict[str, Any]) -> None:
    assert told([0.0, 0.0], **flags) is None


def test_a_reward_of_a_mapping_is_read_by_its_key() -> None:
    assert told([{"score": 1, "n": 1}, {"score": 1, "n": 2}], reward_key="score") is not None
    assert told([{"score": 1, "n": 1}, {"score": 1, "n": 2}], reward_key="n") is None
    assert told([{"score": 1}, {"score": 1}]) is None


def test_a_long_answer_is_shown_with_its_end() -> None:
    text = told([0.0, 0.0], response="x" * 5000 + "<|im_end|>")
    assert text is not None and "<|im_end|>'" in text and len(text) < 1000
