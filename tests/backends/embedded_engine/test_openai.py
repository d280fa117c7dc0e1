"""The OpenAI endpoints."""

import json

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
    for field, value in (("tools", [{"type": "function"}]), ("response_format", {"type": "json_object"})):
        answer = shared_server.post("/v1/chat/completions", messages=CHAT, **{field: value})
        assert answer.status_code == 400 and field in answer.json()["message"]
    for wrong in ({"messages": []}, {"messages": "hi"}, {"messages": [{}]}, {}):
        assert shared_server.post("/v1/chat/completions", **wrong).status_code == 400
    assert shared_server.post("/v1/completions", prompt=[]).status_code == 400


def test_models_are_listed_by_name(shared_server):
    (card,) = shared_server.client.get("/v1/models").json()["data"]
    assert shared_server.client.get(f"/v1/models/{card['id']}").json() == card
    assert shared_server.client.get("/v1/models/other").status_code == 404


def test_text_survives_tokenize_and_detokenize(shared_server):
    ids = shared_server.post("/tokenize", prompt="héllo").json()
    assert ids["count"] == len(ids["tokens"]) == 6
    assert shared_server.post("/detokenize", tokens=ids["tokens"]).json() == {"text": "héllo"}
    assert shared_server.post("/detokenize", tokens=[10**6]).status_code == 400
