"""Each hook, called as a rollout calls it, gives what the rollout goes on with."""

import copy

import pytest

from slime.config.run import run_config
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.generation import generate_and_rm
from slime.rollout.rm_hub import async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, set_current_rollout_id
from slime.training.conversion import samples_to_train_data
from slime.utils.misc import is_finite_number, load_function
from slime.utils.types import Sample
from tests.plugin_contracts.contracts import only
from tests.run_args import with_groups

CONFIG = {"search_corpus": None, "search_top_k": 1, "num_parallel": 2}
"""What examples read of ``--custom-config-path``."""


def finished(source: RolloutDataSourceWithBuffer) -> list[Sample]:
    """A group as generation leaves it."""
    (group,) = source.get_samples(1)
    for sample in group:
        meta_info = {"finish_reason": {"type": "stop"}, "weight_version": "1"}
        sample.tokens = [1, 2]
        sample.append_response_tokens(tokens=[3, 4], log_probs=[-1.0, -0.5], meta_info=meta_info, text="ok")
        sample.metadata["turns"] = ["ok"]
    return group


@pytest.fixture
def run_args(engine, make_args, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"contents": "q0 is the first question"}\n')
    args = make_args(custom_rm_path="tests.plugin_contracts.recorders.rm")
    vars(args).update(CONFIG | {"search_corpus": str(tmp_path / "corpus.jsonl")})
    return args


@only("custom-generate-function-path")
async def test_a_generate_function_finishes_samples(contract, path, run_args, make_source):
    run_args.custom_generate_function_path = path
    if path == "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents":
        run_args.custom_rm_path = "tests.plugin_contracts.recorders.group_rm"
    ((sample, _),) = make_source(run_args).get_samples(1)
    result = await generate_and_rm(run_args, sample, {"max_new_tokens": 32, "temperature": 1.0})
    samples = result if isinstance(result, list) else [result]
    for made in samples:
        assert isinstance(made, Sample) and made.group_index == sample.group_index
        assert made.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)
        assert len(made.tokens) > made.response_length
        for values in (made.loss_mask, made.rollout_log_probs):
            assert values is None or len(values) == made.response_length
        assert is_finite_number(made.reward)
    if len(samples) > 1:
        assert len({made.rollout_id for made in samples} - {None}) == 1


@only("custom-rm-path")
async def test_a_reward_is_a_number_or_a_dict(contract, path, run_args, make_source, monkeypatch):
    if path == "slime.rollout.on_policy_distillation.reward_func":
        pytest.skip("asks a teacher; tests/rollout/test_on_policy_distillation.py has one")
    run_args.custom_rm_path = path
    sample, _ = finished(make_source(run_args))
    reward = await async_rm(run_args, sample)
    assert isinstance(reward, dict) or is_finite_number(reward)


@only("dynamic-sampling-filter-path")
def test_a_filter_decides_on_a_group(contract, path, run_args, make_source):
    group = finished(make_source(run_args))
    for number, sample in enumerate(group):
        sample.reward = float(number)
    before = copy.deepcopy(group)
    assert isinstance(call_dynamic_filter(load_function(path), run_args, group), DynamicFilterOutput)
    assert group == before


@only("buffer-filter-path")
def test_a_buffer_filter_leaves_balanced_books(contract, path, run_args, make_source):
    run_args.buffer_filter_path = path
    source = make_source(run_args)
    source.add_samples(source.get_samples(3))
    taken = source.get_samples(2)
    assert len(taken) == 2
    assert (source.ledger.leased, source.ledger.buffered) == (2, source.get_buffer_length())


@only("rollout-sample-hook-path")
async def test_a_sample_hook_goes_on_with_a_sample(contract, path, run_args, make_source):
    set_current_rollout_id(4)
    run_args.rollout_sample_hook_path = [path]
    group = finished(make_source(run_args))
    made = await apply_rollout_sample_hooks(run_args, [group[0], [group[1]]])
    assert isinstance(made[0], Sample) and isinstance(made[1][0], Sample)


@only("custom-reward-post-process-path")
def test_rewards_are_processed_one_by_one(contract, path, run_args, make_source):
    group = finished(make_source(run_args))
    for sample in group:
        log_probs = [[None, 1, None], *([-0.5, token, None] for token in sample.tokens[1:])]
        teacher = {"meta_info": {"input_token_logprobs": log_probs}}
        sample.reward = teacher if "distillation" in path else 1.0
    raw, rewards = load_function(path)(run_args, group)
    assert len(raw) == len(rewards) == len(group) and all(map(is_finite_number, rewards))


@only("custom-convert-samples-to-train-data-path")
def test_a_conversion_makes_a_batch(contract, path, run_args, make_source):
    group = finished(make_source(run_args))
    for sample in group:
        sample.reward = 1.0
    own = {"custom_convert_samples_to_train_data_path": path, "custom_advantage_function_path": None}
    batch = samples_to_train_data(run_config(with_groups(vars(run_args) | own)), group)
    assert len(batch["tokens"]) == len(batch["rewards"]) == len(group)
