"""``/generate``: results, log-probs, stop conditions, batches, streams, refusals."""

import asyncio
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.build import build_server
from slime.backends.embedded_engine.http.bodies import MAX_BODY_BYTES
from slime.backends.embedded_engine.tokenizer import Tokenizer
from tests.backends.embedded_engine.test_hostile import asks
from tests.engines.embedded import (
    CONTEXT,
    ENDLESS,
    FAMILIES,
    Server,
    make_checkpoint,
    token_logprobs,
)

PROMPT = [10, 20, 30, 40, 50]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def message_of(answer) -> str:
    """Returns the message of an error, whichever shape it has."""
    body = answer.json()
    error = body.get("error", body)
    return error if isinstance(error, str) else error["message"]


def values(entries) -> list:
    return [entry[0] for entry in entries]


def largest_gap(answer, prompt, model, temperature=1.0) -> float:
    ids = prompt + answer["output_ids"]
    expected = token_logprobs(model, ids, temperature)[len(prompt) - 1 :]
    found = values(answer["meta_info"]["output_token_logprobs"])
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


async def test_a_long_text_leaves_time_for_health_checks(checkpoint, monkeypatch):
    state = build_server(EmbeddedServerArgs(model_path=str(checkpoint[0])))
    begun, answered = threading.Event(), threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        begun.set()
        assert answered.wait(60), "the health check waited for the text"
        return [1, 2]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    state.engine.start(asyncio.get_running_loop())
    async with asks(state) as client:
        slow = asyncio.create_task(client.post("/tokenize", json={"prompt": "ab c" * 100_000}))
        assert await asyncio.to_thread(begun.wait, 60)
        assert (await client.get("/health")).status_code == 200
        answered.set()
        assert (await slow).json()["tokens"] == [1, 2]
    state.engine.stop()


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_the_limit_is_refused(shared_server, announced):
    body = b'{"prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    content = body if announced else iter([body])
    answer = shared_server.client.post("/tokenize", content=content)
    assert answer.status_code == 413 and str(MAX_BODY_BYTES) in answer.text


@pytest.mark.parametrize("family", [*FAMILIES, "llama3"])
def test_logprobs_are_those_of_transformers(tmp_path, family):
    rope = {"rope_parameters": LLAMA3} if family == "llama3" else {}
    model = make_checkpoint(tmp_path, "llama" if rope else family, **rope)
    limits = ("--max-running-requests", "6", "--chunked-prefill-size", "40")
    server = Server(tmp_path, *limits)
    try:
        server.wait_ready()

        def gap(i: int) -> float:
            prompt = [(7 * i + 3 * j) % 256 for j in range(3 + 25 * (i % 5))]
            temperature = (0.5, 1.0, 1.3)[i % 3]
            sampling = {"max_new_tokens": 10 + i, "temperature": temperature, "ignore_eos": True}
            sampling["sampling_seed"] = i
            if i % 2:
                sampling |= {"top_p": 0.9, "top_k": 50}
            answer = server.generate(prompt, sampling, return_logprob=True)
            assert len(answer["output_ids"]) == 10 + i
            return largest_gap(answer, prompt, model, temperature)

        with ThreadPoolExecutor(12) as pool:
            assert max(pool.map(gap, range(24))) < 1e-5
    finally:
        server.stop()


def test_greedy_is_the_likeliest_token_and_unscaled(shared_server, checkpoint):
    answer = shared_server.generate(
        PROMPT,
        {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=1,
    )
    meta = answer["meta_info"]
    for chosen, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert chosen == top[0]
    assert largest_gap(answer, PROMPT, checkpoint[1]) < 1e-5


@pytest.mark.parametrize("temperature", [9e-7, 1e-44, 1e-300])
def test_next_to_no_temperature_is_none(shared_server, temperature):
    def answer(temperature: float):
        sampling = {"max_new_tokens": 8, "temperature": temperature, "ignore_eos": True}
        return shared_server.generate(PROMPT, sampling, return_logprob=True)

    found, expected = answer(temperature), answer(0.0)
    assert found["output_ids"] == expected["output_ids"]
    triples = [values(each["meta_info"]["output_token_logprobs"]) for each in (found, expected)]
    assert triples[0] == pytest.approx(triples[1], abs=1e-5)


def test_a_prompt_is_scored_without_generating(shared_server, checkpoint):
    prompt = [(5 * i) % 256 for i in range(60)]
    sampling = {"max_new_tokens": 0, "temperature": 0.5}
    for start in (0, 20):
        answer = shared_server.generate(
            prompt,
            sampling,
            return_logprob=True,
            logprob_start_len=start,
            token_ids_logprob=[7, 9],
            return_text_in_logprobs=True,
        )
        meta = answer["meta_info"]
        entries = meta["input_token_logprobs"]
        assert entries[0][:2] == [None, prompt[start]] and isinstance(entries[1][2], str)
        expected = token_logprobs(checkpoint[1], prompt)[start:]
        assert values(entries[1:]) == pytest.approx(expected, abs=1e-5)
        assert meta["input_token_ids_logprobs"][0] is None
        assert [e[1] for e in meta["input_token_ids_logprobs"][1]] == [7, 9]
        assert meta["finish_reason"] == {"type": "length", "length": 0} and answer["output_ids"] == []


def test_default_logprobs_cover_the_response_only(shared_server):
    meta = shared_server.generate(PROMPT, {"max_new_tokens": 2}, return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == [] and meta["output_token_logprobs_length"] == 2


def test_stop_token_is_kept_in_the_ids_and_left_out_of_the_text(shared_server):
    sampling = {"max_new_tokens": 30, "temperature": 0}
    free = shared_server.generate(PROMPT, {**sampling, "ignore_eos": True})["output_ids"]
    stop = free[4]
    cut = free[: free.index(stop) + 1]
    answer = shared_server.generate(PROMPT, {**sampling, "stop_token_ids": [stop]})
    assert answer["output_ids"] == cut
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    shown = shared_server.post("/detokenize", tokens=cut[:-1]).json()["text"]
    assert answer["text"] == shown
    untrimmed = shared_server.generate(PROMPT, {**sampling, "stop_token_ids": [stop], "no_stop_trim": True})
    assert untrimmed["text"] == shared_server.post("/detokenize", tokens=cut).json()["text"]
    late = shared_server.generate(
        PROMPT, {**sampling, "stop_token_ids": [stop], "min_new_tokens": len(cut) + 3}
    )
    assert stop not in late["output_ids"][: len(cut) + 2]


@pytest.mark.parametrize("stop", [{"stop": "ba"}, {"stop": ["zz", "ba"]}, {"stop_regex": "b+a"}])
def test_stop_text_ends_the_text_and_stays_in_the_ids(shared_server, stop):
    ids = shared_server.post("/tokenize", prompt="ab").json()["tokens"]
    bias = {str(token): 40.0 for token in ids}
    for seed in range(4):
        sampling = {"max_new_tokens": 60, "logit_bias": bias, "sampling_seed": seed, **stop}
        answer = shared_server.generate(PROMPT, sampling)
        whole = shared_server.post("/detokenize", tokens=answer["output_ids"]).json()["text"]
        assert whole.endswith("ba") and whole.count("ba") == 1
        assert answer["text"] == (whole if "stop_regex" in stop else whole.removesuffix("ba"))
        matched = stop.get("stop_regex", "ba")
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


def test_a_regex_that_never_ends_costs_its_own_request_only(shared_server):
    ids = shared_server.post("/tokenize", prompt="a").json()["tokens"]
    sampling = {
        "max_new_tokens": 400,
        "logit_bias": {str(ids[0]): 90.0},
        "stop_regex": "(a|aa)+$x",
        "temperature": 0,
    }
    answer = shared_server.post("/generate", input_ids=PROMPT, sampling_params=sampling)
    assert answer.status_code == 400 and "stop_regex" in answer.json()["error"]["message"]
    assert shared_server.client.get("/health").status_code == 200


def test_penalties_and_biases_shape_the_response(shared_server):
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    banned = shared_server.generate(PROMPT, sampling)["output_ids"][0]
    answer = shared_server.generate(PROMPT, {**sampling, "logit_bias": {str(banned): -1000}})
    assert banned not in answer["output_ids"]
    bias = {str(token): 20.0 for token in range(40)}
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}):
        plain = shared_server.generate(PROMPT, {**sampling, "logit_bias": bias})["output_ids"]
        spread = shared_server.generate(PROMPT, {**sampling, "logit_bias": bias, **penalty})["output_ids"]
        assert len(set(spread)) > len(set(plain))


def test_the_seed_decides_the_response(shared_server):
    def ids(seed: int) -> list[int]:
        sampling = {"max_new_tokens": 12, "sampling_seed": seed, "ignore_eos": True}
        return shared_server.generate(PROMPT, sampling)["output_ids"]

    assert ids(1) == ids(1) != ids(2)


def test_prompts_and_samples_come_back_in_order(shared_server):
    sampling = [{"max_new_tokens": 2, "n": 2}, {"max_new_tokens": 3, "n": 2}]
    answers = shared_server.generate([[1, 2], [3, 4, 5]], sampling, rid=["x", "y"])
    assert [a["meta_info"]["id"] for a in answers] == ["x_0", "x_1", "y_0", "y_1"]
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [2, 2, 3, 3]
    answers = shared_server.generate([[1], [2]], {"max_new_tokens": 1}, return_logprob=[True, False])
    assert ["output_token_logprobs" in a["meta_info"] for a in answers] == [True, False]


def test_a_group_shares_the_keys_of_its_prompt(shared_server, checkpoint):
    prompt = [(3 * i) % 256 for i in range(50)]
    sampling = {"max_new_tokens": 10, "n": 4, "ignore_eos": True}
    answers = shared_server.generate(prompt, sampling, return_logprob=True)
    assert [a["meta_info"]["cached_tokens"] for a in answers] == [0, 50, 50, 50]
    assert len({tuple(a["output_ids"]) for a in answers}) == 4
    assert max(largest_gap(a, prompt, checkpoint[1]) for a in answers) < 1e-5


@pytest.mark.parametrize("interval", [1, 5])
def test_a_stream_repeats_all_so_far_and_ends_as_the_plain_answer(shared_server, interval):
    sampling = {"max_new_tokens": 13, "temperature": 0, "ignore_eos": True, "stream_interval": interval}
    plain = shared_server.generate(PROMPT, sampling, return_logprob=True)
    text = shared_server.post(
        "/generate", input_ids=PROMPT, sampling_params=sampling, return_logprob=True, stream=True
    ).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    for before, after in itertools.pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert chunks[-1]["text"] == plain["text"] and chunks[-1]["output_ids"] == plain["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]
    assert chunks[-1]["meta_info"]["output_token_logprobs"] == plain["meta_info"]["output_token_logprobs"]


def test_a_client_that_leaves_frees_its_place(shared_server):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True},
        "stream": True,
    }
    with shared_server.client.stream("POST", "/generate", json=body) as response:
        next(response.iter_bytes())
    assert shared_server.client.get("/flush_cache", params={"timeout": 50}).status_code == 200


UNSUPPORTED = {"beam_width": 2, "custom_params": {"a": 1}}
WRONG_SAMPLING = [
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": 0},
    {"min_p": -0.1},
    {"frequency_penalty": 3},
    {"repetition_penalty": 0},
    {"max_new_tokens": -1},
    {"max_new_tokens": 2.5},
    {"min_new_tokens": 9, "max_new_tokens": 8},
    {"n": 0},
    {"stop": ["a"] * 33},
    {"stop_regex": "("},
    {"stop_regex": "a" * 257},
    {"logit_bias": {"999": 1}},
    {"temprature": 1},
    *({name: value} for name, value in UNSUPPORTED.items()),
]


@pytest.mark.parametrize("sampling", WRONG_SAMPLING)
def test_a_wrong_sampling_parameter_is_named(shared_server, sampling):
    answer = shared_server.post("/generate", input_ids=PROMPT, sampling_params=sampling)
    assert answer.status_code == 400
    assert next(iter(sampling)) in message_of(answer)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"input_ids": []},
        {"input_ids": [[1], []]},
        {"input_ids": [1, 320]},
        {"input_ids": [-1]},
        {"input_ids": [1.5]},
        {"input_ids": [1] * CONTEXT},
        {"input_ids": [1] * (CONTEXT - 12), "sampling_params": {"max_new_tokens": 13}},
        {"input_ids": [1], "rid": ["a"]},
        {"input_ids": [[1], [2]], "rid": ["a", "a"]},
        {"input_ids": [[1], [2]], "rid": ["a_0", "a"], "sampling_params": [{}, {"n": 2}]},
        {"input_ids": [[1], [2]], "sampling_params": [{}]},
        {"input_ids": [1], "logprob_start_len": 2, "return_logprob": True},
        {"input_ids": [1], "token_ids_logprob": [400], "return_logprob": True},
        {"input_ids": [1], "top_logprobs_num": -1, "return_logprob": True},
        {"input_ids": [1], "return_hidden_states": True},
        {"input_ids": [1], "lora_path": "x"},
    ],
)
def test_a_wrong_request_is_refused(shared_server, body):
    answer = shared_server.post("/generate", **body)
    assert answer.status_code == 400 and message_of(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_shapes_of_sglang(shared_server, stream):
    def answer(**body):
        return shared_server.post("/generate", stream=stream, **body)

    malformed = {"object": "error", "type": "Bad Request", "param": None, "code": 400}
    for response in (answer(input_ids="x"), shared_server.client.post("/generate", content=b"{")):
        assert response.status_code == 400 and malformed.items() <= response.json().items()
    unknown = answer(input_ids=PROMPT, sampling_params={"temprature": 1})
    assert unknown.status_code == 400 and "temprature" in unknown.json()["error"]
    mistyped = answer(input_ids=PROMPT, sampling_params={"temperature": "hot"})
    assert mistyped.status_code == 400 and "temperature" in mistyped.json()["error"]
    wrong = answer(input_ids=PROMPT, sampling_params={"top_p": 2})
    if stream:
        assert wrong.status_code == 200
        first, done = [line.removeprefix("data: ") for line in wrong.text.split("\n\n") if line]
        error = json.loads(first)["error"]
        message = error.pop("message")
        assert done == "[DONE]"
        assert error == {"type": "invalid_request_error", "code": 400, "retryable": False}
    else:
        message = wrong.json()["error"]["message"]
        assert wrong.status_code == 400 and wrong.json() == {"error": {"message": message}}
    assert "top_p" in message


def test_who_took_a_prompt_from_another_sequence_says_so(shared_server):
    sampling = {"max_new_tokens": 2, "ignore_eos": True, "n": 3}
    answers = shared_server.generate([9] * 40, sampling)
    counts = [answer["meta_info"]["cached_tokens"] for answer in answers]
    details = [answer["meta_info"]["cached_tokens_details"] for answer in answers]
    assert counts == [0, 40, 40]
    assert details == [{"device": count, "host": 0} for count in counts]


def test_null_means_the_default_and_unknown_fields_are_ignored(shared_server):
    sampling = dict.fromkeys(("temperature", "top_p", "top_k", "stop", "sampling_seed"))
    answer = shared_server.generate(PROMPT, {**sampling, "max_new_tokens": 1}, model=None, background=False)
    assert answer["meta_info"]["completion_tokens"] == 1


@pytest.mark.parametrize("content", [b"{", b"[]", b"3", b"\xff", b'{"input_ids": "\\ud800"}'])
def test_a_body_that_is_no_object_is_refused(shared_server, content):
    assert shared_server.client.post("/generate", content=content).status_code == 400


def test_each_prompt_has_the_ids_that_were_named_for_it(shared_server):
    body = {
        "input_ids": [[5, 6], [7, 8], [9]],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
    }
    for ids, wanted in (([[1], None, [2, 3]], [[1], [], [2, 3]]), ([1, 2], [[1, 2]] * 3)):
        answers = shared_server.post("/generate", token_ids_logprob=ids, **body).json()
        found = [answer["meta_info"].get("output_token_ids_logprobs") or [[]] for answer in answers]
        assert [[entry[1] for entry in first] for first, *_ in found] == wanted
