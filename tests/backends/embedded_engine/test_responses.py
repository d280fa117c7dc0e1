"""What answers say of a sequence: which of its tokens, log-probs and text, in each of the three forms."""

import base64
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.backends.embedded_engine.http.answers import AnswerStream, Part, Reading
from slime.backends.embedded_engine.http.openai_objects import (
    chat_logprobs,
    completion_logprobs,
    finish_fields,
    usage,
)
from slime.backends.embedded_engine.http.responses import (
    ResponseBuilder,
    final_text,
    shown_ids,
    trim_stop,
    version_spans,
)
from slime.backends.embedded_engine.http.streaming import TextStream, _possible_stop
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import LogprobOptions, Logprobs, Nucleus, Progress, Sequence
from slime.backends.embedded_engine.tool_calls.formats import FORMATS
from slime.utils.model_inputs import SequenceInputs
from tests.each import hold_each


class Letters:
    """A tokenizer whose ids are the places of letters."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + token) for token in ids if not (skip_special_tokens and token == 25))


LETTERS = Letters()


def response(*output, prompt=(0, 1), reason=None, options=None, rid="r", **params):
    """A response whose n-th token has the log-prob -n, and -10 n is what the likeliest one has."""
    options = options or LogprobOptions(True, 0, 1, (9,))
    sequence = Sequence(rid, SequenceInputs(list(prompt)), SamplingParams(**params), options, noise_seed=0)
    sequence.output_ids = list(output)
    sequence.finish_reason = reason
    numbers = range(1, len(output) + 1)
    sequence.output_logprobs = Logprobs(
        [-float(n) for n in numbers], [[(-10.0 * n, 3)] for n in numbers], [[(-20.0 * n, 9)] for n in numbers]
    )
    sequence.prompt_logprobs = Logprobs([None, -0.5], [None, [(-0.25, 2)]], [None, [(-0.75, 9)]])
    return sequence


def meta_of(sequence, start=0, progress=None, **options):
    builder = ResponseBuilder(sequence, LETTERS, **options)
    return builder.build("text", "v", start, progress)["meta_info"]


def test_an_answer_has_the_tokens_since_the_last_one():
    sequence = response(4, 5, 6, 7)
    sequence.settled, sequence.cached_tokens, sequence.num_retractions = 3, 1, 2
    for progress in (None, Progress(3, False)):
        answer = ResponseBuilder(sequence, LETTERS, prompt_ids=True).build("text", "v", 1, progress)
        assert (answer["text"], answer["output_ids"], answer["prompt_token_ids"]) == ("text", [5, 6], [0, 1])
        meta = answer["meta_info"]
        expected = {
            **{"id": "r", "finish_reason": None, "prompt_tokens": 2, "weight_version": "v"},
            **{"num_retractions": 2, "reasoning_tokens": 0, "completion_tokens": 3, "cached_tokens": 1},
            **{"cached_tokens_details": {"device": 1, "host": 0}, "dp_rank": None},
            "input_token_logprobs": [(None, 0, None), (-0.5, 1, None)],
            "output_token_logprobs": [(-2.0, 5, None), (-3.0, 6, None)],
            "output_token_logprobs_length": 3,
            "input_top_logprobs": [None, [(-0.25, 2, None)]],
            "output_top_logprobs": [[(-20.0, 3, None)], [(-30.0, 3, None)]],
            "input_token_ids_logprobs": [None, [(-0.75, 9, None)]],
            "output_token_ids_logprobs": [[(-40.0, 9, None)], [(-60.0, 9, None)]],
        }
        times = {name: meta.pop(name) for name in ("e2e_latency", "response_sent_to_client_ts")}
        assert meta == expected
        assert 0 <= times["e2e_latency"] < 60 and times["response_sent_to_client_ts"] > 1e9
    bare = ResponseBuilder(response(4, options=LogprobOptions()), None).build(None, "v")
    assert "text" not in bare and "prompt_token_ids" not in bare
    assert not [name for name in bare["meta_info"] if "logprob" in name or "mask" in name or "top_p" in name]


def test_log_probs_have_texts_where_they_are_asked_for_and_there_is_a_tokenizer():
    sequence = response(4, 25)
    sequence.settled = 2
    meta = meta_of(sequence, text_in_logprobs=True)
    assert meta["output_token_logprobs"] == [(-1.0, 4, "e"), (-2.0, 25, "z")]
    assert meta["input_top_logprobs"] == [None, [(-0.25, 2, "c")]]
    without = ResponseBuilder(sequence, None, text_in_logprobs=True).build(None, "v")["meta_info"]
    assert without["output_token_logprobs"] == [(-1.0, 4, None), (-2.0, 25, None)]


def test_a_prompt_tells_of_itself_from_where_it_was_asked_and_once_it_is_computed():
    sequence = response(4, options=LogprobOptions(True, 1))
    sequence.prompt_logprobs = Logprobs([-0.5], [None], [None])
    assert meta_of(sequence)["input_token_logprobs"] == [(-0.5, 1, None)]
    sequence.prompt_logprobs = Logprobs()
    meta = meta_of(sequence)
    assert meta["input_token_logprobs"] == []
    assert "input_top_logprobs" not in meta and "input_token_ids_logprobs" not in meta


def test_where_no_token_is_wanted_the_rows_behind_the_prompt_are_told():
    sequence = response(max_new_tokens=0)
    sequence.output_logprobs = Logprobs([], [[(-1.0, 3)]], [[(-2.0, 9)]])
    meta = meta_of(sequence)
    assert meta["output_top_logprobs"] == [[(-1.0, 3, None)]]
    assert meta["output_token_ids_logprobs"] == [[(-2.0, 9, None)]]


def test_only_the_last_answer_says_why_it_ended_and_which_weights_made_it():
    sequence = response(4, 5, reason={"type": "stop", "matched": 5})
    for version in ("1", "1", "2"):
        sequence.record_version(version)
    assert "weight_versions" not in meta_of(sequence, progress=Progress(1, False))
    meta = meta_of(sequence)
    assert meta["finish_reason"] == {"type": "stop", "matched": 5}
    wanted = [{"version": "1", "start": 1, "end": 2}, {"version": "2", "start": 1, "end": 2}]
    assert meta["weight_versions"] == version_spans(sequence) == wanted


def test_nuclei_are_told_in_either_manner():
    sequence = response(4, 5, 6, tells_nuclei=True)
    sequence.settled, sequence.tells_mask = 3, True
    sequence.nuclei = [Nucleus(np.arange(n, dtype=np.int32), -float(n)) for n in (1, 2, 3)]
    meta = meta_of(sequence, 1)
    assert meta["output_token_sampling_mask"] == [[0, 1], [0, 1, 2]]
    assert meta["output_token_sampling_logprobs"] == [-2.0, -3.0]
    assert meta["output_token_sampling_mask_length"] == 3
    read = lambda name: np.frombuffer(base64.b64decode(meta[name]), np.int32).tolist()
    assert read("top_p_token_ids") == [0, 1, 0, 1, 2] and read("top_p_token_offsets") == [0, 2, 5]


def test_experts_are_told_of_all_tokens_but_the_last():
    sequence = response(4, 5, reason={"type": "length", "length": 2})
    assert "routed_experts" not in meta_of(sequence)
    sequence.routes_from = 1
    sequence.routes = [torch.arange(4, dtype=torch.int32).reshape(4, 1, 1)]
    meta = meta_of(sequence)
    told = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).tolist()
    assert (told, meta["routed_experts_start_len"]) == ([1, 2], 1)
    sequence.routes = []
    assert "routed_experts" not in meta_of(sequence)


def test_the_text_of_a_response_is_decoded_without_what_ended_it():
    sequence = response(0, 25, 1, 2, reason={"type": "stop", "matched": "c"})
    assert final_text(sequence, LETTERS) == "ab" and final_text(sequence, None) is None
    plain = response(0, 25, 1, reason={"type": "stop", "matched": 1}, skip_special_tokens=False)
    assert final_text(plain, LETTERS) == "az"


TRIMS = [
    (None, False, "abXcd", "abXcd", [0, 1]),
    ({"type": "stop", "matched": "X"}, False, "abXcd", "ab", [0, 1]),
    ({"type": "stop", "matched": "X"}, True, "abXcd", "abX", [0, 1]),
    ({"type": "stop", "matched": "X+"}, False, "abXcd", "abXcd", [0, 1]),
    ({"type": "stop", "matched": "ab"}, False, "abXcd", "", [0, 1]),
    ({"type": "stop", "matched": 1}, False, "abXcd", "abXcd", [0]),
    ({"type": "stop", "matched": 1}, True, "abXcd", "abXcd", [0, 1]),
    ({"type": "length", "length": 2}, False, "abXcd", "abXcd", [0, 1]),
]


def test_what_ended_a_response_is_left_out_of_its_text_unless_it_is_wanted():
    def check(case):
        reason, kept, text, trimmed, ids = case
        sequence = response(0, 1, reason=reason, no_stop_trim=kept)
        assert (trim_stop(sequence, text), shown_ids(sequence)) == (trimmed, ids)

    hold_each(TRIMS, check)


def test_what_may_become_a_stop_string_is_held_back():
    table = {
        ("ab", ()): 0,
        ("ab", ("bc",)): 1,
        ("ab", ("abc", "bd")): 2,
        ("xb", ("abc",)): 0,
        ("", ("a",)): 0,
    }
    assert {case: _possible_stop(*case) for case in table} == table
    sequence = response(0, 1, 2, 3, stop=("cx",))
    stream = TextStream(SimpleNamespace(tokenizer=LETTERS), sequence)
    deltas = [stream.delta(Progress(end, False)) for end in (1, 3, 3, 4)]
    assert deltas == ["a", "b", "", "cd"]
    sequence.finish_reason = {"type": "length", "length": 4}
    assert stream.delta(Progress(4, True)) == ""
    assert TextStream(SimpleNamespace(tokenizer=None), sequence).delta(Progress(4, True)) is None


@pytest.mark.parametrize(("prompts", "counted"), [(1, 2), (2, 4), (4, 8)])
def test_samples_of_one_prompt_count_its_tokens_once(prompts, counted):
    sequences = [response(*range(number)) for number in (1, 2, 3, 4)]
    found = usage(sequences, prompts)
    assert (found["prompt_tokens"], found["completion_tokens"], found["total_tokens"]) == (
        *(counted, 10, 10 + counted),
    )
    others = ("prompt_tokens_details", "reasoning_tokens", "completion_tokens_details")
    assert [found[name] for name in others] == [None, 0, None]
    assert usage(sequences[:1], 3)["prompt_tokens"] == 2


def test_why_a_response_ended_is_told_once_it_has():
    sequence = response(4, reason={"type": "stop", "matched": "x"})
    assert finish_fields(sequence, Progress(1, True)) == {"finish_reason": "stop", "matched_stop": "x"}
    nothing = {"finish_reason": None, "matched_stop": None}
    assert finish_fields(sequence, Progress(1, False)) == nothing
    assert finish_fields(response(4), Progress(1, True)) == nothing


def test_completions_have_log_probs_in_lists_and_those_of_a_prompt_before_them():
    sequence = response(4, 25, 6)
    told = completion_logprobs(sequence, LETTERS, 1, 3, prompt=False)
    assert told == {
        **{"tokens": ["z", "g"], "token_logprobs": [-2.0, -3.0], "text_offset": [-1, -1]},
        "top_logprobs": [{"d": -20.0}, {"d": -30.0}],
    }
    both = completion_logprobs(sequence, LETTERS, 0, 1, prompt=True)
    assert both["tokens"] == ["a", "b", "e"] and both["token_logprobs"] == [None, -0.5, -1.0]
    assert both["top_logprobs"] == [None, {"c": -0.25}, {"d": -10.0}]
    sequence.prompt_logprobs = Logprobs()
    assert completion_logprobs(sequence, LETTERS, 0, 1, prompt=True)["tokens"] == ["e"]


def test_chats_have_log_probs_token_by_token():
    told = chat_logprobs(response(4, 25, 6), LETTERS, 1, 3)["content"]
    assert told == [
        {
            **{"token": text, "logprob": value, "bytes": [ord(text)]},
            "top_logprobs": [{"token": "d", "logprob": 10 * value, "bytes": [ord("d")]}],
        }
        for text, value in (("z", -2.0), ("g", -3.0))
    ]
    plain = response(4, 5)
    plain.output_logprobs.top = []
    assert [entry["top_logprobs"] for entry in chat_logprobs(plain, LETTERS, 0, 2)["content"]] == [[], []]


def test_calls_are_numbered_over_a_response_and_their_ids_over_a_chat():
    tools = {"now": {}}
    call = '<tool_call>{"name": "now"}</tool_call>'
    reading = Reading(tools, FORMATS["hermes"], numbers_ids=True, calls_before=3)
    whole = reading.whole(f"Hi{call}{call}")
    assert whole.text == "Hi" and not whole.reasoning and not whole.empty and Part().empty
    function = {"name": "now", "arguments": "{}"}
    wanted = [
        {"id": f"functions.now:{3 + index}", "index": index, "type": "function", "function": function}
        for index in range(2)
    ]
    assert whole.calls == wanted
    stream = AnswerStream(reading)
    assert [stream.feed(call, False).calls, stream.feed(call, True).calls] == [wanted[:1], wanted[1:]]
    assert stream.called == 2 and stream.pending == 0
    assert [stream.feed("<tool", False).text, stream.pending] == ["", 5]
    (unnumbered,) = Reading(tools, FORMATS["hermes"]).whole(call).calls
    assert unnumbered["id"].startswith("call_") and len(unnumbered["id"]) == 29
    plain = AnswerStream(Reading({}))
    assert (
        plain.feed("x", False) == Part("x") and plain.pending == 0 and Reading({}).whole(call) == Part(call)
    )
