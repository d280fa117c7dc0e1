"""Responses under grammars, of a model with random weights: what holds does so by the grammar alone."""

import json
import math
import re
import threading
import time

import httpx
import jsonschema
import pytest
import torch
import xgrammar

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.grammar.compiler import GrammarCompiler
from slime.backends.embedded_engine.grammar.constraint import Constraint
from slime.backends.embedded_engine.grammar.wanted import wanted_grammar
from tests.each import hold_each
from tools.make_tiny_model import make_tokenizer

pytestmark = pytest.mark.slow

EOS = 258
LOWEST = torch.finfo(torch.float32).min
VOCABULARY = 320
A, B, C = make_tokenizer().encode("abc")
# Under a maxLength xgrammar lets control characters through, which JSON forbids.
WORD = {"type": "string", "pattern": "^[a-zé ]{0,6}$"}
PERSON = {
    "type": "object",
    "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "object", "properties": {"p": PERSON, "q": {"type": "boolean"}}, "required": ["p", "q"]},
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^[a-z]{2,4}$"}]},
    {"type": "string", "format": "date"},
    {
        "$defs": {"w": WORD},
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/w"}, {"const": 7}],
        "items": False,
    },
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}, "additionalProperties": False},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
]
GRAMMARS = {
    "json_schema": json.dumps(PERSON),
    "regex": r"[a-c]{2,5}-\d+(\.\d{2})?",
    "ebnf": 'root ::= "(" root ")" | [0-9] [0-9]*',
    "structural_tag": json.dumps(
        {
            "format": {
                "type": "tag",
                "begin": "<n>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</n>",
            }
        }
    ),
}


@pytest.fixture(scope="module")
def own_compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo.from_huggingface(
        make_tokenizer(), vocab_size=VOCABULARY, stop_token_ids=[EOS]
    )
    return xgrammar.GrammarCompiler(info)


def generate(server, count: int = 1, tokens: int = 400, **sampling) -> list[dict]:
    more = {"max_new_tokens": tokens, "n": count, "sampling_seed": 3}
    body = {"text": ["go"], "sampling_params": {**more, **sampling}}
    answer = server.post("/generate", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(answers: list[dict]) -> list[dict]:
    return [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]


def test_two_hundred_random_responses_are_what_their_schemas_say(shared_server, own_compiler):
    """All texts by jsonschema, and all tokens, of unfinished ones too, by a matcher of its own."""
    checked = 0
    for schema in SCHEMAS:
        answers = generate(shared_server, 26, json_schema=json.dumps(schema))
        compiled = own_compiler.compile_json_schema(json.dumps(schema))
        for answer in answers:
            matcher = xgrammar.GrammarMatcher(compiled)
            assert all(matcher.accept_token(token) for token in answer["output_ids"])
        for answer in ended(answers):
            jsonschema.validate(json.loads(answer["text"]), schema)
            assert answer["output_ids"][-1] == EOS == answer["meta_info"]["finish_reason"]["matched"]
        checked += len(ended(answers))
    assert checked >= 200


def test_each_kind_of_grammar_holds_and_ends_in_eos_even_if_that_is_ignored(shared_server, own_compiler):
    compile_one = {
        "regex": own_compiler.compile_regex,
        "ebnf": own_compiler.compile_grammar,
        "json_schema": own_compiler.compile_json_schema,
        "structural_tag": own_compiler.compile_structural_tag,
    }
    for name, text in GRAMMARS.items():
        answers = generate(shared_server, 8, ignore_eos=True, **{name: text})
        for answer in answers:
            matcher = xgrammar.GrammarMatcher(compile_one[name](text))
            assert all(matcher.accept_token(token) for token in answer["output_ids"]), (name, answer["text"])
        assert ended(answers) and all(a["output_ids"][-1] == EOS for a in ended(answers)), name
    for answer in ended(generate(shared_server, 8, regex=GRAMMARS["regex"])):
        assert re.fullmatch(GRAMMARS["regex"], answer["text"])


def test_log_probs_are_those_of_what_may_come(shared_server):
    """As on SGLang: of the distribution after the mask; what may not come has no log-prob."""
    body = {"return_logprob": True, "top_logprobs_num": 4, "token_ids_logprob": [C]}
    sampling = {"regex": "[ab]", "max_new_tokens": 5}
    meta = shared_server.post("/generate", text="go", sampling_params=sampling, **body).json()["meta_info"]
    first, end = meta["output_top_logprobs"]
    allowed = {token: value for value, token, _ in first if value > LOWEST}
    assert set(allowed) == {A, B} and math.isclose(sum(map(math.exp, allowed.values())), 1, rel_tol=1e-5)
    assert meta["output_token_logprobs"][0][0] == allowed[meta["output_token_logprobs"][0][1]]
    assert end[0][:2] == [0.0, EOS] and meta["output_token_logprobs"][1][:2] == [0.0, EOS]
    assert [value for value, *_ in meta["output_token_ids_logprobs"][0]] == [LOWEST]
    free = shared_server.post("/generate", text="go", sampling_params={"max_new_tokens": 1}, **body).json()
    assert len(free["meta_info"]["output_token_logprobs"]) == 1


def test_a_row_with_a_grammar_leaves_its_neighbours_as_they_are(shared_server):
    plain = {"max_new_tokens": 20, "ignore_eos": True, "sampling_seed": 5}
    alone = shared_server.post("/generate", text="go", sampling_params=plain).json()["output_ids"]
    params = [{"max_new_tokens": 20, "regex": "a+"}, plain, {"max_new_tokens": 20, "regex": "b+"}]
    answers = shared_server.post("/generate", text=["go"] * 3, sampling_params=params).json()
    assert answers[1]["output_ids"] == alone
    assert set(answers[0]["text"]) == {"a"} and set(answers[2]["text"]) == {"b"}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_keeps_its_place_in_the_grammar(shared_server, mode):
    """A long prompt is computed in chunks before, and again after a retraction."""
    sampling = {
        "regex": "(abcdefghij){20}",
        "max_new_tokens": 600,
        "ignore_eos": True,
        "logit_bias": {str(EOS): -1e9},
    }
    found: list[dict] = []
    ids = [A] * 1500

    def ask() -> None:
        found.append(shared_server.generate(ids, sampling, rid=f"paused-{mode}"))

    thread = threading.Thread(target=ask)
    thread.start()
    while shared_server.client.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0:
        time.sleep(0.01)
    time.sleep(0.1)
    shared_server.post("/pause_generation", mode=mode)
    shared_server.post("/continue_generation")
    thread.join()
    assert found[0]["text"] == "abcdefghij" * 20


def test_an_aborted_response_is_a_beginning_of_what_the_grammar_says(shared_server):
    sampling = {"regex": "(ab){9000}", "max_new_tokens": 15000}
    body = {"text": "go", "sampling_params": sampling, "rid": "grammar-abort", "stream": True}
    last = {}
    with shared_server.client.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])
                shared_server.post("/abort_request", rid="grammar-abort")
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert ("ab" * 9000).startswith(last["text"]) and last["text"]


WRONG = [
    ({"regex": "("}, "regex"),
    ({"ebnf": "root ::= "}, "ebnf"),
    ({"ebnf": 'other ::= "a"'}, "ebnf"),
    ({"json_schema": "{"}, "json"),
    ({"json_schema": '{"type": "word"}'}, "json"),
    ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
    ({"json_schema": '{"properties": {"a": {"anyOf": [{"not": {}}]}}}'}, "#/properties/a/anyOf/0"),
    ({"json_schema": '{"type": "string", "format": "colour"}'}, "colour"),
    ({"json_schema": '{"type": "string", "minLength": 1, "pattern": "a"}'}, "together"),
    ({"json_schema": {"type": "object"}}, "wanted a string"),
    ({"regex": 3}, "wanted a string"),
    ({"regex": "a\0b"}, "NUL"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "at most"),
    ({"structural_tag": "{}"}, "structural_tag"),
    ({"structural_tag": "[]"}, "structural_tag"),
    ({"structural_tag": '{"structures": [{"begin": "<a>"}], "triggers": ["<"]}'}, "structural_tag"),
    ({"regex": "a" * 1_000_001}, "at most 1000000"),
    ({"regex": "[0-9]{3}", "min_new_tokens": 9}, "min_new_tokens"),
]


def test_a_grammar_that_is_none_is_a_400(shared_server):
    def refused(case: tuple[dict, str]) -> None:
        sampling, named = case
        answer = shared_server.post(
            "/generate", text="go", sampling_params={"max_new_tokens": 20, **sampling}
        )
        assert answer.status_code == 400 and named in answer.text, answer.text

    hold_each(WRONG, refused)
    stream = shared_server.post("/generate", text="go", sampling_params={"regex": "("}, stream=True)
    assert "Failed to compile regex grammar" in stream.text and stream.text.endswith("data: [DONE]\n\n")
    for none in ("", None):
        assert len(generate(shared_server, tokens=3, ignore_eos=True, regex=none)[0]["output_ids"]) == 3


BOMBS = [
    {"json_schema": '{"type":"array","items":' * 20_000 + "{}" + "}" * 20_000},
    {"regex": "(" * 200_000 + "a" + ")" * 200_000},
    {"ebnf": "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000},
]


def test_a_bomb_costs_its_own_request_only(shared_server):
    """It ends the compiler's process or is refused by it; the engine answers meanwhile and compiles after."""
    for bomb in BOMBS:
        done = threading.Event()
        answers: list[httpx.Response] = []

        def ask(bomb=bomb, answers=answers, done=done) -> None:
            answers.append(shared_server.post("/generate", text="go", sampling_params=bomb))
            done.set()

        thread = threading.Thread(target=ask)
        thread.start()
        while not done.wait(0.05):
            assert shared_server.client.get("/health").status_code == 200
        thread.join()
        assert answers[0].status_code == 400 and "Failed to compile" in answers[0].text
    assert generate(shared_server, regex="yes|no")[0]["text"] in ("yes", "no")


async def test_a_grammar_that_compiles_for_ever_is_given_up():
    compiler = GrammarCompiler(make_tokenizer(), VOCABULARY, [EOS], seconds=1)
    endless = " | ".join(f'"{number}"' for number in range(60_000))
    try:
        with pytest.raises(BadRequest, match="too long"):
            await compiler.compiled(wanted_grammar({"ebnf": f"root ::= {endless}"}))
        compiled = await compiler.compiled(wanted_grammar({"regex": "ab"}))
    finally:
        compiler.close()
    constraint, logits = Constraint(compiled), torch.zeros(VOCABULARY)
    constraint.restrict(logits)
    assert logits.isfinite().nonzero().flatten().tolist() == [A]
    assert not constraint.accept(B) and constraint.accept(A) and not constraint.complete


async def test_without_xgrammar_the_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadRequest, match="pip install xgrammar"):
        await GrammarCompiler(make_tokenizer(), VOCABULARY, [EOS]).compiled(wanted_grammar({"regex": "a"}))


FORMATS = [
    {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    {"type": "json_schema", "schema": PERSON},
]


def test_response_formats_of_chats_and_completions(shared_server):
    chat = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 400, "seed": 1}
    for form in FORMATS:
        answer = shared_server.post("/v1/chat/completions", response_format=form, **chat).json()
        jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), PERSON)
    answer = shared_server.post(
        "/v1/completions", prompt="who?", max_tokens=400, seed=1, response_format=FORMATS[0]
    ).json()
    jsonschema.validate(json.loads(answer["choices"][0]["text"]), PERSON)
    any_object = {"type": "json_object"}
    text = shared_server.post("/v1/chat/completions", response_format=any_object, **chat).json()
    assert text["choices"][0]["message"]["content"].startswith("{")
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "aye"}}
    answer = shared_server.post("/v1/chat/completions", response_format=tag, **chat).json()
    assert answer["choices"][0]["message"]["content"] == "aye"
    for wrong in (
        {"type": "xml"},
        "json",
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
    ):
        refused = shared_server.post("/v1/chat/completions", response_format=wrong, **chat)
        assert refused.status_code == 400 and "response_format" in refused.text
