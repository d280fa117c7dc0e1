"""The agents of the examples that ask a provider's API, whole rollouts of them, with a scripted engine."""

from importlib import import_module

import pytest

from examples.openai_agent.generate import grade
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.training.conversion import flatten_samples
from slime.utils.types import Sample
from tests.engines.fake import TalkingEngine

# The tokenizer and the args of the rollout tests.
from tests.rollout.conftest import *  # noqa: F403

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6*7"}}\n</tool_call>'


def row():
    return Sample(prompt=[{"role": "user", "content": "6*7"}], label="42")


@pytest.fixture(params=["openai_agent", "anthropic_agent"])
def example(request):
    """The module with its generate function."""
    module = import_module(f"examples.{request.param}.generate")
    yield module
    module.Provider.clear()


@pytest.fixture
def engine(tokenizer):
    engine = TalkingEngine(tokenizer)
    engine.answer = lambda conversation: "\\boxed{42}" if "42" in conversation else CALL
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def agent_args(make_args, example):
    def make(**options):
        return make_args(
            custom_generate_function_path=f"{example.__name__}.generate",
            custom_rm_path=None,
            apply_chat_template=False,
            rollout_max_response_len=200,
            **options,
        )

    return make


async def test_a_rollout_trains_what_the_model_said_and_nothing_else(
    engine, agent_args, make_source, tokenizer
):
    args = agent_args()
    output = await generate_rollout_async(args, 0, make_source(args))
    samples = flatten_samples(output.samples)
    assert len(samples) == 6
    for sample in samples:
        sample_trained = [
            token
            for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
            if mask
        ]
        text = tokenizer.decode(sample_trained)
        assert text == f"{CALL}<|im_end|>\\boxed{{42}}<|im_end|>"
        assert sample.metadata["round_number"] == 2 and sample.reward == 0.0  # the labels are others
        assert len(sample.rollout_log_probs) == sample.response_length


@pytest.mark.parametrize(("answer", "score"), [("so \\boxed{ 42 }", 1.0), ("42", 0.0), ("\\boxed{43}", 0.0)])
def test_the_last_box_counts(answer, score):
    assert grade(answer, "42") == score


async def test_who_asks_for_ever_gets_no_answer_and_is_trained_on(engine, agent_args, make_source, example):
    turns = import_module(example.__name__.replace("generate", "agent")).MAX_TURNS
    engine.answer = lambda conversation: CALL
    args = agent_args(n_samples_per_prompt=1, rollout_batch_size=1, over_sampling_batch_size=1)
    (group,) = (await generate_rollout_async(args, 0, make_source(args))).samples
    assert group[0].metadata["round_number"] == turns and group[0].reward == 0.0
    assert "no answer" in group[0].metadata["no_answer"]


async def test_a_prompt_that_leaves_no_room_gives_the_sample_up(engine, agent_args, example):
    args = agent_args(rollout_max_context_len=3)
    sample = await example.generate(args, row(), {})
    assert sample.status is Sample.Status.ABORTED and "400" in sample.metadata["no_answer"]


async def test_what_the_tool_cannot_read_is_an_error_that_goes_on(engine, agent_args, example):
    engine.answer = lambda conversation: "\\boxed{42}" if "error" in conversation else CALL.replace("*", "?")
    sample = await example.generate(agent_args(), row(), {"max_new_tokens": 200})
    assert sample.metadata["round_number"] == 2
    # OpenAI's API has no word for a call that failed.
    assert sample.metadata.get("tool_errors") == (1 if "anthropic" in example.__name__ else None)
    assert sample.reward == 1.0


async def test_an_engine_that_gives_up_leaves_no_session_behind(engine, agent_args, example):
    engine.answers["generate"] = {"meta_info": {"finish_reason": {"type": "abort"}}}
    args = agent_args()
    sample = await example.generate(args, row(), {"max_new_tokens": 200})
    assert sample.status is Sample.Status.ABORTED and not example.Provider(args).adapter._sessions


async def test_an_agent_that_fails_leaves_no_session_behind(engine, agent_args, monkeypatch, example):
    adapter = example.Provider(agent_args()).adapter

    async def fails(base_url, api_key, messages):
        assert api_key in adapter._sessions
        raise ConnectionError("cut")

    monkeypatch.setattr(example, "solve", fails)
    with pytest.raises(ConnectionError):
        await example.generate(agent_args(), Sample(prompt=[], label="42"), {})
    assert not adapter._sessions
