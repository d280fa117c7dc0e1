"""Functions that do not do what their hook wants are named, before a run starts or when they are called."""

import asyncio

import pytest
import torch

from slime.arguments.registry import CONFIG_GROUPS
from slime.arguments.validate.user_code import unusable_code, why_unusable
from slime.config.run import run_config
from slime.observability.rollout_metrics import eval_log_metrics, rollout_log_metrics
from slime.rollout.base_types import RolloutError
from slime.rollout.checks import check_samples
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.training.batch import BatchError
from slime.training.conversion import check_lengths, flatten_samples, samples_to_train_data
from slime.utils.types import Sample
from tests.plugin_contracts import recorders
from tests.run_args import run_args

HERE = "tests.plugin_contracts.test_broken_contracts."
AWAITED = {"custom_generate_function_path", "custom_rm_path", "rollout_sample_hook_path"}
FLAGS = [spec for group in CONFIG_GROUPS for spec in group.specs() if spec.dotted_path]


async def deferred(*args, **kwargs):
    return True


def generating(*args, **kwargs):
    yield True


class Deferred:
    async def __call__(self, *args, **kwargs):
        return True


an_object = Deferred()


def silent_filter(args, group):
    pass


def late_filter(args, group):
    return asyncio.get_running_loop().create_future()


def plain_generate(args, sample, sampling_params):
    return sample


def handing_on_generate(args, sample, sampling_params):
    return recorders.generate(args, sample, sampling_params)


@pytest.mark.parametrize("name", ["deferred", "generating", "an_object"])
@pytest.mark.parametrize("spec", FLAGS, ids=lambda spec: spec.dest)
def test_code_that_nobody_would_run_is_refused_before_the_start(spec, name):
    """An asynchronous filter would keep every group, and an asynchronous log function log nothing."""
    path = HERE + name
    args = run_args(**{spec.dest: [path] if isinstance(spec.default, list) else path})
    wanted = [f"{spec.names[0]} {path}: runs only when it is awaited or iterated, and nobody does"]
    found = [line.partition(" (wanted: a plain function)")[0] for line in unusable_code(args, [spec])]
    assert found == ([] if spec.dest in AWAITED else wanted)


def test_a_class_whose_objects_are_called_is_code_like_any_other():
    assert why_unusable(HERE + "Deferred", awaited=False) is None


@pytest.mark.parametrize(("name", "found"), [("silent_filter", "NoneType"), ("late_filter", "Future")])
async def test_a_filter_that_decides_nothing_ends_the_rollout(engine, make_args, make_source, name, found):
    """Its None would drop every group, and the rollout generate for ever."""
    args = make_args(dynamic_sampling_filter_path=HERE + name)
    message = (
        rf"{name} failed on samples \[0, 1\]: TypeError: it returned {found}, expected a DynamicFilterOutput"
    )
    with pytest.raises(RolloutError, match=message):
        await generate_rollout_async(args, 0, make_source(args))


async def test_a_plain_generate_function_is_told_from_one_that_hands_on(engine, make_args, make_source):
    args = make_args(custom_generate_function_path=HERE + "plain_generate")
    with pytest.raises(
        RolloutError, match=r"plain_generate failed .* it returned Sample at once, expected an async"
    ):
        await generate_rollout_async(args, 0, make_source(args))
    args = make_args(custom_generate_function_path=HERE + "handing_on_generate")
    assert len((await generate_rollout_async(args, 0, make_source(args))).samples) == 3


async def cancelled_generate(args, sample, sampling_params):
    raise asyncio.CancelledError


async def cancelled_rm(args, sample, **kwargs):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("option", "name"),
    [("custom_generate_function_path", "cancelled_generate"), ("custom_rm_path", "cancelled_rm")],
)
async def test_a_cancellation_of_the_function_s_own_is_told_by_its_name(
    engine, make_args, make_source, option, name
):
    args = make_args(**{option: HERE + name})
    with pytest.raises(RolloutError, match=rf"{name} failed on sample \d of group \d: CancelledError"):
        await generate_rollout_async(args, 0, make_source(args))


async def mapped_group_rm(args, samples, **kwargs):
    return {sample.index: 1.0 for sample in samples}


async def textual_group_rm(args, samples, **kwargs):
    return "10"


async def silent_group_rm(args, samples, **kwargs):
    pass


@pytest.mark.parametrize("name", ["mapped_group_rm", "textual_group_rm", "silent_group_rm"])
async def test_rewards_of_a_group_come_in_an_order(engine, make_args, make_source, name):
    """The keys of a dict, or the letters of a text, would be taken for rewards."""
    args = make_args(group_rm=True, custom_rm_path=HERE + name)
    with pytest.raises(RolloutError, match=rf"{name} failed on samples .* expected a list of rewards"):
        await generate_rollout_async(args, 0, make_source(args))


async def regrouping_generate(args, sample, sampling_params):
    sample = await recorders.generate(args, sample, sampling_params)
    sample.group_index = 0
    return sample


async def test_a_sample_stays_in_the_group_that_was_given_out(engine, make_args, make_source):
    """Else rewards of other prompts would be compared with its own."""
    args = make_args(custom_generate_function_path=HERE + "regrouping_generate")
    groups = (await generate_rollout_async(args, 0, make_source(args))).samples
    assert [[sample.group_index for sample in group] for group in groups] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "done"}, "status of sample 3 of group None is 'done', expected SampleStatus"),
        ({"metadata": None}, "metadata of sample 3 of group None is None, expected dict"),
        ({"response": None}, "response of sample 3 of group None is None, expected str"),
        (
            {"response_length": torch.tensor(2)},
            r"response_length of sample 3 .* is tensor\(2\), expected Integral",
        ),
        (
            {"rollout_log_probs": [-0.1, 0.9]},
            "are 0.9 at position 1 of 2, expected finite logarithms, none above 0",
        ),
        ({"rollout_log_probs": torch.tensor([0.5, -1])}, "are 0.5 at position 0 of 2"),
    ],
)
def test_fields_of_another_kind_are_named_with_function_and_sample(changes, message):
    with pytest.raises(RolloutError, match=f"my.fn: .*{message}"):
        check_samples("my.fn", [Sample(index=3, **changes)])


def test_log_probs_may_be_0_and_arrays():
    for values in ([0.0, 1e-6], [], torch.tensor([-1.0]), torch.tensor([]), (-1.0,)):
        check_samples("my.fn", [Sample(rollout_log_probs=values)])


def finished(**changes):
    whole = dict(index=3, tokens=[1, 2, 3, 4], response_length=2, loss_mask=[1, 1], reward=1.0, group_index=0)
    return Sample(**{**whole, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [1]}, "loss_mask of 1 for 2 response tokens"),
        ({"rollout_log_probs": [-1.0] * 3}, "rollout_log_probs of 3 for 2 response tokens"),
        ({"teacher_log_probs": []}, "teacher_log_probs of 0 for 2 response tokens"),
        ({"response_length": 4, "loss_mask": None}, "4 response tokens of 4 in all, wanted fewer"),
        ({"tokens": [1, 2, 3, 10]}, r"tokens \[1, 2, 3, 10\], wanted ids from 0 to 9"),
        ({"tokens": [1, -1, 3, 4]}, r"tokens \[1, -1, 3, 4\], wanted ids from 0 to 9"),
        ({"tokens": [1, None, 3, 4]}, ".*wanted ids from 0 to 9"),
        ({"tokens": list("abcd")}, ".*wanted ids from 0 to 9"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_named(changes, message):
    with pytest.raises(BatchError, match=f"sample 3 of group 0: {message}"):
        check_lengths([finished(), finished(**changes)], vocab_size=10)


def test_samples_of_any_sequence_can_be_trained_on():
    tokens = torch.tensor([1, 2, 3, 9])
    check_lengths([finished(tokens=tokens, loss_mask=(1, 0), rollout_log_probs=tokens[:2])], vocab_size=10)


@pytest.mark.parametrize("groups", [[[{"tokens": [1]}]], [None], [(Sample(),)]])
def test_what_is_no_sample_is_shown(groups):
    with pytest.raises(BatchError, match="is among the samples"):
        flatten_samples(groups)


def silent(*_):
    pass


def one_list(args, samples):
    return [1.0] * len(samples)


def too_few(args, samples):
    return [1.0], [1.0]


@pytest.mark.parametrize("name", ["silent", "one_list", "too_few"])
def test_post_processing_gives_two_rewards_for_each_sample(name):
    config = run_config(run_args(custom_reward_post_process_path=HERE + name))
    with pytest.raises(BatchError, match=rf"{name}: returned .* wanted \(raw rewards, rewards\) with 3 each"):
        samples_to_train_data(config, [finished() for _ in range(3)])


def test_a_conversion_gives_a_dict():
    config = run_config(run_args(custom_convert_samples_to_train_data_path=HERE + "silent"))
    with pytest.raises(BatchError, match="silent: returned None, wanted a dict of fields"):
        samples_to_train_data(config, [finished()])


def failing(*_):
    raise KeyError("no such column")


def test_a_log_function_that_fails_is_named():
    failing = HERE + "failing"
    config = run_config(
        run_args(custom_rollout_log_function_path=failing, custom_eval_rollout_log_function_path=failing)
    )
    for call in (
        lambda: rollout_log_metrics(0, config, [], None, 1.0),
        lambda: eval_log_metrics(0, config, {}),
    ):
        with pytest.raises(
            RuntimeError, match=r"test_broken_contracts.failing failed: KeyError: 'no such column'"
        ):
            call()


@pytest.mark.parametrize("name", ["silent", "failing"])
def test_a_buffer_filter_that_fails_is_named(make_args, make_source, name):
    source = make_source(make_args(buffer_filter_path=HERE + name))
    source.add_samples(source.get_samples(2))
    with pytest.raises(ValueError, match=f"--buffer-filter-path {HERE}{name}: (TypeError|KeyError): "):
        source.get_samples(1)


class FlatSource(RolloutDataSource):
    def get_samples(self, num_samples):
        return [sample for group in super().get_samples(num_samples) for sample in group]


async def test_a_data_source_gives_groups(engine, make_args):
    args = make_args()
    with pytest.raises(RolloutError, match=r"FlatSource.get_samples\(3\) returned Sample.* expected lists"):
        await generate_rollout_async(args, 0, FlatSource(args))


async def test_a_generate_function_that_only_gives_up_ends_the_rollout(engine, make_args, make_source):
    """It would go through all data, epoch after epoch, until the deadline of the rollout."""
    args = make_args(custom_generate_function_path="tests.rollout.plugins.always_aborted")
    with pytest.raises(
        RolloutError, match=r"60 groups in a row had a sample that its generate function aborted"
    ):
        await generate_rollout_async(args, 0, make_source(args))


@pytest.mark.parametrize("rewards", [[], [1.0, None], [{"a": 1.0}], ["1"]])
def test_rewards_of_an_evaluation_are_numbers(rewards):
    config = run_config(run_args())
    with pytest.raises(ValueError, match=r"eval/set: rewards .* wanted a number for each sample"):
        eval_log_metrics(0, config, {"set": {"rewards": rewards}})


def test_an_evaluation_may_give_arrays():
    data = {"set": {"rewards": torch.tensor([1.0, 0.0]), "truncated": torch.tensor([0, 1])}}
    metrics = eval_log_metrics(0, run_config(run_args()), data)
    assert metrics == {"eval/set": 0.5, "eval/set-truncated_ratio": 0.5}
