"""Tools and reasoning in chats, with OpenAI's own client.

The model's weights are random: a grammar makes it write the text of which the test is about.
"""

import json

import jsonschema
import openai
import pytest

from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from tests.each import hold_each
from tests.engines.embedded import Server
from tools.make_tiny_model import make_tokenizer

pytestmark = pytest.mark.slow

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[a-z]{1,5}$"},
        "days": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "of the weather",
        "parameters": PARAMETERS,
        "strict": True,
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}, "strict": True},
}
TOOLS = [FORECAST, CLOCK]
ASK = [{"role": "user", "content": "rain?"}]
CALLING = (
    'Let me see.\n<tool_call>\n{"name": "forecast", "arguments": {"city": "oslo", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server(checkpoint):
    flags = ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3", "--random-seed", "7")
    server = Server(checkpoint[0], *flags)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def verbatim(text: str) -> dict:
    """Makes the model write this."""
    return {"ebnf": f"root ::= {json.dumps(text)}"}


def ask(client, extra: dict, **body):
    return client.chat.completions.create(
        model="m", messages=ASK, max_tokens=400, temperature=1, extra_body={**QUIET, **extra}, **body
    )


def added(stream) -> dict:
    """What the chunks of a stream add up to, as clients add them."""
    whole: dict = {"content": "", "reasoning": "", "calls": {}, "reason": None}
    for chunk in stream:
        for choice in chunk.choices:
            whole["content"] += choice.delta.content or ""
            whole["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                entry = whole["calls"].setdefault(call.index, {"id": None, "name": None, "arguments": ""})
                entry["id"] = call.id or entry["id"]
                entry["name"] = call.function.name or entry["name"]
                entry["arguments"] += call.function.arguments or ""
            whole["reason"] = choice.finish_reason or whole["reason"]
    return whole


def test_calls_are_told_apart_from_text(client):
    answer = ask(client, verbatim(CALLING), tools=TOOLS).choices[0]
    calls = answer.message.tool_calls
    assert answer.message.content == "Let me see." and answer.finish_reason == "tool_calls"
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "forecast", '{"city": "oslo", "days": 2}'),
        ("function", "now", "{}"),
    ]
    assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)


def test_a_stream_of_calls_adds_up(client):
    whole = added(ask(client, verbatim(CALLING), tools=TOOLS, stream=True))
    assert whole["content"].strip() == "Let me see." and whole["reason"] == "tool_calls"
    assert [(call["name"], call["arguments"]) for _, call in sorted(whole["calls"].items())] == [
        ("forecast", '{"city": "oslo", "days": 2}'),
        ("now", "{}"),
    ]
    assert all(call["id"].startswith("call_") for call in whole["calls"].values())


def test_calls_are_text_where_they_are_not_looked_for(client):
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = ask(client, verbatim(CALLING), **body).choices[0]
        assert answer.message.content == CALLING and not answer.message.tool_calls
        assert answer.finish_reason == "stop"
    cut = client.chat.completions.create(
        model="m", messages=ASK, tools=TOOLS, max_tokens=40, extra_body={**QUIET, **verbatim(CALLING)}
    ).choices[0]
    assert cut.finish_reason == "length" and not cut.message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_one_by_a_model_with_random_weights(client, stream):
    named = {"type": "function", "function": {"name": "forecast"}}
    for choice, names in (("required", {"forecast", "now"}), (named, {"forecast"})):
        answer = ask(client, {}, tools=TOOLS, tool_choice=choice, stream=stream, seed=5)
        if stream:
            calls = [(call["name"], call["arguments"]) for call in added(answer)["calls"].values()]
        else:
            assert answer.choices[0].finish_reason in ("tool_calls", "length")
            calls = [(c.function.name, c.function.arguments) for c in answer.choices[0].message.tool_calls]
        assert calls and {name for name, _ in calls} <= names
        for name, arguments in calls:
            schema = PARAMETERS if name == "forecast" else CLOCK["function"]["parameters"]
            jsonschema.validate(json.loads(arguments), schema)


def test_answers_of_tools_go_back_in(server, client):
    first = ask(client, verbatim(CALLING), tools=TOOLS).choices[0].message
    messages = [*ASK, first.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in first.tool_calls]
    again = client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, max_tokens=20, extra_body={**QUIET, **verbatim("dry")}
    )
    assert again.choices[0].message.content == "dry"
    wrong = {
        **messages[1],
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": "{"}}],
    }
    refused = server.post("/v1/chat/completions", messages=[*ASK, wrong])
    assert refused.status_code == 400 and "messages.1.tool_calls.0.function.arguments" in refused.text


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart_from_the_answer(client, stream):
    """The grammar holds for the answer alone; here a bias makes the reasoning end."""
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 60}
    end = {"logit_bias": {str(_id("</think>")): 100}}
    answer = ask(client, {**thinking, **end, **verbatim("dry")}, stream=stream)
    told = added(answer) if stream else None
    message = None if stream else answer.choices[0].message
    assert (told["content"] if stream else message.content) == "dry"
    assert "</think>" not in (told["reasoning"] if stream else message.reasoning_content or "")
    kept = ask(client, {**QUIET, "separate_reasoning": False, **verbatim("<think>a</think>b")})
    assert kept.choices[0].message.content == "<think>a</think>b"
    split = ask(client, {**QUIET, **verbatim("<think>a</think>b")}).choices[0].message
    assert (split.reasoning_content, split.content) == ("a", "b")
    in_one = added(
        ask(client, {**QUIET, "stream_reasoning": False, **verbatim("<think>a c</think>b")}, stream=True)
    )
    assert (in_one["reasoning"], in_one["content"]) == ("a c", "b")


def _id(text: str) -> int:
    (token,) = make_tokenizer().encode(text, add_special_tokens=False)
    return token


WRONG = [
    ({"tools": "forecast"}, "tools"),
    ({"tools": [{}]}, "tools.0"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "word"}}}]}, "tools.0"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
    ({"tool_choice": "required"}, "required"),
    (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


def test_tools_that_are_none_are_a_400(server):
    def refused(case: tuple[dict, str]) -> None:
        body, named = case
        answer = server.post("/v1/chat/completions", messages=ASK, **body)
        assert answer.status_code == 400 and named in answer.json()["message"], answer.text

    hold_each(WRONG, refused)


def test_without_a_parser_a_forced_call_is_an_array(shared_server):
    body = {"messages": ASK, "tools": TOOLS, "max_tokens": 400, "parallel_tool_calls": False, "seed": 5}
    answer = shared_server.post("/v1/chat/completions", **body, tool_choice="required").json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] in ("forecast", "now") and answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] == ""
    plain = shared_server.post("/v1/chat/completions", **body, **verbatim(CALLING)).json()["choices"][0]
    assert plain["message"]["content"] == CALLING and "tool_calls" not in plain["message"]


def test_texts_of_clients_are_parsed(server):
    body = {"text": CALLING, "tools": TOOLS, "tool_call_parser": "qwen25"}
    assert server.post("/parse_function_call", **body).json() == {
        "normal_text": "Let me see.",
        "calls": [
            {"tool_index": 0, "name": "forecast", "parameters": '{"city": "oslo", "days": 2}'},
            {"tool_index": 1, "name": "now", "parameters": "{}"},
        ],
    }
    text = {"text": "<think>a</think>b", "reasoning_parser": "qwen3"}
    assert server.post("/separate_reasoning", **text).json() == {"reasoning_text": "a", "text": "b"}
    assert server.post("/separate_reasoning", **text, return_blocks=True).json()["reasoning_blocks"] == ["a"]
    for path, wrong in (
        ("/parse_function_call", {**body, "tool_call_parser": "gpt-oss"}),
        ("/separate_reasoning", {**text, "reasoning_parser": "x"}),
    ):
        assert server.post(path, **wrong).status_code == 400


def test_a_raw_request_may_reason_before_its_grammar(server):
    sampling = {"regex": "dry", "max_new_tokens": 300, "logit_bias": {str(_id("</think>")): 100}}
    text = server.post("/generate", text="go", sampling_params=sampling, require_reasoning=True).json()[
        "text"
    ]
    assert text.endswith("</think>dry")
    assert server.post("/generate", text="go", sampling_params=sampling).json()["text"] == "dry"


def test_an_agent_behind_an_adapter_gets_the_call_that_it_demands(server):
    adapter = OpenAIAdapter(
        tokenizer=make_tokenizer(), sglang_url=f"{server.url}/generate", tool_parser="qwen25"
    )
    adapter.open_session("s", sampling_defaults={"max_new_tokens": 400})
    served = run_app_in_thread(adapter.app)
    try:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="s", max_retries=0) as client:
            asked = {"model": "m", "messages": ASK, "tools": TOOLS, "seed": 5}
            answer = client.chat.completions.create(**asked, tool_choice="required")
            once = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
            with pytest.raises(openai.BadRequestError, match=r"the engine does not take .*temperature"):
                client.chat.completions.create(**asked, temperature=-1)
    finally:
        served.stop()
    (call,) = once.choices[0].message.tool_calls
    assert call.function == answer.choices[0].message.tool_calls[0].function
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in answer.choices[0].message.tool_calls:
        schema = next(
            t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == call.function.name
        )
        jsonschema.validate(json.loads(call.function.arguments), schema)
