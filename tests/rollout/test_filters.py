import pytest

from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.utils.types import Sample
from tests.run_args import run_args

ARGS = run_args()


def group(*rewards):
    return [Sample(reward=reward) for reward in rewards]


def test_groups_of_equal_rewards_go_and_the_reason_says_which():
    assert check_reward_nonzero_std(ARGS, group(0.0, 1.0)).keep
    assert not check_reward_nonzero_std(ARGS, group(1.0, 1.0 + 1e-9)).keep
    assert check_reward_nonzero_std(ARGS, group(0.26, 0.26)).reason == "zero_std_0.3"
    assert check_reward_nonzero_std(ARGS, [group(0.0, 0.0), group(1.0)[0]]).keep


@pytest.mark.parametrize(("remaining", "dropped"), [(5, True), (4, False), (3, False)])
def test_the_fallback_keeps_what_would_have_to_be_replaced(remaining, dropped):
    output = check_reward_nonzero_std_with_fallback(ARGS, group(1.0, 1.0))
    verdict = should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=4)
    assert verdict is dropped


def test_bare_verdicts_are_wrapped_and_no_filter_keeps():
    assert call_dynamic_filter(None, 1, 2) == DynamicFilterOutput(keep=True)
    assert call_dynamic_filter(lambda *args: False, 1) == DynamicFilterOutput(keep=False)


class Later:
    """What an async filter returns."""

    def __await__(self):
        yield


@pytest.mark.parametrize("answer", [None, Later()])
def test_a_filter_that_decides_nothing_is_an_error(answer):
    with pytest.raises(TypeError, match="expected a DynamicFilterOutput or a bool"):
        call_dynamic_filter(lambda *args: answer, 1)


def test_drops_are_counted_by_reason():
    metrics = MetricGatherer()
    for reason in ("a", "b", "a", None):
        metrics.on_dynamic_filter_drop(reason)
    prefix = "rollout/dynamic_filter/drop_"
    assert metrics.collect() == {prefix + "a": 2, prefix + "b": 1, prefix + "unspecified": 1}
