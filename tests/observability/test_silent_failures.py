"""What fails without an error is told, once, and what is as it should be is not."""

from typing import Any

from slime.config.run import run_config
from slime.observability.silent_rollouts import SilentRollouts
from slime.observability.silent_steps import SilentSteps
from slime.utils.types import Sample
from tests.run_args import run_args

Status = Sample.Status


def sample(number: int, status: Status = Status.COMPLETED, mask: list[int] | None = None) -> Sample:
    reward = float(number % 2)
    return Sample(
        group_index=number // 4, reward=reward, response="a", response_length=2, loss_mask=mask, status=status
    )


def looks(**flags: Any) -> SilentRollouts:
    return SilentRollouts(run_config(run_args(**flags)))


def test_responses_that_are_all_cut_off_are_told_once_for_a_row_of_rollouts() -> None:
    silent = looks()
    cut, whole = [sample(i, Status.TRUNCATED) for i in range(8)], [sample(i) for i in range(8)]
    (text,) = silent.warnings(cut)
    assert text.startswith("8 of 8 responses were cut off") and "--rollout-max-response-len" in text
    assert silent.warnings(cut) == [] and silent.warnings(whole) == []
    assert len(silent.warnings(cut)) == 1
    assert silent.warnings([*cut[:6], *whole[:2]]) == [], "three of four are no fault of the run"


def test_an_empty_loss_mask_is_told_and_its_flag_where_chats_are_imitated() -> None:
    empty = [sample(i, mask=[0, 0]) for i in range(8)]
    (text,) = looks().warnings(empty)
    assert text == "8 of 8 responses have an empty loss mask, so nothing is learned from them"
    (text,) = looks(loss_type="sft_loss").warnings(empty)
    assert "--loss-mask-type" in text
    assert looks().warnings([sample(i, mask=[0, 1]) for i in range(8)]) == []


def told(*rows: tuple[str, dict[str, float]]) -> list[str]:
    texts: list[str] = []
    silent = SilentSteps(texts.append)
    for step, (axis, metrics) in enumerate(rows):
        silent.write(axis, step, metrics)
    return texts


def train(**metrics: float) -> tuple[str, dict[str, float]]:
    return "train", {f"train/{name}": value for name, value in metrics.items()}


def test_a_log_prob_gap_is_told_once_until_it_is_gone() -> None:
    near, far = train(train_rollout_logprob_abs_diff=0.01), train(train_rollout_logprob_abs_diff=0.2)
    texts = told(near, far, far, near, far)
    assert [text.split(":")[0] for text in texts] == ["step 2", "step 5"]
    assert "0.2 nats per token apart" in texts[0]


def test_a_policy_that_moves_far_within_a_rollout_is_told() -> None:
    (text,) = told(train(ppo_kl=0.1), train(ppo_kl=0.9))
    assert text.startswith("step 2: the policy has moved by a KL of 0.9")


def test_entropy_that_falls_is_told_unless_the_reward_rises() -> None:
    def rows(last: float) -> list[tuple[str, dict[str, float]]]:
        rewards = [("rollout", {"rollout/raw_reward": value}) for value in (0.5, last)]
        return [rewards[0], train(entropy_loss=0.8), rewards[1], train(entropy_loss=0.02)]

    (text,) = told(*rows(0.5))
    assert text.startswith("step 4: the entropy has fallen from 0.8 to 0.02")
    assert told(*rows(0.9)) == []
    assert told(train(loss=1.0), train(loss=0.5)) == [], "a run without these metrics"
