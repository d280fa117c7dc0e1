"""Which samples are trained on, where models are served that are not."""

import pytest

from slime.arguments.validate.served_models import ModelConfig
from slime.rollout.attempts import flatten
from slime.rollout.base_types import RolloutError
from slime.rollout.filter_hub.base_types import filtered
from slime.rollout.trained import trained_samples
from slime.utils.types import Sample
from tests.run_args import config_with, run_args

SERVED = [ModelConfig(name) for name in ("policy", "past", "judge")]
NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def policies_of(samples: list[Sample]) -> list[str | None]:
    return [sample.policy for sample in samples]


def test_what_a_model_answered_that_is_not_trained_is_left_out() -> None:
    samples = [Sample(policy=policy) for policy in (None, "policy", "past", "judge", "unknown")]
    found = trained_samples(config_with(served_models=SERVED), samples)
    assert policies_of(found) == [None, "policy", "unknown"]
    assert trained_samples(config_with(served_models=[]), samples) == samples


def test_of_several_policies_each_is_trained() -> None:
    each = {"a": run_args(), "b": run_args()}
    config = config_with(
        trained_policies=each, served_models=[ModelConfig(name) for name in ("a", "b", "past")]
    )
    samples = [Sample(policy=policy) for policy in ("a", "past", "b", None)]
    assert policies_of(trained_samples(config, samples)) == ["a", "b", None]


def test_a_recording_that_cannot_tell_whom_it_trains_is_refused() -> None:
    """Where nothing is served the opponent of a game would be trained as well."""
    config = config_with(served_models=[], load_debug_rollout_data="run/{rollout_id}.pt")
    assert len(trained_samples(config, [Sample(), Sample()])) == 2
    with pytest.raises(
        RolloutError, match=r"sample 3 of group 1: policy is 'past', and a run without engines"
    ):
        trained_samples(config, [Sample(), Sample(index=3, group_index=1, policy="past")])


@pytest.mark.parametrize("is_fan_out", [False, True])
@pytest.mark.parametrize(("rewards", "is_kept"), [((1.0, 1.0), False), ((1.0, 0.0), True)])
def test_a_filter_sees_no_rewards_of_an_opponent(
    is_fan_out: bool, rewards: tuple[float, float], is_kept: bool
) -> None:
    """What one player wins the other loses: with both there would be a spread in every group."""
    games = [[Sample(reward=worth), Sample(policy="past", reward=1 - worth)] for worth in rewards]
    group = games if is_fan_out else flatten(games)
    config = config_with(served_models=SERVED, dynamic_sampling_filter_path=NONZERO_STD)
    assert filtered(config, group).keep is is_kept


def test_a_group_of_an_opponent_alone_is_shown_as_it_is() -> None:
    config = config_with(served_models=SERVED, dynamic_sampling_filter_path=NONZERO_STD)
    assert not filtered(config, [Sample(policy="past", reward=1.0)]).keep
