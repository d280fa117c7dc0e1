"""Requests that one of the two servers once refused and the other took, or that they answered differently."""

import pytest

from tests.engines.under_test import PROMPT

pytestmark = pytest.mark.slow

KEPT_FREE = 6  # tokens of the context that no prompt may take
CHAT = [{"role": "user", "content": "2 + 3"}]


@pytest.fixture
def engine(engine_under_test):
    engine_under_test.client.continue_generation()
    return engine_under_test


@pytest.fixture
def context(engine) -> int:
    return engine.http.get("/v1/models").json()["data"][0]["max_model_len"]


def test_min_new_tokens_holds_no_stop_string_back(engine):
    words = [token for token in range(32, 60) if engine.tokenizer.decode([token]).strip()]
    forced = {"temperature": 0, "logit_bias": {str(words[0]): 100.0}, "max_new_tokens": 8}
    answer = engine.generate(**forced, stop=[engine.tokenizer.decode([words[0]])], min_new_tokens=5)
    assert answer["meta_info"]["completion_tokens"] == 1
    assert answer["meta_info"]["finish_reason"]["matched"] == engine.tokenizer.decode([words[0]])


def test_a_stop_string_wins_over_a_stop_token_that_is_the_same(engine):
    words = [token for token in range(32, 60) if engine.tokenizer.decode([token]).strip()]
    text = engine.tokenizer.decode([words[0]])
    forced = {"temperature": 0, "logit_bias": {str(words[0]): 100.0}, "ignore_eos": False}
    answer = engine.generate(**forced, stop=[text], stop_token_ids=[words[0]])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": text}


@pytest.mark.parametrize(("left", "status"), [(KEPT_FREE + 1, 200), (KEPT_FREE, 400), (1, 400)])
def test_a_prompt_keeps_six_tokens_of_the_context_free(engine, context, left, status):
    assert engine.try_generate([40] * (context - left), max_new_tokens=1).status_code == status


def test_a_response_ends_two_tokens_before_the_context_does(engine, context):
    prompt = [40] * (context - 12)
    both = [{"max_new_tokens": new, "ignore_eos": True} for new in (12, None)]
    for answer in engine.generate([prompt, prompt], top={"sampling_params": both}):
        assert answer["meta_info"]["completion_tokens"] == 10
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 10}
    assert engine.try_generate(prompt, max_new_tokens=13).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": [{"n": 2}, {"n": 1}]},
        {"sampling_params": {"n": 2}, "return_logprob": [True, True]},
        {"sampling_params": {"n": 2}, "logprob_start_len": [0, 0], "return_logprob": True},
        {"sampling_params": {"n": 2}, "top_logprobs_num": [1, 1], "return_logprob": True},
        {"sampling_params": {"n": 2}, "token_ids_logprob": [[1], [1]], "return_logprob": True},
    ],
    ids=str,
)
def test_what_is_said_of_single_prompts_goes_with_one_sample_of_each(engine, body):
    assert engine.post("/generate", input_ids=[PROMPT, PROMPT], **body).status_code == 400


@pytest.mark.parametrize(
    "sampling", [{"logit_bias": {"40": 1e9}}, {"stream_interval": 0}, {"max_new_tokens": 2, "n": 1}], ids=str
)
def test_sampling_parameters_that_both_take(engine, sampling):
    assert engine.try_generate(**sampling).status_code == 200


NULLS = ("model", "n", "stream", "min_tokens", "ignore_eos", "frequency_penalty", "presence_penalty")


@pytest.mark.parametrize("name", [*NULLS, "logprobs", "continue_final_message"])
def test_a_chat_with_a_null_is_refused(engine, name):
    body = {"model": "m", "messages": CHAT, "max_tokens": 1}
    assert engine.post("/v1/chat/completions", **body, seed=None).status_code == 200
    assert engine.post("/v1/chat/completions", **{**body, name: None}).status_code == 400


@pytest.mark.parametrize("name", [*NULLS, "max_tokens", "echo", "temperature", "top_p", "top_k", "min_p"])
def test_a_completion_with_a_null_is_refused(engine, name):
    body = {"model": "m", "prompt": "2 + 3", "max_tokens": 1}
    assert engine.post("/v1/completions", **body, logprobs=None).status_code == 200
    assert engine.post("/v1/completions", **{**body, name: None}).status_code == 400


@pytest.mark.parametrize("extra", [{"best_of": 3}, {"logprobs": True}], ids=str)
def test_a_completion_takes_what_changes_nothing_and_true_for_one(engine, extra):
    body = {"model": "m", "prompt": "2 + 3", "max_tokens": 2}
    response = engine.post("/v1/completions", **body, **extra)
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 1


@pytest.mark.parametrize(
    ("effort", "status"), [("low", 200), ("max", 200), (0.5, 200), ("much", 400), (2.0, 400), (True, 400)]
)
def test_the_effort_of_reasoning_is_one_of_sglangs(engine, effort, status):
    body = {"model": "m", "messages": CHAT, "max_tokens": 1}
    assert engine.post("/v1/chat/completions", **body, reasoning_effort=effort).status_code == status


@pytest.mark.parametrize(("role", "status"), [("user", 400), ("system", 200)])
def test_only_a_user_has_to_say_something(engine, role, status):
    messages = [{"role": role, "content": None}, *CHAT]
    body = {"model": "m", "messages": messages, "max_tokens": 1}
    assert engine.post("/v1/chat/completions", **body).status_code == status
