"""The OpenAI endpoints."""

import json

import pytest

from slime.backends.embedded_engine.tokenizer import takes_parts

CHAT = [{"role": "user", "content": "2+2?"}]


def events(response) -> list:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion_is_the_generation_of_its_prompt(shared_server):
    greedy = {"temperature": 0, "ignore_eos": True}
    answer = shared_server.post("/v1/completions", prompt="hello", max_tokens=6, logprobs=2, **greedy).json()
    same = shared_server.post(
        "/generate", text="hello", sampling_params={"max_new_tokens": 6, **greedy}
    ).json()
    (choice,) = answer["choices"]
    assert choice["text"] == same["text"] and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == 6
    assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] == 5


def test_several_prompts_and_samples_give_a_choice_each(shared_server):
    answer = shared_server.post("/v1/completions", prompt=["a", "bc"], n=2, max_tokens=3, ignore_eos=True)
    choices = answer.json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    assert answer.json()["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def test_a_chat_answers_in_the_role_of_the_assistant(shared_server):
    body = {"messages": CHAT, "max_tokens": 5, "seed": 3, "ignore_eos": True, "logprobs": True}
    answer = shared_server.post("/v1/chat/completions", **body, top_logprobs=2).json()
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant" and answer["object"] == "chat.completion"
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 5 and all(len(entry["top_logprobs"]) == 2 for entry in content)
    again = shared_server.post("/v1/chat/completions", **body).json()
    assert again["choices"][0]["message"] == message


def test_streamed_chunks_add_up_to_the_whole(shared_server):
    body = {"messages": CHAT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = shared_server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    options = {"include_usage": True}
    chunks = events(shared_server.post("/v1/chat/completions", **body, stream=True, stream_options=options))
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1]) == whole
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_what_it_cannot_do_is_named(shared_server):
    fields = {
        "return_meta_info": True,
        "input_ids": [1],
    }
    for field, value in fields.items():
        answer = shared_server.post("/v1/chat/completions", messages=CHAT, **{field: value})
        assert answer.status_code == 400 and field in answer.json()["message"]
    for wrong in ({"messages": []}, {"messages": "hi"}, {"messages": [{}]}, {}):
        assert shared_server.post("/v1/chat/completions", **wrong).status_code == 400
    assert shared_server.post("/v1/completions", prompt=[]).status_code == 400


def ids_of(server, messages, **body) -> list[int]:
    """The prompt that a conversation becomes."""
    more = {"max_tokens": 1, "return_prompt_token_ids": True, **body}
    answer = server.post("/v1/chat/completions", messages=messages, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["prompt_token_ids"]


def test_a_list_of_text_parts_is_their_text(shared_server):
    parts = [{"type": "text", "text": "2+2?"}]
    assert ids_of(shared_server, [{"role": "user", "content": parts}]) == ids_of(shared_server, CHAT)
    two = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}]
    assert ids_of(shared_server, two) == ids_of(shared_server, [{"role": "user", "content": "2+ 2?"}])
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text"):
        answer = shared_server.post("/v1/chat/completions", messages=[{"role": "user", "content": [part]}])
        assert answer.status_code == 400 and "messages.0.content.0" in answer.json()["message"]


def test_a_template_that_goes_through_parts_gets_them():
    for loop in ("message.content", "message['content']", "msg.content"):
        assert takes_parts(
            "{% for message in messages %}{% for part in " + loop + " %}{% endfor %}{% endfor %}"
        )
    assert not takes_parts("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert not takes_parts("{% for") and not takes_parts(None)


def test_the_final_message_of_the_assistant_is_continued_or_becomes_the_users(shared_server):
    begun = [*CHAT, {"role": "assistant", "content": "It is"}]
    text = shared_server.post("/tokenize", prompt="It is", add_special_tokens=False).json()["tokens"]
    continued = ids_of(shared_server, begun, continue_final_message=True)
    assert continued == ids_of(shared_server, CHAT) + text
    turned = [*CHAT, {"role": "user", "content": "It is"}]
    assert ids_of(shared_server, begun) == ids_of(shared_server, turned)


def test_an_unknown_role_is_refused_and_case_does_not_matter(shared_server):
    answer = shared_server.post("/v1/chat/completions", messages=[{"role": "wizard", "content": "x"}])
    assert answer.status_code == 400 and "messages.0.role 'wizard'" in answer.json()["message"]
    system = [{"role": "system", "content": "Be brief."}, *CHAT]
    shouted = [{**system[0], "role": "SYSTEM"}, *CHAT]
    assert ids_of(shared_server, shouted) == ids_of(shared_server, system)


@pytest.mark.parametrize(
    ("path", "ids"), [("/v1/completions", "token_ids"), ("/v1/chat/completions", "response_token_ids")]
)
def test_min_tokens_and_ids_are_honoured(shared_server, path, ids):
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": CHAT}
    eos = {"temperature": 0, "logit_bias": {"258": 100.0}, "max_tokens": 9}
    short, long = (
        shared_server.post(path, **prompt, **eos, min_tokens=least, return_token_ids=True).json()
        for least in (0, 5)
    )
    assert short["usage"]["completion_tokens"] == 1 and long["usage"]["completion_tokens"] == 6
    choice = long["choices"][0]
    assert len(choice[ids]) == 6 and choice[ids][-1] == 258
    assert len(choice["prompt_token_ids"]) == long["usage"]["prompt_tokens"]
    streamed = shared_server.post(path, **prompt, **eos, min_tokens=5, return_token_ids=True, stream=True)
    if path == "/v1/completions":
        chunks = [chunk["choices"][0] for chunk in events(streamed)]
        assert [token for chunk in chunks for token in chunk[ids]] == choice[ids]
        assert chunks[0].pop("prompt_token_ids") == choice["prompt_token_ids"]
        assert not any("prompt_token_ids" in chunk for chunk in chunks)
    else:
        assert streamed.status_code == 400 and "streaming" in streamed.json()["message"]


def test_echoed_log_probs_begin_with_those_of_the_prompt(shared_server):
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    plain = shared_server.post("/v1/completions", **body).json()["choices"][0]["logprobs"]
    echoed = shared_server.post("/v1/completions", **body, echo=True).json()["choices"][0]["logprobs"]
    scored = shared_server.post(
        "/generate",
        text="hello",
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    ).json()["meta_info"]["input_token_logprobs"]
    assert echoed["tokens"] == [*"hello", *plain["tokens"]]
    assert echoed["token_logprobs"] == [value for value, _, _ in scored] + plain["token_logprobs"]
    assert echoed["top_logprobs"][0] is None and len(echoed["top_logprobs"]) == 9


def test_an_answer_bears_the_name_that_was_asked_for_and_its_versions(shared_server):
    answer = shared_server.post("/v1/completions", prompt="a", max_tokens=2, model="mine", ignore_eos=True)
    assert answer.json()["model"] == "mine"
    assert [s["end"] for s in answer.json()["metadata"]["weight_versions"]] == [2]


def test_models_are_listed_by_name(shared_server):
    (card,) = shared_server.client.get("/v1/models").json()["data"]
    assert shared_server.client.get(f"/v1/models/{card['id']}").json() == card
    assert shared_server.client.get("/v1/models/other").status_code == 404


def test_text_survives_tokenize_and_detokenize(shared_server):
    ids = shared_server.post("/tokenize", prompt="héllo").json()
    assert ids["count"] == len(ids["tokens"]) == 6
    assert shared_server.post("/detokenize", tokens=ids["tokens"]).json() == {"text": "héllo"}
    assert shared_server.post("/detokenize", tokens=[10**6]).status_code == 400
