"""Anthropic's own client, an adapter, and a scripted engine behind it."""

import asyncio
import json
from copy import copy

import anthropic
import pytest

from slime.agent.adapters import AnthropicAdapter
from slime.utils.types import Sample
from tests.engines.fake import EOS, NEVER

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {}}}}]
USER = {"role": "user", "content": "q"}
ASKED = {"model": "m", "max_tokens": 190}


@pytest.fixture
def serve(serve_to):
    """An adapter with these options and a session ``s`` that is open, and Anthropic's client of it."""

    def make(**options):
        adapter, url = serve_to(AnthropicAdapter, **{"max_turns_per_sid": 6, **options})
        return adapter, anthropic.AsyncAnthropic(base_url=url, api_key="s", max_retries=0)

    return make


@pytest.fixture
def served(serve):
    return serve()


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_is_one_sample_of_sampled_tokens(served, engine, tokenizer, stream):
    adapter, client = served
    first_text, last_text = f"<think>hm</think>I ask. {CALL}{CALL}", "<think>so</think>done"
    engine.answer = lambda conversation: last_text if "42" in conversation else first_text

    async def ask(messages):
        if not stream:
            return await client.messages.create(**ASKED, messages=messages, tools=TOOLS, system="be brief")
        asked = client.messages.stream(**ASKED, messages=messages, tools=TOOLS, system="be brief")
        async with asked as events:
            return await events.get_final_message()

    one = await ask([USER])
    thought, text, *calls = one.content
    assert (thought.thinking, text.text, one.stop_reason) == ("hm", "I ask.", "tool_use")
    assert [(call.name, call.input) for call in calls] == [("f", {"x": 1})] * 2
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls]
    messages = [USER, {"role": "assistant", "content": one.content}, {"role": "user", "content": results}]
    count = await client.messages.count_tokens(model="m", messages=messages, tools=TOOLS, system="be brief")
    two = await ask(messages)
    assert (two.content[-1].text, two.stop_reason) == ("done", "end_turn")
    first, second = engine.seen("generate")
    made = encoded(tokenizer, first_text + EOS)
    assert second["input_ids"][: len(first["input_ids"]) + len(made)] == first["input_ids"] + made
    assert count.input_tokens == two.usage.input_tokens == len(second["input_ids"])
    (sample,) = await adapter.finish_session("s", base_sample=Sample(), reward=1.0)
    assert sum(sample.loss_mask) == len(made) + len(encoded(tokenizer, last_text + EOS))


async def test_tokens_are_counted_as_the_template_renders_them(served, engine, tokenizer):
    adapter, client = served
    chat = [{"role": "system", "content": "be brief"}, USER]
    functions = [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": TOOLS[0]["input_schema"]},
        }
    ]
    for tools, offered in ((anthropic.NOT_GIVEN, None), (TOOLS, functions)):
        count = await client.messages.count_tokens(model="m", messages=[USER], system="be brief", tools=tools)
        rendered = tokenizer.apply_chat_template(
            chat, tools=offered, tokenize=False, add_generation_prompt=True
        )
        assert count.input_tokens == len(encoded(tokenizer, rendered))
    assert not engine.seen("generate") and not await adapter.finish_session("s", base_sample=Sample())


async def test_tools_that_come_later_are_told_and_those_that_go_change_nothing(served, engine, tokenizer):
    """Held tokens tell of the tools of the first turn; a prompt with others is another sample."""
    adapter, client = served
    engine.answer = lambda conversation: "<think>hm</think>said"
    messages = [USER]
    for tools in (TOOLS, [], [*TOOLS, {**TOOLS[0], "name": "later"}], TOOLS):
        answer = await client.messages.create(**ASKED, messages=messages, tools=tools)
        messages = [*messages, {"role": "assistant", "content": answer.content}, USER]
    texts = [tokenizer.decode(asked["input_ids"]) for asked in engine.seen("generate")]
    assert ["later" in text for text in texts] == [False, False, True, True]
    assert texts[1].startswith(texts[0]) and texts[3].startswith(texts[2])
    samples = await adapter.finish_session("s", base_sample=Sample(), reward=1.0)
    assert [sample.metadata["round_number"] for sample in samples] == [2, 2]


async def test_the_string_that_ended_an_answer_is_told(served, engine):
    _, client = served
    engine.answer = lambda conversation: "<think>hm</think>one, two, three"
    options = {**ASKED, "messages": [USER], "stop_sequences": [" two"]}
    whole = await client.messages.create(**options)
    async with client.messages.stream(**options) as events:
        streamed = await events.get_final_message()
    for answer in (whole, streamed):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " two")
        assert answer.content[-1].text == "one,"


async def test_a_string_that_the_client_did_not_name_is_not_told(served, engine):
    """A session has stop strings of its own, and where one call is wanted its end is one."""
    adapter, client = served
    adapter.open_session("t", sampling_defaults={"stop": [" two"]})
    engine.answer = lambda conversation: "<think>hm</think>one, two, three"
    own = await client.with_options(api_key="t").messages.create(**ASKED, messages=[USER])
    engine.answer = lambda conversation: "<think>hm</think><tool_call>{]</tool_call> more"
    single: anthropic.types.ToolChoiceAutoParam = {"type": "auto", "disable_parallel_tool_use": True}
    unread = await client.messages.create(**ASKED, messages=[USER], tools=TOOLS, tool_choice=single)
    assert own.content[-1].text == "one," and unread.content[-1].text == "<tool_call>{]</tool_call>"
    for answer in (own, unread):
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)


async def test_calls_of_strict_tools_follow_their_schemas(served, engine):
    _, client = served
    strict = [{**TOOLS[0], "strict": True}]
    await client.messages.create(**ASKED, messages=[USER], tools=strict)
    tag = json.loads(engine.seen("generate")[0]["sampling_params"]["structural_tag"])
    assert not tag["at_least_one"] and tag["structures"][0]["schema"] == TOOLS[0]["input_schema"]
    await client.messages.create(**ASKED, messages=[USER], tools=TOOLS)
    assert "structural_tag" not in engine.seen("generate")[1]["sampling_params"]


SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""In the manner of Qwen 3's."""


async def test_thoughts_are_switched_where_the_template_has_a_switch(serve, engine, tokenizer):
    switched = copy(tokenizer)
    switched.chat_template = SWITCHED
    adapter, client = serve(tokenizer=switched)
    engine.answer = lambda conversation: "<think>hm</think>said"
    modes: list[anthropic.types.ThinkingConfigParam] = [
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "disabled"},
        {"type": "adaptive"},
    ]
    messages = [USER]
    for mode, off in zip(modes, (False, True, False), strict=True):
        asked = {"messages": messages, "thinking": mode}
        count = await client.messages.count_tokens(model="m", **asked)
        engine.answer = lambda conversation, off=off: "said" if off else "<think>hm</think>said"
        answer = await client.messages.create(**ASKED, **asked)
        assert [block.type for block in answer.content] == (["text"] if off else ["thinking", "text"])
        prompt = engine.seen("generate")[-1]["input_ids"]
        assert tokenizer.decode(prompt).endswith("assistant\n" + off * "<think>\n\n</think>\n\n")
        assert count.input_tokens == len(prompt)
        messages = [*messages, {"role": "assistant", "content": answer.content}, USER]
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert sample.metadata["round_number"] == 3


async def test_thoughts_that_nothing_can_switch_are_refused_by_name(serve, engine):
    _, plain = serve(reasoning_parser=None)
    _, thinking = serve()
    enabled = {"type": "enabled", "budget_tokens": 2000}
    for client, mode, named in (
        (plain, enabled, "thinking.type 'enabled': the chat template has no enable_thinking"),
        (thinking, {**enabled, "budget_tokens": 10}, "thinking.budget_tokens 10"),
        (thinking, {**enabled, "budget_tokens": True}, "thinking.budget_tokens True"),
        (thinking, {**enabled, "display": "omitted"}, "thinking.display 'omitted'"),
        (thinking, {"type": "between_tools"}, "thinking.type 'between_tools'"),
        (thinking, {}, "thinking.type missing"),
        (thinking, "enabled", "thinking 'enabled'"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=named):
            await client.messages.create(**ASKED, messages=[USER], extra_body={"thinking": mode})
    assert not engine.seen("generate")
    for client, mode in ((plain, {"type": "disabled"}), (plain, {"type": "adaptive"}), (thinking, enabled)):
        await client.messages.create(**ASKED, messages=[USER], extra_body={"thinking": mode})


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_those_of_the_client(served, engine, stream):
    adapter, client = served

    async def refused(of=client, **more):
        with pytest.raises(anthropic.APIStatusError) as found:
            await of.messages.create(**{**ASKED, "messages": [USER], "stream": stream, **more})
        return found.value

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    error = await refused(messages=[{"role": "user", "content": [image]}])
    assert isinstance(error, anthropic.BadRequestError) and "'image'" in error.message
    assert error.body["error"]["type"] == "invalid_request_error"
    error = await refused(client.with_options(api_key="nobody"))
    assert isinstance(error, anthropic.AuthenticationError)
    assert error.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.models.retrieve("m")
    assert missing.value.body["error"]["type"] == "not_found_error" and "/v1/models/m" in str(missing.value)
    adapter.open_session("t")
    adapter.drop_session("t")
    error = await refused(client.with_options(api_key="t"))
    assert (error.status_code, error.body["error"]["type"]) == (529, "overloaded_error")
    for _ in range(6):
        await client.messages.create(**ASKED, messages=[USER])
    assert isinstance(await refused(), anthropic.RateLimitError)
    assert (await client.messages.count_tokens(model="m", messages=[USER])).input_tokens > 0


async def test_an_engine_that_gives_up_is_overloaded_and_one_that_breaks_off_ends_the_stream(served, engine):
    _, client = served
    engine.delay = lambda conversation: NEVER
    asked = asyncio.create_task(client.messages.create(**ASKED, messages=[USER]))
    while not asked.done():  # it may be told before it has begun to wait
        engine.aborts += engine.running
        await asyncio.sleep(0.01)
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        await asked
    engine.delay = lambda conversation: 0.0
    engine.answer = lambda conversation: "<think>hm</think>a long answer of words"
    engine.breaks_after, engine.says_why = 25, {"message": "not this", "code": 404}
    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        async with client.messages.stream(**ASKED, messages=[USER]) as events:
            await events.get_final_message()


async def test_a_stream_that_the_client_leaves_is_no_turn_and_ends_at_the_engine(served, engine, tokenizer):
    adapter, client = served
    words = "<think>hm</think>some words"
    left = iter([0.0] * (len(encoded(tokenizer, words)) - 1))
    engine.answer = lambda conversation: "again" if "left" in conversation else words
    engine.delay = lambda conversation: 0.0 if "left" in conversation else next(left, NEVER)
    ended, events_of = [], engine._events

    async def watched(body):
        try:
            async for event in events_of(body):
                yield event
        finally:
            ended.append(body)

    engine._events = watched
    async with client.messages.stream(**ASKED, messages=[USER]) as events:
        async for text in events.text_stream:
            assert text
            break
    async with asyncio.timeout(300):
        while not ended:  # what the engine waits for never comes
            await asyncio.sleep(0.01)
    answer = await client.messages.create(**ASKED, messages=[{"role": "user", "content": "left"}])
    assert answer.content[0].text == "again"
    (sample,) = await adapter.finish_session("s", base_sample=Sample(), wait_timeout=300)
    assert sample.metadata["round_number"] == 1
