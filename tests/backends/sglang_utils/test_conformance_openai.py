"""Errors, chat and completions as users rely on them, against the embedded engine and real SGLang."""

import json
from typing import Any

import pytest

from tests.engines.under_test import PROMPT

CHAT = [{"role": "user", "content": "12+34="}]
GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture
def engine(engine_under_test):
    engine_under_test.client.continue_generation()
    return engine_under_test


def chat(engine, messages, **body):
    return engine.post("/v1/chat/completions", model="any", messages=messages, **{**GREEDY, **body})


def chat_ids(engine, messages, **body) -> list[int]:
    answer = chat(engine, messages, return_prompt_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["prompt_token_ids"]


def chunks_of(answer) -> list[dict[str, Any]]:
    """The events of a stream, which is held to end well."""
    *lines, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_wrong_value_a_wrong_type_and_an_unknown_name_have_shapes_of_their_own(engine):
    value = engine.try_generate(top_p=2)
    assert value.status_code == 400 and value.json()["error"]["message"]
    malformed = engine.http.post("/generate", content=b"{", headers={"content-type": "application/json"})
    assert malformed.status_code == 400
    assert {"object": "error", "type": "Bad Request", "code": 400}.items() <= malformed.json().items()
    for sampling in ({"no_such_parameter": 1}, {"temperature": "hot"}, {"max_new_tokens": 1.5}, {"stop": 5}):
        contract = engine.try_generate(**sampling)
        assert contract.status_code == 400 and isinstance(contract.json()["error"], str)


def test_a_stream_tells_of_a_wrong_value_inside_the_stream(engine):
    answer = engine.try_generate(top={"stream": True}, top_p=2)
    assert answer.status_code == 200
    first, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    error = json.loads(first)["error"]
    assert error.pop("message") and done == "[DONE]"
    assert error == {"type": "invalid_request_error", "code": 400, "retryable": False}


def test_wrong_bodies_of_control_calls_and_chats_are_error_objects(engine):
    for path, body in (("/update_weights_from_disk", {}), ("/v1/chat/completions", {"messages": "x"})):
        answer = engine.post(path, **body)
        assert answer.status_code == 400 and answer.json()["object"] == "error"


def test_a_list_of_text_parts_is_their_text(engine):
    parts = [{"type": "text", "text": "12+"}, {"type": "text", "text": "34="}]
    joined = chat_ids(engine, [{"role": "user", "content": "12+ 34="}])
    assert chat_ids(engine, [{"role": "user", "content": parts}]) == joined


def test_a_final_assistant_message_is_continued_or_becomes_the_users(engine):
    begun = [*CHAT, {"role": "assistant", "content": "4"}]
    plain = chat_ids(engine, CHAT)
    continued = chat_ids(engine, begun, continue_final_message=True)
    assert continued[: len(plain)] == plain
    assert engine.tokenizer.decode(continued[len(plain) :]) == "4"
    turned = chat_ids(engine, [*CHAT, {"role": "user", "content": "4"}])
    assert chat_ids(engine, begun) == turned


def test_roles_are_known_in_any_case(engine):
    system = {"role": "system", "content": "Be brief."}
    shouted = chat_ids(engine, [{**system, "role": "SYSTEM"}, *CHAT])
    assert shouted == chat_ids(engine, [system, *CHAT])
    for role in ("wizard", "USER"):
        answer = chat(engine, [{"role": role, "content": "x"}])
        assert (answer.status_code, answer.json()["type"]) == (400, "Bad Request")


def test_min_tokens_and_ids(engine):
    body = {"model": "any", "prompt": PROMPT, **GREEDY, "return_token_ids": True, "min_tokens": 4}
    answer = engine.post("/v1/completions", **body).json()
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 4
    assert choice["prompt_token_ids"] == PROMPT
    (said,) = chat(engine, CHAT, min_tokens=4, return_token_ids=True).json()["choices"]
    assert len(said["response_token_ids"]) == 4 and said["prompt_token_ids"] == chat_ids(engine, CHAT)
    assert "token_ids" not in said
    assert chat(engine, CHAT, stream=True, return_token_ids=True).status_code == 400


def test_the_prompt_comes_with_the_first_chunk_only(engine):
    body = {"model": "any", "prompt": PROMPT, **GREEDY, "ignore_eos": True}
    answer = engine.post("/v1/completions", **body, stream=True, return_token_ids=True)
    first, *rest = [chunk["choices"][0] for chunk in chunks_of(answer)]
    assert first["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in choice for choice in rest)
    assert sum(len(choice["token_ids"]) for choice in (first, *rest)) == GREEDY["max_tokens"]


def test_a_chat_has_a_place_for_reasoning_whole_or_in_chunks(engine):
    answer = chat(engine, CHAT, ignore_eos=True).json()
    assert answer["choices"][0]["message"]["reasoning_content"] is None
    assert answer["usage"]["completion_tokens_details"] is None
    chunks = chunks_of(chat(engine, CHAT, ignore_eos=True, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(delta["reasoning_content"] is None for delta in deltas)
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == answer["choices"][0]["message"]["content"]


def test_an_echo_has_the_log_probs_of_the_prompt(engine):
    body = {"model": "any", "prompt": PROMPT, **GREEDY, "ignore_eos": True, "logprobs": 2, "echo": True}
    answer = engine.post("/v1/completions", **body).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == len(PROMPT) + 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    scored = engine.generate(top={"logprob_start_len": 0}, max_new_tokens=0)["meta_info"]
    expected = [value for value, _, _ in scored["input_token_logprobs"]][1:]
    assert logprobs["token_logprobs"][1 : len(PROMPT)] == pytest.approx(expected, abs=1e-4)


def test_an_answer_bears_the_name_that_was_asked_for_and_its_versions(engine):
    answer = chat(engine, CHAT).json()
    assert answer["model"] == "any"
    assert answer["metadata"]["weight_versions"][0]["start"] == 0
