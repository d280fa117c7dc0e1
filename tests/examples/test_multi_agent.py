"""Solvers, rewriters and a selector: who reads what, who earns what, and what GRPO makes of it."""

import pytest

from examples.multi_agent.prompts import rewriter_prompt
from examples.multi_agent.rollout_with_multi_agents import (
    generate_with_multi_agents,
    problem_of,
    selected,
)
from slime.config.run import run_config
from slime.rollout.generate_state import GenerateState
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.training.conversion import flatten_samples, samples_to_train_data
from slime.utils.types import Sample
from tests.run_args import with_groups

PATH = "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents"


def team_mate(text):
    """A solver that is wrong, a rewriter that is right, a selector that takes the second."""
    if "Which is the best?" in text:
        return "\\boxed{2}"
    return "better: \\boxed{7}" if "Compare them" in text else "\\boxed{6}"


async def seven(args, samples, **kwargs):
    return [float("{7}" in sample.response) for sample in samples]


@pytest.fixture
def agent_args(make_args):
    def make(**overrides):
        return make_args(
            apply_chat_template=False,
            custom_generate_function_path=PATH,
            custom_rm_path="tests.examples.test_multi_agent.seven",
            rollout_max_response_len=200,
            **overrides,
        )

    return make


async def test_one_sample_becomes_an_execution(engine, agent_args, make_source):
    engine.reply = team_mate
    args = agent_args()
    output = await generate_rollout_async(args, 0, make_source(args))
    assert [len(group) for group in output.samples] == [2, 2, 2]
    for group in output.samples:
        for execution in group:
            assert [s.metadata["role"] for s in execution] == ["solver"] * 3 + ["rewriter"] * 3 + ["selector"]
            assert [s.reward for s in execution] == [0.0] * 3 + [1.0] * 3 + [1.0]
            assert len({s.rollout_id for s in execution}) == len({s.group_index for s in execution}) == 1
        assert group[0][0].rollout_id != group[1][0].rollout_id
    prompts = [sample.prompt for sample in output.samples[0][0]]
    assert all("\\boxed{6}" in prompt for prompt in prompts[3:6]) and "\\boxed{7}" in prompts[6]
    assert "<|im_start|>user\nq0" in prompts[0]


async def test_the_groups_of_grpo_stay_whole(engine, agent_args, make_source):
    engine.reply = team_mate
    args = agent_args()
    output = await generate_rollout_async(args, 0, make_source(args))
    grpo = {
        **vars(args),
        **dict(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True),
        **dict(overlong_buffer_len=None, custom_advantage_function_path=None),
    }
    samples = flatten_samples(output.samples)
    batch = samples_to_train_data(run_config(with_groups(grpo)), samples)
    assert len(batch["tokens"]) == 42 and len(set(batch["rollout_ids"])) == 6
    for rollout_id, total in zip(batch["rollout_ids"], batch["rollout_mask_sums"], strict=True):
        assert total == sum(s.response_length for s in samples if s.rollout_id == rollout_id)
    # Equal attempts: what each role earns differs from the mean vote, 4/7, by the same in both of a group.
    assert batch["rewards"][:7] == pytest.approx(batch["rewards"][7:14])
    assert sum(batch["rewards"][:14]) == pytest.approx(0, abs=1e-6)


async def test_equal_questions_have_seeds_of_their_own(engine, agent_args, make_source):
    engine.reply = team_mate
    args = agent_args()
    await generate_rollout_async(args, 0, make_source(args))
    seeds = [body["sampling_params"]["sampling_seed"] for body in engine.seen("generate")]
    assert len(seeds) == len(set(seeds)) == 42


async def test_an_evaluation_gets_the_selected_answer(engine, agent_args, make_source):
    engine.reply = team_mate
    args = agent_args()
    ((sample, _),) = make_source(args).get_samples(1)
    answer = await generate_with_multi_agents(args, sample, {"max_new_tokens": 200}, evaluation=True)
    assert answer.metadata["role"] == "rewriter" and answer.reward == 1.0


async def test_an_aborted_team_gives_its_sample_back(engine, agent_args, make_source):
    args = agent_args()
    state = GenerateState(args)

    def reply(text):
        state.aborted = "Compare them" in text
        return team_mate(text)

    engine.reply = reply
    ((sample, _),) = make_source(args).get_samples(1)
    given_back = await generate_with_multi_agents(args, sample, {"max_new_tokens": 200})
    assert given_back is sample and sample.status == Sample.Status.ABORTED
    assert (sample.tokens, sample.response_length, sample.reward) == ([], 0, None)


@pytest.mark.parametrize(
    ("response", "index"),
    [
        ("\\boxed{1}", 0),
        ("\\boxed{3} no, \\boxed{ 2 }", 1),
        ("\\boxed{0}", None),
        ("\\boxed{3}", None),
        ("\\boxed{-1}", None),
        ("2", None),
    ],
)
def test_a_choice_is_the_number_of_a_candidate(response, index):
    candidates = [Sample(index=0), Sample(index=1)]
    assert selected(response, candidates) is (None if index is None else candidates[index])


def test_braces_in_a_problem_or_an_answer_are_text():
    text = rewriter_prompt("What is {solutions}?", ["{problem} \\boxed{1}"])
    assert text.startswith("What is {solutions}?") and "Solution 1:\n{problem} \\boxed{1}" in text
    assert problem_of(Sample(prompt=[{"role": "user", "content": "q"}])) == "q"
