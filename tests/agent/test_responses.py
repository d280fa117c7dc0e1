"""An agent that speaks OpenAI's responses, by its official client, and the samples that come of it."""

import json

import openai
import pytest
from pydantic import BaseModel

from slime.agent.adapters import OpenAIAdapter
from slime.utils.types import Sample
from tests.engines.fake import EOS

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [
    {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
]
PARAMS = {"max_new_tokens": 200, "temperature": 1.0}


@pytest.fixture
def served(serve_to):
    """An adapter with a session ``s`` that is open, and OpenAI's client of it."""
    adapter, url = serve_to(OpenAIAdapter)
    return adapter, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="s", max_retries=0)


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def trained(sample):
    ids = sample.tokens[-sample.response_length :]
    return [token for token, mask in zip(ids, sample.loss_mask, strict=True) if mask]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["items", "previous"])
async def test_a_conversation_with_tools_is_one_sample_of_sampled_tokens(
    served, engine, tokenizer, stream, way
):
    adapter, client = served
    first_text, last_text = f"<think>hm</think>I ask. {CALL}{CALL}", "<think>so</think>done"
    engine.answer = lambda conversation: last_text if "42" in conversation else first_text
    said = [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]
    options = {"model": "m", "instructions": "be brief", "tools": TOOLS}

    async def ask(**more):
        if not stream:
            return await client.responses.create(**options, **more)
        async with client.responses.stream(**options, **more) as events:
            return await events.get_final_response()

    one = await ask(input=said)
    thought, text, *calls = one.output
    assert (thought.content[0].text, text.content[0].text, one.status) == ("hm", "I ask.", "completed")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"x": 1})] * 2
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
    if way == "previous":
        two = await ask(input=results, previous_response_id=one.id)
    else:
        echoed = [item.model_dump(exclude_none=True) for item in one.output]
        two = await ask(input=[*said, *echoed, *results])
    assert two.output_text == "done" and two.usage.output_tokens == len(encoded(tokenizer, last_text + EOS))
    assert two.usage.output_tokens_details.reasoning_tokens == len(encoded(tokenizer, "<think>so</think>"))
    first, second = engine.seen("generate")
    made = encoded(tokenizer, first_text + EOS)
    assert second["input_ids"][: len(first["input_ids"]) + len(made)] == first["input_ids"] + made
    assert "be brief" in tokenizer.decode(first["input_ids"])
    assert two.usage.input_tokens == len(second["input_ids"])
    (sample,) = await adapter.finish_session("s", base_sample=Sample(index=3), reward=1.0)
    assert trained(sample) == made + encoded(tokenizer, last_text + EOS)
    assert sample.metadata == {"round_number": 2, "use_tool": True}


async def test_events_are_those_of_the_protocol_in_its_order(served, engine):
    _, client = served
    engine.answer = lambda conversation: f"<think>hm</think>I ask. {CALL}{CALL}"
    stream = await client.responses.create(model="m", input="q", tools=TOOLS, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    steady = [kind for at, kind in enumerate(kinds) if kind != (kinds[at - 1] if at else "")]
    opens, part = "output_item.added", "content_part"
    call = [opens, "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert steady == [
        *("created", "in_progress"),
        *(opens, f"{part}.added", "reasoning_text.delta", "reasoning_text.done", f"{part}.done"),
        *("output_item.done", opens, f"{part}.added", "output_text.delta", "output_text.done"),
        *(f"{part}.done", "output_item.done", *call, *call, "completed"),
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "I ask." and len(deltas) > 1
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in events[-1].response.output] == [item.id for item in done]
    places = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert places == [0, 1, 2, 3] and events[-1].response.usage.total_tokens > 0


async def test_an_empty_answer_and_one_that_is_cut_off_are_told(served, engine):
    _, client = served
    engine.answer = lambda conversation: "" if "empty" in conversation else "a long answer"
    for stream in (False, True):
        for question, most, text, status in (
            ("empty", 9, "", "completed"),
            ("q", 2, "a ", "incomplete"),
        ):
            found = await client.responses.create(
                model="m", input=question, max_output_tokens=most, stream=stream
            )
            if stream:
                *_, last = [event async for event in found]
                assert last.type == f"response.{status}"
                found = last.response
            assert found.status == status and found.output_text.strip() == text.strip()
            assert (found.incomplete_details is not None) == (status == "incomplete")


async def test_what_is_asked_of_an_answer_reaches_the_engine(served, engine):
    class Found(BaseModel):
        a: int

    _, client = served
    engine.answer = lambda conversation: '{"a": 1}'
    parsed = await client.responses.parse(model="m", input="q", text_format=Found)
    assert parsed.output_parsed == Found(a=1)

    async def params(**more):
        await client.responses.create(model="m", input="q", **more)
        return engine.seen("generate")[-1]["sampling_params"]

    schema = json.loads(engine.seen("generate")[-1]["sampling_params"]["json_schema"])
    assert schema["properties"]["a"]["type"] == "integer"
    assert "json_schema" in await params(text={"format": {"type": "json_object"}})
    asked = await params(top_p=0.5, max_output_tokens=3, extra_body={"seed": 7}, temperature=0.1)
    assert asked == {"max_new_tokens": 3, "temperature": 1.0, "top_p": 0.5, "sampling_seed": 7}
    for choice in ("required", {"type": "function", "name": "f"}):
        assert json.loads((await params(tools=TOOLS, tool_choice=choice))["structural_tag"])["at_least_one"]
    strict = json.loads((await params(tools=[{**TOOLS[0], "strict": True}]))["structural_tag"])
    assert not strict["at_least_one"] and strict["structures"][0]["schema"] == {"type": "object"}
    assert "</tool_call>" in (await params(tools=TOOLS, parallel_tool_calls=False))["stop"]
    assert "structural_tag" not in await params(tools=TOOLS, tool_choice="none")
    await params(
        prompt_cache_key="k",
        store=False,
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        background=False,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_are_those_of_the_text_that_the_engine_made(served, engine, tokenizer, stream):
    _, client = served
    engine.answer = lambda conversation: "<think>hm</think>said so"
    answer_with = engine._answer_with

    def with_others(ids, reason, body):
        answer = answer_with(ids, reason, body)
        others = [[[-0.25, token, None], [-2.0, 65, None]] for token in ids]
        answer["meta_info"]["output_token_logprobs"] = [[-at / 8, t, None] for at, t in enumerate(ids)]
        return answer | {"meta_info": answer["meta_info"] | {"output_top_logprobs": others}}

    engine._answer_with = with_others
    asked = {"model": "m", "input": "q", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        made = events[-1].response
        (done,) = (event for event in events if event.type == "response.output_text.done")
    else:
        made = await client.responses.create(**asked)
        done = made.output[1].content[0]
    thought, text = encoded(tokenizer, "<think>hm</think>"), encoded(tokenizer, "said so" + EOS)
    told = made.output[1].content[0].logprobs
    assert [one.token for one in told] == [tokenizer.decode([token]) for token in text]
    assert [one.logprob for one in told] == [-at / 8 for at in range(len(thought), len(thought + text))]
    assert all(bytes(one.bytes).decode() == one.token for one in told)
    other = tokenizer.decode([65])
    assert all([(top.token, top.logprob) for top in one.top_logprobs][1:] == [(other, -2.0)] for one in told)
    assert [(one.token, one.logprob) for one in done.logprobs] == [(one.token, one.logprob) for one in told]
    assert engine.seen("generate")[0]["top_logprobs_num"] == made.top_logprobs == 2
    engine._answer_with = answer_with
    plain = await client.responses.create(model="m", input="q")
    assert plain.output[1].content[0].logprobs == [] and "top_logprobs_num" not in engine.seen("generate")[1]


async def test_empty_thoughts_are_no_part_of_what_log_probs_are_told_of(served, engine, tokenizer):
    _, client = served
    engine.answer = lambda conversation: "<think></think>said"
    asked = {"model": "m", "input": "q", "include": ["message.output_text.logprobs"]}
    made = await client.responses.create(**asked)
    (text,) = made.output
    assert "".join(one.token for one in text.content[0].logprobs) == "said" + EOS
    thought = encoded(tokenizer, "<think></think>")
    assert made.usage.output_tokens_details.reasoning_tokens == len(thought)


async def test_a_call_of_a_kept_response_is_read_as_one_that_the_agent_sends_back(served, engine):
    """Other tools need the whole conversation once more, in the template's words."""
    _, client = served
    engine.answer = lambda conversation: f"I ask. {CALL}"
    one = await client.responses.create(model="m", input="q", tools=TOOLS)
    result = {"type": "function_call_output", "call_id": one.output[-1].call_id, "output": "42"}
    asked = {"model": "m", "tools": [*TOOLS, {**TOOLS[0], "name": "g"}]}
    await client.responses.create(**asked, input=[result], previous_response_id=one.id)
    items = [item.model_dump(exclude_none=True) for item in one.output]
    await client.responses.create(**asked, input=[{"role": "user", "content": "q"}, *items, result])
    kept, sent = (body["input_ids"] for body in engine.seen("generate")[1:])
    assert kept == sent


async def test_responses_are_kept_by_the_session_and_not_without_end(served, engine, monkeypatch):
    monkeypatch.setattr("slime.agent.adapters.responses._KEPT", 2)
    adapter, client = served
    adapter.open_session("t", sampling_defaults=PARAMS)
    kept = [await client.responses.create(model="m", input="q") for _ in range(3)]
    unkept = await client.responses.create(model="m", input="q", store=False)
    for identity in (kept[0].id, unkept.id, "resp_of_nobody"):
        with pytest.raises(openai.BadRequestError, match=f"previous_response_id '{identity}': not kept"):
            await client.responses.create(model="m", input="so?", previous_response_id=identity)
    with pytest.raises(openai.BadRequestError, match="not kept"):
        await client.with_options(api_key="t").responses.create(
            model="m", input="so?", previous_response_id=kept[2].id
        )
    await client.responses.create(model="m", input="so?", previous_response_id=kept[2].id)
    assert len(engine.seen("generate")) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_kept_is_told_again_until_it_is_deleted(served, engine, stream):
    adapter, client = served
    engine.answer = lambda conversation: f"<think>hm</think>I ask. {CALL}"
    asked = {"model": "m", "input": "q", "tools": TOOLS}
    if stream:
        async with client.responses.stream(**asked) as events:
            made = await events.get_final_response()
    else:
        made = await client.responses.create(**asked)
    kept = await client.responses.retrieve(made.id)
    theirs = {"exclude": {"output"}} if stream else {}  # the client adds what it has parsed
    assert kept.model_dump(**theirs) == made.model_dump(**theirs) and len(kept.output) == 3
    assert [item.id for item in kept.output] == [item.id for item in made.output]
    adapter.open_session("t", sampling_defaults=PARAMS)
    other = client.with_options(api_key="t")
    for way in (other.responses.retrieve, other.responses.delete):
        with pytest.raises(openai.NotFoundError, match="not kept"):
            await way(made.id)
    with pytest.raises(openai.BadRequestError, match="include"):
        await client.responses.retrieve(made.id, include=["reasoning.encrypted_content"])
    await client.responses.delete(made.id)
    for way in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"{made.id}.*not kept"):
            await way(made.id)
    with pytest.raises(openai.NotFoundError, match="/cancel"):
        await client.responses.cancel(made.id)
    (sample,) = await adapter.finish_session("s", base_sample=Sample())
    assert sum(sample.loss_mask) == made.usage.output_tokens


async def test_instructions_and_words_of_developers_are_one_system_message(served, engine, tokenizer):
    _, client = served
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "second"}]}
    user = {"role": "user", "content": "q"}
    await client.responses.create(model="m", instructions="first", input=[developer, user, developer])
    messages = [
        {"role": "system", "content": "first\n\nsecond"},
        user,
        {"role": "user", "content": "<system-reminder>\nsecond\n</system-reminder>"},
    ]
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(engine.seen("generate")[0]["input_ids"]) == wanted


async def test_what_cannot_be_done_is_refused_by_name(served, engine):
    _, client = served
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}
    for body, named in (
        ({"background": True}, "background True"),
        ({"include": ["message.input_image.image_url"]}, "include 'message.input_image.image_url'"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation 'auto'"),
        ({"top_logprobs": 3}, "top_logprobs 3 without include"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs 21"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"verbosity": "low"}}, "text.verbosity 'low'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type 'grammar'"),
        ({"tools": [{"type": "web_search", "name": "w"}]}, "tools[0].type 'web_search'"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type 'allowed_tools'"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [{**TOOLS[0], "strict": True}], "text": {"format": {"type": "json_object"}}},
            "text.format",
        ),
        ({"tools": [{**TOOLS[0], "strict": True}, {**TOOLS[0], "strict": "yes"}]}, "strict 'yes'"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls 'no'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'type': 'item_reference'"),
        ({"input": [image]}, "input_image"),
        ({"input": [{"role": "nobody", "content": "q"}]}, "input[0].role 'nobody'"),
        ({"input": []}, "input []"),
        ({"input": ["x"]}, "input[0] 'x'"),
        ({"input": 5}, "input 5"),
        ({"input": [{"type": "function_call"}]}, "input[0].name missing"),
        ({"max_output_tokens": 0}, "max_output_tokens 0"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(
                    **{"model": "m", "input": "q", "extra_body": body, "stream": stream}
                )
            assert named in str(refused.value), body
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="nobody").responses.create(model="m", input="q")
    assert not engine.seen("generate")


async def test_an_engine_that_gives_up_in_the_middle_is_told_in_the_stream(served, engine):
    _, client = served
    engine.answer = lambda conversation: "<think>hm</think>a long answer of words"
    engine.breaks_after, engine.says_why = 25, {"message": "not this", "code": 404}
    stream = await client.responses.create(model="m", input="q", stream=True)
    *_, last = [event async for event in stream]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error" and last.response.output[0].type == "reasoning"
