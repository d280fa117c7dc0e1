"""Plug-ins of the original use these names, and have hooks that take less than they are offered."""

import asyncio

import pytest

from slime.rollout.base_types import accepted
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate_and_rm, prepare_request
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.types import Sample
from tests.run_args import config_with, run_args

HERE = "tests.rollout.test_original_calls."


def test_a_picture_is_not_left_out_of_a_request_without_a_word():
    sample, params = Sample(index=0, tokens=[1, 2]), {"max_new_tokens": 3}
    assert prepare_request(config_with(), sample, params, False)["input_ids"] == [1, 2]
    sample.multimodal_inputs = {"images": ["a picture"]}
    with pytest.raises(ValueError, match="it has images beside its tokens, and requests hold tokens only"):
        prepare_request(config_with(), sample, params, False)


@pytest.mark.parametrize(
    ("routers", "name", "address"),
    [
        ({"judge": ("10.0.0.2", 7)}, "judge", "http://10.0.0.2:7/generate"),
        ({"judge": ("10.0.0.2", 7)}, "default", "http://10.0.0.1:5/generate"),
        ({"judge": ("10.0.0.2", 7)}, "teacher", "http://10.0.0.1:5/generate"),
        (None, "judge", "http://10.0.0.1:5/generate"),
    ],
)
def test_a_model_that_is_not_served_is_asked_of_the_default(routers, name, address):
    args = run_args(sglang_router_ip="10.0.0.1", sglang_router_port=5, sglang_model_routers=routers)
    assert get_model_url(args, name) == address


def bare_hook(args, sample):
    sample.metadata["hooks"] = ["bare"]


async def half_hook(args, sample, *, evaluation):
    sample.metadata["hooks"].append(evaluation)


def whole_hook(args, sample, **offered):
    sample.metadata["hooks"].append(offered)


async def test_hooks_get_the_keywords_that_they_take():
    set_current_rollout_id(4)
    hooks = [HERE + name for name in ("bare_hook", "half_hook", "whole_hook")]
    args = run_args(rollout_sample_hook_path=hooks)
    sample = await apply_rollout_sample_hooks(args, Sample(index=0), evaluation=True)
    assert sample.metadata["hooks"] == ["bare", True, {"rollout_id": 4, "evaluation": True}]


def test_a_positional_only_parameter_takes_no_keyword():
    def function(evaluation, /, *, rollout_id): ...

    assert accepted(function, {"evaluation": True, "rollout_id": 1, "more": 2}) == {"rollout_id": 1}


async def finished(args, sample, sampling_params, evaluation="not given"):
    sample.metadata["evaluation"] = evaluation
    sample.status, sample.reward = Sample.Status.COMPLETED, 1.0
    return sample


async def test_a_generate_function_is_told_of_an_evaluation_if_it_asks(make_args):
    args = make_args(custom_generate_function_path=HERE + "finished")
    for evaluation in (False, True):
        sample = await generate_and_rm(args, Sample(index=0), {}, evaluation=evaluation)
        assert sample.metadata["evaluation"] is evaluation


async def test_a_rollout_function_of_the_user_s_can_submit_and_wait(make_args, make_source):
    """As the original's loop does it, with its names."""
    args = make_args(custom_generate_function_path=HERE + "finished")
    state = GenerateState(args)
    assert state is GenerateState(None) and state.processor is None
    state.reset()
    state.submit_generate_tasks(make_source(args).get_samples(3))
    groups = []
    while state.remaining_batch_size:
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        groups += [task.result() for task in done]
        state.remaining_batch_size -= len(done)
    assert sorted(group[0].group_index for group in groups) == [0, 1, 2] and not state.pending
    assert all(sample.reward == 1.0 for group in groups for sample in group)
