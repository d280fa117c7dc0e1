"""What becomes of samples that could not be graded."""

import json

import pytest

from slime.rollout.attempts import without_answers
from slime.rollout.base_types import GradingFailed, RolloutError
from slime.rollout.evaluation import eval_rollout_single_dataset
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.rollout.ungraded import fill_ungraded, mark_ungraded, nothing_is_graded
from slime.utils.types import Sample
from tests.rollout.test_evaluation import EvalSet


def graded(reward):
    return Sample(reward=reward, status=Sample.Status.COMPLETED)


def ungraded():
    sample = Sample(status=Sample.Status.COMPLETED)
    mark_ungraded(sample, "it hung")
    return sample


def test_the_others_mean_is_the_reward_of_an_ungraded_sample():
    group = [graded(1.0), ungraded(), graded(0.0), graded(0.5)]
    fill_ungraded(group)
    assert [sample.reward for sample in group] == [1.0, 0.5, 0.0, 0.5]
    assert group[1].remove_sample and group[1].status == Sample.Status.FAILED


def test_of_mappings_each_number_has_its_mean():
    group = [
        graded({"score": 1.0, "acc": True, "pred": "4"}),
        graded({"score": -1.0, "acc": False, "pred": "5"}),
        ungraded(),
    ]
    fill_ungraded(group)
    assert group[2].reward == {"score": 0.0, "acc": 0.5, "pred": None}


def test_a_group_of_nothing_else_stays_without_a_reward_and_is_dropped():
    group = [ungraded(), [ungraded(), ungraded()]]
    fill_ungraded([group[0], *group[1]])
    assert group[0].reward is None and nothing_is_graded(group)
    output = call_dynamic_filter(None, None, group)
    assert (output.keep, output.reason) == (False, "ungraded")
    assert call_dynamic_filter(None, None, [*group, graded(0.0)]).keep
    assert call_dynamic_filter(None, None, []).keep


def test_an_answer_that_is_given_anew_is_not_known_to_be_ungraded():
    (fresh,) = without_answers([ungraded()])
    assert not nothing_is_graded([fresh]) and not fresh.remove_sample


calls = []


async def sometimes_failing(args, sample, **kwargs):
    calls.append(sample.index)
    if sample.index == 0 or sample.group_index == 1:
        raise GradingFailed("it hung")
    return 1.0


async def test_a_rollout_goes_on_and_asks_for_another_group(engine, make_args, make_source):
    # one by one, else of several that come in the place of group 1 some would be aborted, or not
    args = make_args(custom_rm_path=f"{__name__}.sometimes_failing", over_sampling_batch_size=1)
    output = await generate_rollout_async(args, 0, make_source(args))
    kept = [group[0].group_index for group in output.samples]
    assert kept == [0, 2, 3]
    assert [[sample.reward for sample in group] for group in output.samples] == [[1.0, 1.0]] * 3
    assert [sample.remove_sample for sample in output.samples[0]] == [True, False]
    assert output.metrics == {"rollout/dynamic_filter/drop_ungraded": 1}


@pytest.fixture
def eval_set(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": [{"role": "user", "content": f"q{i}"}], "label": "a"}) + "\n"
            for i in range(3)
        )
    )
    return str(path)


async def test_an_evaluation_leaves_out_prompts_of_which_nothing_is_known(engine, make_args, eval_set):
    args = make_args(custom_rm_path=f"{__name__}.sometimes_failing")
    config = EvalSet("x", eval_set, n_samples_per_eval_prompt=2, custom_rm_path=None)
    result = (await eval_rollout_single_dataset(args, 0, config))["x"]
    assert result["rewards"] == [1.0] * 4
    assert [sample.group_index for sample in result["samples"]] == [0, 0, 2, 2]


async def never(args, sample, **kwargs):
    raise GradingFailed("it hung")


async def test_an_evaluation_of_which_nothing_is_known_is_an_error(engine, make_args, eval_set):
    args = make_args(custom_rm_path=f"{__name__}.never")
    config = EvalSet("x", eval_set, custom_rm_path=None)
    with pytest.raises(RolloutError, match="eval set x: no answer could be graded: it hung"):
        await eval_rollout_single_dataset(args, 0, config)
