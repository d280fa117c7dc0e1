"""The rollout calls each hook with exactly what its contract says, by position and keyword."""

import inspect

import pytest

from slime.config.run import run_config
from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.training.conversion import flatten_samples, samples_to_train_data
from slime.utils.types import Sample
from tests.plugin_contracts import recorders
from tests.plugin_contracts.contracts import RECORDERS
from tests.run_args import with_groups


def is_group(value):
    return isinstance(value, list) and [type(item) for item in value] == [Sample, Sample]


def is_groups(value):
    return isinstance(value, list) and len(value) == 3 and all(map(is_group, value))


CHECKS = {
    "custom_generate_function_path": (
        "generate",
        6,
        lambda sample, params: isinstance(sample, Sample) and params["max_new_tokens"] == 32,
    ),
    "custom_rm_path": ("rm", 6, lambda sample: isinstance(sample, Sample) and sample.response_length > 0),
    "dynamic_sampling_filter_path": (
        "dynamic_filter",
        3,
        lambda group: is_group(group) and all(sample.reward is not None for sample in group),
    ),
    "buffer_filter_path": (
        "buffer_filter",
        1,
        lambda rollout_id, buffer, count: rollout_id is None and is_group(buffer[0]) and count == 3,
    ),
    "rollout_sample_filter_path": ("sample_filter", 1, is_groups),
    "rollout_all_samples_process_path": (
        "all_samples",
        1,
        lambda groups, get_samples: is_groups(groups) and callable(get_samples),
    ),
    "rollout_sample_hook_path": (
        "sample_hook",
        6,
        lambda sample, rollout_id, evaluation: (
            isinstance(sample, Sample) and rollout_id == 4 and evaluation is False
        ),
    ),
}


@pytest.mark.parametrize("option", CHECKS)
async def test_a_rollout_hook_gets_what_its_contract_says(engine, make_args, make_source, option):
    recorders.calls.clear()
    name, times, check = CHECKS[option]
    path = RECORDERS + name
    args = make_args(**{option: [path] if option == "rollout_sample_hook_path" else path})
    source = make_source(args)
    source.add_samples(source.get_samples(1))
    await generate_rollout_async(args, 4, source)
    assert [call[0] for call in recorders.calls] == [name] * times
    for call in recorders.calls:
        assert check(*call[1:]), call


async def test_a_group_reward_gets_the_group(engine, make_args, make_source):
    recorders.calls.clear()
    args = make_args(group_rm=True, custom_rm_path=RECORDERS + "group_rm")
    await generate_rollout_async(args, 0, make_source(args))
    assert len(recorders.calls) == 3
    assert all(is_group(samples) for _, samples in recorders.calls)


@pytest.mark.parametrize(
    ("option", "name", "result"),
    [
        ("custom_convert_samples_to_train_data_path", "convert", lambda data: data["tokens"] == [[1]]),
        ("custom_reward_post_process_path", "post_process", lambda data: data["rewards"] == [1.0]),
    ],
)
def test_a_conversion_hook_gets_the_flat_samples(make_args, option, name, result):
    recorders.calls.clear()
    args = make_args()
    args.custom_convert_samples_to_train_data_path = args.custom_reward_post_process_path = None
    setattr(args, option, RECORDERS + name)
    samples = flatten_samples([[Sample(index=0, tokens=[1], response_length=1)]])
    assert result(samples_to_train_data(run_config(with_groups(vars(args))), samples))
    assert recorders.calls == [(name, samples)]


def test_bare_lists_and_dicts_of_rollout_functions_are_wrapped_and_others_refused():
    groups, data = [[Sample()]], {"set": {"rewards": [1.0]}}
    train = call_rollout_fn(lambda *args, evaluation: groups, 1, 2, 3, evaluation=False)
    assert train == RolloutFnTrainOutput(groups)
    evaluated = call_rollout_fn(lambda *args, evaluation: data, 1, 2, 3, evaluation=True)
    assert evaluated == RolloutFnEvalOutput(data)
    for wrong in (lambda *args, evaluation: None, lambda *args, evaluation: data):
        with pytest.raises(RolloutError, match="expected RolloutFnTrainOutput or a list"):
            call_rollout_fn(wrong, evaluation=False)


@pytest.mark.parametrize("name", ["generate", "rm", "dynamic_filter", "sample_hook"])
def test_recorders_take_no_more_than_the_documented_arguments(name):
    parameters = inspect.signature(getattr(recorders, name)).parameters.values()
    assert not any(p.kind == p.VAR_POSITIONAL for p in parameters)
