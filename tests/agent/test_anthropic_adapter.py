"""An agent that speaks Anthropic's API, a scripted engine behind it, and the samples that come of it."""

import json

import httpx
import pytest

from slime.agent.adapters import AnthropicAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample
from tests.engines.fake import EOS

PATH = "/v1/messages"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, {}]}}\n</tool_call>'
TOOLS = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
USER = {"role": "user", "content": "q"}
PARAMS = {"max_new_tokens": 100, "temperature": 1.0}


@pytest.fixture
def served(engine, tokenizer):
    """An adapter with a session ``s`` that is open, and a client of it."""
    url = f"{engine.url}/generate"
    adapter = AnthropicAdapter(
        tokenizer=tokenizer, sglang_url=url, tool_parser="hermes", reasoning_parser="qwen3"
    )
    server = run_app_in_thread(adapter.app, runner_kwargs={"handler_cancellation": True})
    adapter.open_session("s", sampling_defaults=PARAMS)
    headers = {"X-Api-Key": "s"}
    yield adapter, httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300, trust_env=False)
    server.stop(timeout=300)


async def ask(client, messages, **more):
    response = await client.post(PATH, json={"messages": messages, **more})
    assert response.status_code == 200, response.text
    return response


async def test_a_conversation_with_a_tool_is_one_sample_of_sampled_tokens(served, engine, tokenizer):
    adapter, client = served
    engine.answer = lambda conversation: "done" if "42" in conversation else f"<think>hm</think>I ask. {CALL}"
    options = {"system": [{"type": "text", "text": "be brief"}], "tools": TOOLS, "max_tokens": 90}
    first = (await ask(client, [USER], **options)).json()
    thought, text, call = first["content"]
    assert (first["role"], first["stop_reason"], thought["thinking"]) == ("assistant", "tool_use", "hm")
    assert text == {"type": "text", "text": "I ask."} and call["input"] == {"x": [1, {}]}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "42"}]}
    said = {"role": "assistant", "content": first["content"]}
    more = {"role": "user", "content": [result, {"type": "text", "text": "so?"}]}
    second = (await ask(client, [USER, said, more], **options)).json()
    assert second["content"] == [{"type": "text", "text": "done"}] and second["stop_reason"] == "end_turn"
    one, two = engine.seen("generate")
    assert one["sampling_params"] == {"max_new_tokens": 90, "temperature": 1.0}
    made = tokenizer(f"<think>hm</think>I ask. {CALL}{EOS}", add_special_tokens=False)["input_ids"]
    assert two["input_ids"][: len(one["input_ids"]) + len(made)] == one["input_ids"] + made
    function = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
    }
    chat = [{"role": "system", "content": "be brief"}, USER]
    wanted = tokenizer.apply_chat_template(chat, tools=[function], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(one["input_ids"]) == wanted
    (sample,) = await adapter.finish_session("s", base_sample=Sample(), reward=1.0)
    last = tokenizer("done" + EOS, add_special_tokens=False)["input_ids"]
    assert sum(sample.loss_mask) == len(made) + len(last) and sample.metadata["use_tool"]
    assert second["usage"] == {"input_tokens": len(two["input_ids"]), "output_tokens": len(last)}


async def test_events_say_the_same(served, engine):
    _, client = served
    engine.answer = lambda conversation: f"<think>hm</think>I ask. {CALL}"
    whole = (await ask(client, [USER], tools=TOOLS)).json()
    response = await ask(client, [USER], tools=TOOLS, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    pairs = [text.split("\n") for text in response.text.split("\n\n") if text]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [kind.removeprefix("event: ") for kind, _ in pairs] == [event["type"] for event in events]
    begun, *middle, ended, stopped = events
    blocks = []
    for event in middle:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            kind, delta = event["delta"]["type"], event["delta"]
            if kind == "input_json_delta":
                blocks[event["index"]]["input"] = json.loads(delta["partial_json"])
            else:
                blocks[event["index"]][kind.removesuffix("_delta")] += delta[kind.removesuffix("_delta")]
    for block in (*blocks, *whole["content"]):
        block.pop("id", None)
    assert blocks == whole["content"] and len(blocks) == 3
    assert begun["message"]["usage"]["output_tokens"] == 0
    assert begun["message"]["content"] == [] and begun["message"]["role"] == "assistant"
    assert ended["delta"]["stop_reason"] == "tool_use" and stopped == {"type": "message_stop"}
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0


async def test_reminders_of_the_system_are_words_of_the_user(served, engine, tokenizer):
    _, client = served
    await ask(
        client, [USER, {"role": "system", "content": "mind"}], tools=TOOLS, tool_choice={"type": "none"}
    )
    chat = [USER, {"role": "user", "content": "<system-reminder>\nmind\n</system-reminder>"}]
    wanted = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(engine.seen("generate")[0]["input_ids"]) == wanted


async def test_a_call_that_must_come_is_a_grammar_for_the_engine(served, engine):
    _, client = served
    for choice in ({"type": "any"}, {"type": "tool", "name": TOOLS[0]["name"]}):
        await ask(client, [USER], tools=TOOLS, tool_choice=choice)
        tag = json.loads(engine.seen("generate")[-1]["sampling_params"]["structural_tag"])
        assert tag["at_least_one"] and TOOLS[0]["name"] in tag["structures"][0]["begin"]


async def test_an_answer_that_may_call_once_ends_with_its_call(served, engine):
    _, client = served
    engine.answer = lambda conversation: f"<think>hm</think>{CALL}{CALL}"
    for once in (False, True):
        choice = {"type": "auto", "disable_parallel_tool_use": once}
        answer = (await ask(client, [USER], tools=TOOLS, tool_choice=choice)).json()
        kinds = [block["type"] for block in answer["content"]]
        assert kinds == ["thinking", *["tool_use"] * (1 if once else 2)]
        assert answer["stop_reason"] == "tool_use"


async def test_results_that_are_errors_and_calls_that_cannot_be_read_are_counted(served, engine):
    adapter, client = served
    engine.answer = lambda conversation: (
        "<tool_call>{no json}</tool_call>" if "nono" in conversation else CALL
    )
    messages = [USER]
    for result in ("fine", "bad", "nono"):
        said = (await ask(client, messages, tools=TOOLS)).json()["content"]
        block = {"type": "tool_result", "tool_use_id": said[0]["id"], "content": result}
        block |= {"is_error": result == "bad"}
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [block]}]
    await ask(client, messages, tools=TOOLS)
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert sample.metadata["round_number"] == 4 and sample.metadata["tool_errors"] == 2


async def test_a_limit_of_tokens_is_told(served, engine):
    _, client = served
    engine.answer = lambda conversation: "a long answer"
    assert (await ask(client, [USER], max_tokens=2)).json()["stop_reason"] == "max_tokens"


async def test_brackets_without_end_are_no_request(served):
    _, client = served
    response = await client.post(PATH, content="[" * 100_000, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and "the body" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        *({}, [], {"messages": []}, {"messages": ["x"]}, {"messages": [{"role": "tool", "content": "x"}]}),
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [USER], "tool_choice": {"type": "any"}},
        {"messages": [USER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        *(
            {"messages": [USER], "max_tokens": most, "stream": stream}
            for most in (0, 1.5, True)
            for stream in (0, 1)
        ),
        {"messages": [USER], "tools": [{"input_schema": {}}]},
        {"messages": [USER], "tools": [{"name": ["f"], "input_schema": {}}]},
        {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ],
)
async def test_what_is_no_request_is_refused(served, engine, body):
    _, client = served
    response = await client.post(PATH, json=body)
    error = response.json()
    assert response.status_code == 400 and error["type"] == "error" and error["error"]["message"]
    assert error["error"]["type"] == "invalid_request_error" and not engine.seen("generate")


async def test_a_session_must_be_named_and_open(served):
    _, client = served
    del client.headers["X-Api-Key"]
    assert (await client.post(PATH, json={"messages": [USER]})).status_code == 401
    client.headers["Authorization"] = "Bearer t"
    assert (await client.post(PATH, json={"messages": [USER]})).status_code == 401
    client.headers["Authorization"] = "Bearer s"
    await ask(client, [USER])
    counted = await client.post(f"{PATH}/count_tokens", json={"messages": [USER]})
    assert counted.json()["input_tokens"] > 0
