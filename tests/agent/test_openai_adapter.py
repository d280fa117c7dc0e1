"""An agent that speaks OpenAI's API, a scripted engine behind it, and the samples that come of it."""

import asyncio
import itertools
import json
import threading
from copy import copy

import httpx
import pytest

from slime.agent.adapters import OpenAIAdapter
from slime.agent.adapters.common import Refused, Session, call_sglang_generate
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.http_utils import asking_adapter
from slime.utils.types import Sample
from slime.utils.weight_clock import clock
from tests.engines.fake import EOS, NEVER

PATH = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
STRICT = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
USER = {"role": "user", "content": "q"}
PARAMS = {"max_new_tokens": 100, "temperature": 1.0, "stop": None}


@pytest.fixture
def serve(engine, tokenizer):
    """An adapter with these options, and a client of a session ``s`` that is open."""
    servers = []

    def make(session=True, **options):
        options = {"tokenizer": tokenizer, "tool_parser": "hermes"} | options
        adapter = OpenAIAdapter(sglang_url=f"{engine.url}/generate", **options)
        servers.append(run_app_in_thread(adapter.app, runner_kwargs={"handler_cancellation": True}))
        if session:
            adapter.open_session("s", sampling_defaults=PARAMS)
        headers = {"Authorization": "Bearer s"} if session else {}
        url = servers[-1].url
        return adapter, httpx.AsyncClient(base_url=url, headers=headers, timeout=300, trust_env=False)

    yield make
    for server in servers:
        server.stop(timeout=300)
        server.stop()


async def ask(client, messages, **more):
    response = await client.post(PATH, json={"model": "m", "messages": messages, **more})
    assert response.status_code == 200, response.text
    return response.json()


async def test_turns_are_asked_of_the_adapter_that_was_asked_where_the_session_was_opened(serve, engine):
    """They are taken elsewhere: in the thread of a server."""
    adapter, client = serve()
    await ask(client, [USER])
    adapter.drop_session("s")
    with asking_adapter("mine"):
        adapter.open_session("s", sampling_defaults=PARAMS)
    await ask(client, [USER])
    plain, named = engine.seen("generate")
    assert named == {**plain, "lora_path": "mine"} and "lora_path" not in plain


async def test_a_conversation_with_a_tool_is_one_sample_of_sampled_tokens(serve, engine, tokenizer):
    adapter, client = serve()
    engine.answer = lambda conversation: "done" if "42" in conversation else f"I ask. {CALL}"
    first = await ask(client, [USER], tools=TOOLS)
    (choice,) = first["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "I ask."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": 1}
    answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
    second = await ask(client, [USER, message, answer], tools=TOOLS)
    assert second["choices"][0]["message"]["content"] == "done"
    assert second["choices"][0]["finish_reason"] == "stop"
    one, two = engine.seen("generate")
    made = tokenizer(f"I ask. {CALL}{EOS}", add_special_tokens=False)["input_ids"]
    # Not what the template makes of the message, which has lost where its text stood.
    assert two["input_ids"][: len(one["input_ids"]) + len(made)] == one["input_ids"] + made
    assert one["sampling_params"] == {"max_new_tokens": 100, "temperature": 1.0}
    (sample,) = await adapter.finish_session("s", base_sample=Sample(index=3), reward=1.0)
    assert sample.tokens[: len(two["input_ids"])] == two["input_ids"]
    last = tokenizer("done" + EOS, add_special_tokens=False)["input_ids"]
    trained = [
        t for t, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if mask
    ]
    assert trained == made + last and sample.metadata == {"round_number": 2, "use_tool": True}
    assert sample.reward == 1.0 and sample.weight_versions == ["1", "1"]
    assert second["usage"]["prompt_tokens"] == len(two["input_ids"])
    assert await adapter.finish_session("s", base_sample=Sample()) == []


async def test_rendered_as_text_it_reads_as_the_template_has_it(serve, engine, tokenizer):
    """The turns between the model's are the template's, to the letter."""
    _, client = serve()
    message = (await ask(client, [USER]))["choices"][0]["message"]
    messages = [USER, message, {"role": "user", "content": "and?"}]
    await ask(client, messages)
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(engine.seen("generate")[1]["input_ids"]) == wanted


async def test_a_template_that_does_not_end_the_last_message_repeats_no_answer(serve, engine, tokenizer):
    """That of Qwen1.5: the last end in what it makes of a conversation is that of the question."""
    own = copy(tokenizer)
    own.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if add_generation_prompt or not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    adapter, client = serve(tokenizer=own)
    message = (await ask(client, [USER]))["choices"][0]["message"]
    messages = [USER, message, {"role": "user", "content": "and?"}]
    await ask(client, messages)
    wanted = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(engine.seen("generate")[1]["input_ids"]) == wanted
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert sum(sample.loss_mask) == 2 * len(tokenizer("ok" + EOS, add_special_tokens=False)["input_ids"])


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("parser", [None, "qwen3"])
async def test_a_template_that_forgets_thoughts_costs_no_turn_its_training(serve, engine, tokenizer, parser):
    """That of Qwen3; agents seldom send back what an answer has beside its text."""
    own = copy(tokenizer)
    own.chat_template = THINKING
    adapter, client = serve(tokenizer=own, reasoning_parser=parser)
    engine.answer = lambda conversation: "<think>hm</think>ok"
    messages = [USER]
    for _ in range(2):
        message = (await ask(client, messages))["choices"][0]["message"]
        message.pop("reasoning_content", None)
        messages += [message, {"role": "user", "content": "and?"}]
    await ask(client, messages)
    asked = "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    wanted = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n" + f"<think>hm</think>ok{asked}" * 2
    assert tokenizer.decode(engine.seen("generate")[2]["input_ids"]) == wanted
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    answer = tokenizer("<think>hm</think>ok" + EOS, add_special_tokens=False)["input_ids"]
    assert sum(sample.loss_mask) == 3 * len(answer)


async def test_calls_may_stand_in_the_place_of_text(serve, engine, tokenizer):
    """As in the template of Llama 3.1."""
    own = copy(tokenizer)
    own.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    _, client = serve(tokenizer=own)
    engine.answer = lambda conversation: "done" if "42" in conversation else CALL
    message = (await ask(client, [USER], tools=TOOLS))["choices"][0]["message"]
    answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
    await ask(client, [USER, message, answer], tools=TOOLS)
    tail = f"{CALL}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(engine.seen("generate")[1]["input_ids"]).endswith(tail)


async def test_another_conversation_is_another_sample(serve):
    adapter, client = serve()
    await ask(client, [USER])
    await ask(client, [{"role": "user", "content": [{"type": "text", "text": "help"}]}])
    made = await adapter.finish_session("s", base_sample=Sample(index=3))
    assert len(made) == 2 and {sample.rollout_id for sample in made} == {3}


async def test_a_request_may_ask_for_less_and_not_for_another_temperature(serve, engine):
    adapter, client = serve()
    engine.answer = lambda conversation: "a long answer"
    done = await ask(client, [USER], temperature=0.1, top_p=0.5, stop=["x"], max_tokens=2)
    (body,) = engine.seen("generate")
    assert body["sampling_params"] == {"max_new_tokens": 2, "temperature": 1.0, "top_p": 0.5, "stop": ["x"]}
    assert done["choices"][0]["finish_reason"] == "length"
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert sample.status is Sample.Status.TRUNCATED and sample.metadata["truncated"]


async def test_events_say_the_same(serve, engine):
    adapter, client = serve()
    engine.answer = lambda conversation: CALL
    options = {"stream": True, "stream_options": {"include_usage": True}, "tools": TOOLS}
    response = await client.post(PATH, json={"messages": [USER], **options})
    *lines, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.headers["content-type"].startswith("text/event-stream") and last == "[DONE]"
    said, ended, usage = map(json.loads, lines)
    assert (
        said["choices"][0]["delta"]["role"] == "assistant" and "content" not in ended["choices"][0]["delta"]
    )
    assert said["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert ended["choices"][0]["finish_reason"] == "tool_calls" and usage["usage"]["completion_tokens"] > 0
    assert len(await adapter.finish_session("s", base_sample=Sample())) == 1


async def test_events_come_while_the_engine_writes(serve, engine):
    adapter, client = serve()
    seen, numbers = threading.Event(), itertools.count()
    engine.answer = lambda conversation: f"I ask a thing. {CALL}"

    def delay(conversation):
        number = next(numbers)
        return lambda: number < 3 or seen.is_set()

    engine.delay = delay
    options = {"stream": True, "tools": TOOLS}
    text, kinds = "", []
    body = {"messages": [USER], **options}
    async with asyncio.timeout(60), client.stream("POST", PATH, json=body) as response:
        async for line in response.aiter_lines():
            if not line or line.endswith("[DONE]"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            seen.set()  # until now the engine has stood at its third token
            text += choice["delta"].get("content") or ""
            kinds.append(sorted(choice["delta"]))
    assert text == "I ask a thing." and len(kinds) > 4 and kinds[-2:] == [["tool_calls"], []]
    answered = {"role": "assistant", "content": text}
    await ask(client, [USER, answered, {"role": "user", "content": "and?"}], tools=TOOLS)
    assert len(await adapter.finish_session("s", base_sample=Sample())) >= 1


async def test_a_stream_says_what_the_whole_answer_would(serve, engine):
    """Whatever is text, call, thought or only looks like one."""
    _, client = serve(reasoning_parser="qwen3")
    for answer in (
        *("plain", "  spaced out  ", "a < b <tool", f"<think>hm</think>\n\nI ask. {CALL}", CALL, ""),
        *(
            "<think>never closed",
            "<tool_call>{no json}</tool_call> so",
            "héé 你好 🎈 ok",
            f"x {CALL} y {CALL}",
        ),
    ):
        engine.answer = lambda conversation, answer=answer: answer
        whole = (await ask(client, [USER], tools=TOOLS))["choices"][0]
        response = await client.post(PATH, json={"messages": [USER], "tools": TOOLS, "stream": True})
        events = [
            json.loads(line[6:]) for line in response.text.split("\n\n") if line and "[DONE]" not in line
        ]
        choices = [event["choices"][0] for event in events]
        said = {
            name: "".join(choice["delta"].get(name) or "" for choice in choices)
            for name in ("content", "reasoning_content")
        }
        calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert said["content"] == whole["message"]["content"], answer
        assert said["reasoning_content"] == whole["message"].get("reasoning_content", ""), answer
        assert calls == [call["function"] for call in whole["message"].get("tool_calls", ())], answer
        assert choices[-1]["finish_reason"] == whole["finish_reason"]


async def test_an_engine_that_gives_up_in_the_middle_is_told_in_the_stream(serve, engine):
    _, client = serve()
    engine.answer = lambda conversation: "a long answer of words"
    engine.breaks_after, engine.says_why = 2, {"message": "not this", "code": 404}
    response = await client.post(PATH, json={"messages": [USER], "stream": True})
    assert response.status_code == 200
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["type"] == "server_error"
    engine.answers["generate"] = {}
    engine.breaks_after = 0
    assert (await client.post(PATH, json={"messages": []})).status_code == 400


@pytest.mark.parametrize("event", [5, None, [], {}, {"text": "a"}, {"meta_info": 3}])
async def test_rubbish_in_a_stream_is_refused_by_its_engine_and_value(serve, engine, event):
    _, client = serve()

    async def rubbish(body):
        yield f"data: {json.dumps(event)}\n\n"

    engine._events = rubbish
    response = await client.post(PATH, json={"messages": [USER], "stream": True})
    assert response.status_code == 502 and f"found {event!r} in its stream" in response.text


BREAKS = {
    "the connection": None,
    "an error": {"message": "the scheduler is gone", "code": 503},
    "an error with a name": {"message": "the worker is gone", "code": "worker_gone"},
    "text": "gone",
}


@pytest.mark.parametrize("why", BREAKS)
async def test_a_stream_that_breaks_goes_on_with_the_rest_and_its_agent_sees_nothing_of_it(
    serve, engine, tokenizer, running_clock, why
):
    adapter, client = serve()
    engine.answer = lambda conversation: "a long answer of words"
    engine.breaks_after, engine.says_why = 3, BREAKS[why]
    response = await client.post(PATH, json={"messages": [USER], "stream": True, "max_tokens": 99})
    assert said_in(response, stream=True) == "a long answer of words"
    first, second = engine.seen("generate")
    made = tokenizer("a long answer of words" + EOS, add_special_tokens=False)["input_ids"]
    assert second["input_ids"] == first["input_ids"] + made[:3]
    assert second["sampling_params"]["max_new_tokens"] == 96
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert (sample.tokens[-len(made) :], sample.status) == (made, Sample.Status.COMPLETED)
    assert sample.version_spans == [("1", len(made))]


async def test_a_stream_that_breaks_before_its_first_token_is_asked_for_anew(
    serve, engine, monkeypatch, running_clock
):
    monkeypatch.setattr("slime.agent.adapters.engine.RETRY_PAUSE_S", 0.0)
    adapter, client = serve()
    engine.breaks_after = 0
    assert said_in(await client.post(PATH, json={"messages": [USER], "stream": True}), stream=True) == "ok"
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert sample.status is Sample.Status.COMPLETED


async def test_streams_that_break_again_and_again_are_given_up(serve, engine, monkeypatch):
    monkeypatch.setattr("slime.agent.adapters.engine.RETRY_PAUSE_S", 0.0)
    _, client = serve()
    events_of = engine._events

    async def breaking(body):
        engine.breaks_after = 0
        async for event in events_of(body):
            yield event

    engine._events = breaking
    response = await client.post(PATH, json={"messages": [USER], "stream": True})
    assert response.status_code == 502 and "broke off 21 times in a row" in response.text
    assert len(engine.seen("generate")) == 21


async def test_log_probs_are_those_of_the_engine(serve, engine, tokenizer):
    _, client = serve()
    done = await ask(client, [USER], logprobs=True)
    content = done["choices"][0]["logprobs"]["content"]
    assert [item["logprob"] for item in content] == [-0.25] * len(content)
    assert "".join(item["token"] for item in content) == "ok" + EOS
    await client.post(PATH, json={"messages": [USER], "logprobs": True, "top_logprobs": 3})
    assert engine.seen("generate")[1]["top_logprobs_num"] == 3
    assert "logprobs" not in (await ask(client, [USER]))["choices"][0]
    response = await client.post(PATH, json={"messages": [USER], "logprobs": True, "stream": True})
    streamed = [json.loads(line[6:]) for line in response.text.split("\n\n") if '"logprobs"' in line]
    assert streamed[0]["choices"][0]["logprobs"]["content"] == content


async def test_a_tool_without_a_type_is_a_function_as_sglang_has_it(serve, engine):
    _, client = serve()
    untyped = [{"function": TOOLS[0]["function"]}]
    for tools in (TOOLS, untyped):
        await ask(client, [USER], tools=tools)
        await ask(client, [USER], tools=tools, tool_choice="required")
    plain, forced, *others = [
        (body["input_ids"], body["sampling_params"].get("structural_tag")) for body in engine.seen("generate")
    ]
    assert others == [plain, forced] and forced[1]


async def test_calls_of_strict_tools_follow_their_schemas_or_are_refused(serve, engine):
    _, client = serve()
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    await ask(client, [USER], tools=[*STRICT, other])
    tag = json.loads(engine.seen("generate")[0]["sampling_params"]["structural_tag"])
    assert not tag["at_least_one"]
    assert [structure["schema"] for structure in tag["structures"]] == [{"type": "object"}, {}]
    for unbound in ({"tools": [other]}, {"tools": STRICT, "tool_choice": "none"}):
        await ask(client, [USER], **unbound)
        assert "structural_tag" not in engine.seen("generate")[-1]["sampling_params"]
    _, client = serve(tool_parser=None)
    response = await client.post(PATH, json={"messages": [USER], "tools": STRICT})
    assert response.status_code == 400 and "strict" in response.json()["error"]["message"]
    assert len(engine.seen("generate")) == 3


async def test_a_seed_and_a_format_reach_the_engine(serve, engine):
    _, client = serve()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for wanted, sent in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type": "object"}'),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, json.dumps(schema)),
    ):
        await ask(client, [USER], response_format=wanted, seed=7)
        params = engine.seen("generate")[-1]["sampling_params"]
        assert params.get("json_schema") == sent and params["sampling_seed"] == 7


async def test_a_call_that_must_come_is_a_grammar_for_the_engine(serve, engine):
    _, client = serve()
    named = {"type": "function", "function": {"name": TOOLS[0]["function"]["name"]}}
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    for choice, count in (("required", 2), (named, 1)):
        await ask(client, [USER], tools=[*TOOLS, other], tool_choice=choice)
        tag = json.loads(engine.seen("generate")[-1]["sampling_params"]["structural_tag"])
        assert tag["at_least_one"] and len(tag["structures"]) == count
        assert named["function"]["name"] in tag["structures"][0]["begin"]
        assert "require_reasoning" not in engine.seen("generate")[-1]


async def test_an_answer_that_may_call_once_ends_with_its_call(serve, engine, tokenizer):
    adapter, client = serve()
    engine.answer = lambda conversation: "done" if "42" in conversation else f"I ask. {CALL}{CALL}"
    both = (await ask(client, [USER], tools=TOOLS))["choices"][0]["message"]
    assert len(both["tool_calls"]) == 2
    adapter.open_session("once", sampling_defaults=PARAMS)
    client.headers["Authorization"] = "Bearer once"
    once = {"tools": TOOLS, "parallel_tool_calls": False, "stop": "never"}
    message = (await ask(client, [USER], **once))["choices"][0]["message"]
    (call,) = message["tool_calls"]
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    second = await ask(client, [USER, message, answer], **once)
    assert second["choices"][0]["message"]["content"] == "done"
    _, one, two = engine.seen("generate")
    assert one["sampling_params"]["stop"] == ["never", "</tool_call>"]
    made = tokenizer(f"I ask. {CALL}", add_special_tokens=False)["input_ids"]
    assert two["input_ids"][: len(one["input_ids"]) + len(made)] == one["input_ids"] + made
    assert tokenizer.decode(two["input_ids"]).count(CALL) == 1
    (sample,) = await adapter.finish_session("once", base_sample=Sample())
    last = tokenizer("done" + EOS, add_special_tokens=False)["input_ids"]
    assert sum(sample.loss_mask) == len(made) + len(last)
    client.headers["Authorization"] = "Bearer s"
    await ask(client, [USER], parallel_tool_calls=False)
    assert "stop" not in engine.seen("generate")[-1]["sampling_params"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_a_call_that_is_none_ends_nothing(serve, engine, tokenizer, stream):
    """Thoughts may speak of calls, and text may have the end of one that never began."""
    adapter, client = serve(reasoning_parser="qwen3")
    whole = f"<think>{CALL} or </tool_call>?</think>So </tool_call>: {CALL}"
    engine.answer = lambda conversation: whole + CALL
    once = {"tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
    response = await client.post(PATH, json={"messages": [USER], **once})
    assert response.status_code == 200 and response.text.count('"name": "f"') == 1
    asked = engine.seen("generate")
    assert len(asked) == 4 and asked[3]["sampling_params"]["max_new_tokens"] < 100
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    made = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert sample.tokens[-sample.response_length :] == made and sample.status is Sample.Status.COMPLETED


async def test_thoughts_that_never_end_call_nothing(serve, engine):
    """Not even where the template has opened them, and they fill all the room there is."""
    adapter, client = serve(reasoning_parser="qwen3")
    engine.answer = lambda conversation: f"<think>{CALL}, {CALL} and so on without an end, {CALL}"
    adapter.open_session("short", sampling_defaults={"max_new_tokens": len(CALL)})
    client.headers["Authorization"] = "Bearer short"
    done = (await ask(client, [USER], tools=TOOLS, parallel_tool_calls=False))["choices"][0]
    assert done["finish_reason"] == "length" and "tool_calls" not in done["message"]


async def test_a_grammar_waits_for_the_end_of_the_reasoning(serve, engine):
    _, client = serve(reasoning_parser="qwen3")
    await ask(client, [USER], response_format={"type": "json_object"})
    assert engine.seen("generate")[-1]["require_reasoning"] is True
    await ask(client, [USER])
    assert "require_reasoning" not in engine.seen("generate")[-1]


async def test_a_format_that_the_engine_does_not_know_is_refused(serve, engine):
    from fastapi.responses import JSONResponse

    _, client = serve()
    engine.answers["generate"] = JSONResponse({"error": "no grammars here"}, status_code=400)
    body = {"messages": [USER], "response_format": {"type": "json_object"}}
    for stream in (False, True):
        response = await client.post(PATH, json={**body, "stream": stream})
        assert (
            response.status_code == 400 and "json_schema" in response.text and "no grammars" in response.text
        )


async def test_stop_strings_that_are_none_are_refused_by_name(serve, engine):
    _, client = serve()
    for wrong in ("", [""], ["x", ""], 5, {"x": 1}, ["x", 5], [None], True):
        for stream in (False, True):
            response = await client.post(PATH, json={"messages": [USER], "stop": wrong, "stream": stream})
            assert response.status_code == 400 and response.json()["error"]["message"].startswith("stop")
    assert not engine.seen("generate")


async def test_brackets_without_end_are_no_request(serve, engine):
    _, client = serve()
    deep = "[" * 100_000
    call = {**USER, "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    for content, named in ((deep, "the body"), (json.dumps({"messages": [call]}), "arguments")):
        response = await client.post(PATH, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400 and named in response.json()["error"]["message"]
    assert not engine.seen("generate")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"messages": [USER], "tool_choice": "required"}, 400),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": "maybe"}, 400),
        (
            {
                **{"messages": [USER], "tools": TOOLS, "tool_choice": "required"},
                "response_format": {"type": "json_object"},
            },
            400,
        ),
        ({"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, 400),
        ({"messages": [USER], "tools": STRICT, "response_format": {"type": "json_object"}}, 400),
        ({"messages": [USER], "tools": STRICT, "tool_choice": "auto", "response_format": FORMAT}, 400),
        ({"messages": [USER], "tools": [{**STRICT[0], "function": {"name": "f", "strict": "yes"}}]}, 400),
        *(
            ({"messages": [USER], "tools": [*STRICT, {**STRICT[0], "function": wrong}], **choice}, 400)
            for wrong in ({"name": "g", "strict": "yes"}, {"name": 5})
            for choice in ({}, {"tool_choice": "required"})
        ),
        ({"messages": [USER], "logit_bias": {"5": 1}}, 400),
        ({"messages": [USER], "response_format": {"type": "regex"}}, 400),
        ({"messages": [USER], "response_format": {"type": "json_schema"}}, 400),
        ({"messages": [USER], "top_logprobs": 3}, 400),
        ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, 400),
        ({"messages": [USER], "logprobs": True, "top_logprobs": True}, 400),
        ({"messages": [USER], "n": 2}, 400),
        *(({"messages": [USER, {**USER, "role": wrong}]}, 400) for wrong in ("wizard", 5, ["user"])),
        *(
            ({"messages": [{**USER, "content": wrong}]}, 400)
            for wrong in ({"type": "text", "text": "q"}, {}, 5)
        ),
        ({"messages": [USER], "tools": TOOLS, "parallel_tool_calls": "no"}, 400),
        ({"messages": []}, 400),
        ({}, 400),
        ({"messages": ["x"]}, 400),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            400,
        ),
        ([], 400),
        ({"messages": [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, 400),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"parameters": {}}}]}, 400),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": ["f"]}}]}, 400),
        ({"messages": [USER], "tools": [{"type": "function"}]}, 400),
        ({"messages": [USER], "tools": ["f"]}, 400),
        *(
            ({"messages": [USER], "max_tokens": most, "stream": stream}, 400)
            for most in (0, 1.5, True, "x")
            for stream in (False, True)
        ),
        ({"messages": [USER], "stream": True, "stream_options": ["include_usage"]}, 400),
    ],
)
async def test_what_is_no_request_is_refused(serve, engine, body, status):
    _, client = serve()
    response = await client.post(PATH, json=body)
    assert response.status_code == status and response.json()["error"]["message"]
    assert not engine.seen("generate")


async def test_a_session_must_be_named_and_open(serve):
    adapter, client = serve(session=False)
    assert (await client.post(PATH, json={"messages": [USER]})).status_code == 401
    assert (await client.post(PATH, json={"messages": [USER], "user": "s"})).status_code == 401
    adapter.open_session("s", sampling_defaults=PARAMS)
    with pytest.raises(ValueError, match="'s' is open already"):
        adapter.open_session("s")
    await ask(client, [USER], user="s")
    await ask(client, [USER], metadata={"session_id": "s"}, user="t")
    await adapter.finish_session("s", base_sample=Sample())
    assert (await client.post(PATH, json={"messages": [USER], "user": "s"})).status_code == 503
    assert (await client.get("/healthz")).status_code == (await client.get("/v1/models")).status_code == 200


async def test_turns_and_context_are_bounded(serve, engine):
    adapter, client = serve(max_turns_per_sid=2)
    for expected in (200, 200, 429):
        assert (await client.post(PATH, json={"messages": [USER]})).status_code == expected
    adapter.open_session(
        "t", sampling_defaults=PARAMS, max_context_tokens=len(engine.seen("generate")[0]["input_ids"]) + 2
    )
    client.headers["Authorization"] = "Bearer t"
    engine.answer = lambda conversation: "a long answer"
    message = (await ask(client, [USER]))["choices"][0]["message"]
    response = await client.post(PATH, json={"messages": [USER, message, USER]})
    assert response.status_code == 400 and "maximum context length" in response.text
    (sample,) = await adapter.finish_session("t", base_sample=Sample())
    assert sample.response_length == 2


async def test_an_abort_gives_the_session_up(serve, engine):
    adapter, client = serve()
    await ask(client, [USER])
    at_work = threading.Event()

    def delay(conversation):
        at_work.set()
        return NEVER

    engine.delay = delay
    task = asyncio.create_task(client.post(PATH, json={"messages": [USER]}))
    await asyncio.to_thread(at_work.wait, 300)  # an abort before that would not be one of this request
    engine.aborts += 1
    assert (await task).status_code == 503
    base = Sample(index=1)
    assert await adapter.finish_session("s", base_sample=base) == [base]
    assert base.status is Sample.Status.ABORTED and not base.tokens


class Interrupted:
    """An engine that stands still after two tokens of each request, until it is aborted."""

    def __init__(self, engine):
        self.engine, self.left, self.at_work = engine, 2, threading.Event()
        engine.delay = lambda conversation: self.may_come

    def may_come(self):
        if self.left == 0:
            self.at_work.set()
            return False
        self.left -= 1
        return True

    async def update(self, version):
        """New weights, as the trainer brings them; ``version`` is also how often that was done."""
        await asyncio.to_thread(self.at_work.wait, 300)
        clock.begin_update()
        self.engine.weight_version = str(version)
        self.engine.aborts += 1
        await asyncio.sleep(0.05)
        assert len(self.engine.seen("generate")) == version - 1  # nobody asks before it is over
        self.left = 2
        self.at_work.clear()
        clock.end_update(version)


@pytest.fixture
def running_clock():
    clock.__init__()
    clock.end_update(1)
    yield
    clock.__init__()


def said_in(response, stream):
    """The text of an answer."""
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()["choices"][0]["message"]["content"]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_goes_on_over_updates_of_the_weights(serve, engine, tokenizer, running_clock, stream):
    adapter, client = serve()
    engine.answer = lambda conversation: "a long answer"
    made = tokenizer("a long answer" + EOS, add_special_tokens=False)["input_ids"]
    updates = Interrupted(engine)
    task = asyncio.create_task(client.post(PATH, json={"messages": [USER], "stream": stream}))
    await updates.update(2)
    await updates.update(3)
    await asyncio.to_thread(updates.at_work.wait, 300)
    updates.left = len(made)
    assert said_in(await task, stream) == "a long answer"
    first, *others = engine.seen("generate")
    start = len(first["input_ids"])
    for body in others:
        tokens = body["input_ids"][start:]
        assert tokens == made[: len(tokens)] and tokens
        assert body["sampling_params"]["max_new_tokens"] == 100 - len(tokens)
    (sample,) = await adapter.finish_session("s", base_sample=Sample(), reward=1.0)
    assert sample.tokens[start:] == made and sample.status is Sample.Status.COMPLETED
    assert sample.version_spans == [("1", 2), ("2", 2), ("3", len(made) - 4)]
    assert sample.weight_versions == ["3"] and sample.rollout_log_probs == [-0.25] * len(made)
    again = sum(len(body["input_ids"]) - 2 for body in others)  # one is in the cache, one is new
    assert sample.prefix_cache_info.recomputed_tokens == again


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_with_a_grammar_begins_anew_after_an_update(
    serve, engine, tokenizer, running_clock, stream
):
    adapter, client = serve()
    engine.answer = lambda conversation: '{"a": 1}'
    made = tokenizer('{"a": 1}' + EOS, add_special_tokens=False)["input_ids"]
    updates = Interrupted(engine)
    body = {"messages": [USER], "response_format": {"type": "json_object"}, "stream": stream}
    task = asyncio.create_task(client.post(PATH, json=body))
    await updates.update(2)
    updates.left = len(made)
    assert said_in(await task, stream) == '{"a": 1}'
    one, two = engine.seen("generate")
    assert one["input_ids"] == two["input_ids"] and one["sampling_params"] == two["sampling_params"]
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert sample.version_spans == [("2", len(made))]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("whose", ["request", "session"])
async def test_an_agent_goes_on_with_an_answer_whose_stop_string_it_was_not_told(
    serve, engine, tokenizer, stream, whose
):
    adapter, client = serve(session=False)
    of_session = {"stop": ["\nObservation:"]} if whose == "session" else {}
    adapter.open_session("t", sampling_defaults={"max_new_tokens": 100, **of_session})
    client.headers["Authorization"] = "Bearer t"
    engine.answer = lambda conversation: "done" if "42" in conversation else "Look it up.\nObservation: 7"
    body = {"stream": stream, **({"stop": "\nObservation:"} if whose == "request" else {})}
    told = said_in(await client.post(PATH, json={"messages": [USER], **body}), stream)
    assert told == "Look it up."
    messages = [USER, {"role": "assistant", "content": told}, {"role": "user", "content": "42"}]
    assert said_in(await client.post(PATH, json={"messages": messages, **body}), stream) == "done"
    (sample,) = await adapter.finish_session("t", base_sample=Sample())
    made = tokenizer("Look it up.\nObservation:", add_special_tokens=False)["input_ids"]
    last = tokenizer("done" + EOS, add_special_tokens=False)["input_ids"]
    ids = sample.tokens[-sample.response_length :]
    assert [t for t, mask in zip(ids, sample.loss_mask, strict=True) if mask] == made + last
    assert sample.metadata["round_number"] == 2
    wanted = tokenizer.decode(made) + EOS + "\n<|im_start|>user"
    assert wanted in tokenizer.decode(sample.tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_that_an_update_cuts_in_two_ends_the_answer(
    serve, engine, tokenizer, running_clock, stream
):
    adapter, client = serve()
    engine.answer = lambda conversation: "aEND and more"
    made = tokenizer("aEND", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(made[:2]) == "aE"
    updates = Interrupted(engine)
    body = {"messages": [USER], "stop": ["END"], "stream": stream}
    task = asyncio.create_task(client.post(PATH, json=body))
    await updates.update(2)
    updates.left = 100
    assert said_in(await task, stream) == "a"
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert sample.tokens[-len(made) :] == made and sample.status is Sample.Status.COMPLETED
    assert sample.version_spans == [("1", 2), ("2", len(made) - 2)]


async def test_one_of_one_s_own_finds_it_too(serve, engine, tokenizer, running_clock):
    adapter, _ = serve()
    engine.answer = lambda conversation: "aEND and more"
    made = tokenizer("aEND", add_special_tokens=False)["input_ids"]
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    updates, prompt = Interrupted(engine), tokenizer(text)["input_ids"]
    body = {"max_tokens": 100, "stop": ["END"]}
    task = asyncio.create_task(call_sglang_generate(prompt, Session({}, 500), body, adapter=adapter))
    await updates.update(2)
    updates.left = 100
    turn = await task
    assert (turn.output_ids, turn.finish_reason) == (made, "stop")


@pytest.mark.parametrize("ended", ["finished", "dropped"])
async def test_a_turn_that_comes_too_late_is_not_recorded(serve, engine, ended):
    adapter, client = serve()
    await ask(client, [USER])
    answer, may_go_on = engine.generate, threading.Event()

    async def held(body):
        while not may_go_on.is_set():
            await asyncio.sleep(0.01)
        return await answer(body)

    engine.generate = held
    task = asyncio.create_task(client.post(PATH, json={"messages": [USER]}))
    while len(engine.seen("generate")) < 2:
        await asyncio.sleep(0.01)
    if ended == "finished":
        made = await adapter.finish_session("s", base_sample=Sample(), wait_timeout=0.05)
        assert len(made) == 1
    else:
        adapter.drop_session("s")
    may_go_on.set()
    await task
    assert not adapter.trajectories.has_session("s")


async def test_a_turn_under_way_is_part_of_the_session_that_is_finished_meanwhile(serve, engine):
    adapter, client = serve()
    answer, may_go_on = engine.generate, threading.Event()

    async def held(body):
        while not may_go_on.is_set():
            await asyncio.sleep(0.01)
        return await answer(body)

    engine.generate = held
    turn = asyncio.create_task(client.post(PATH, json={"messages": [USER]}))
    while not engine.seen("generate"):
        await asyncio.sleep(0.01)
    finished = asyncio.create_task(adapter.finish_session("s", base_sample=Sample(), wait_timeout=300))
    await asyncio.sleep(0)  # it begins
    refused = await client.post(PATH, json={"messages": [USER]})
    assert refused.status_code == 503 and "closed" in refused.text and not finished.done()
    may_go_on.set()
    (sample,) = await finished
    assert (await turn).status_code == 200 and sample.metadata["round_number"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_debug_callback_that_raises_costs_no_turn(serve, caplog, stream):
    told = []

    def debug(sid, record):
        told.append((sid, record.finish_reason))
        raise KeyError("of the callback")

    adapter, client = serve(debug_callback=debug)
    response = await client.post(PATH, json={"messages": [USER], "stream": stream})
    assert response.status_code == 200 and ("[DONE]" in response.text) is stream
    assert told == [("s", "stop")] and "debug_callback failed on session s" in caplog.text
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert sample.metadata["round_number"] == 1


async def test_what_an_engine_refuses_is_refused_in_its_words_and_what_it_fails_at_is_not(serve, engine):
    from fastapi.responses import JSONResponse

    _, client = serve()
    for told in (
        {"error": {"message": "too long"}},
        {"error": "too long"},
        {"message": "too long"},
        "too long",
    ):
        engine.answers["generate"] = JSONResponse(told, status_code=400)
        for stream in (False, True):
            response = await client.post(PATH, json={"messages": [USER], "stream": stream})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["message"] == "the engine does not take the request: too long"
    engine.answers["generate"] = JSONResponse({"error": "unknown"}, status_code=404)
    response = await client.post(PATH, json={"messages": [USER]})
    assert response.status_code == 502 and "unknown" in response.text


def test_a_port_that_is_taken_is_told(serve):
    from aiohttp import web

    server = run_app_in_thread(web.Application())
    try:
        with pytest.raises(OSError, match="in use"):
            run_app_in_thread(web.Application(), port=server.port)
    finally:
        server.stop()


async def test_an_adapter_of_one_s_own_asks_the_engine_by_tokens(serve, engine, tokenizer):
    adapter, _ = serve()
    engine.answer = lambda conversation: "done"
    session = Session({"temperature": 1.0}, 100)
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text)["input_ids"]
    body = {"messages": "unread", "temperature": 0.2, "max_tokens": 5, "stop": None}
    turn = await call_sglang_generate(prompt, session, body, adapter=adapter, session_id="s")
    assert turn.prompt_ids == prompt and turn.finish_reason == "stop"
    assert tokenizer.decode(turn.output_ids[:-1]) == "done"
    assert len(turn.output_log_probs) == len(turn.output_ids) and turn.meta_info["output_token_logprobs"]
    with pytest.raises(Refused, match="> 1 maximum context length"):
        await call_sglang_generate(prompt * 2, Session({}, 1), body, adapter=adapter)
