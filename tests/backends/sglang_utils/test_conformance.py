"""SGLang's /generate as the rollout code relies on it, against the embedded engine and real SGLang.

    bash scripts/conformance.sh http://127.0.0.1:30000

runs the same tests against an SGLang that serves a small fp32 checkpoint directory of this machine.
"""

import json
from itertools import pairwise

import pytest
import torch

from tests.engines.under_test import PROMPT

META_INFO = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "weight_versions",
    "num_retractions",
    "completion_tokens",
    "cached_tokens",
    "e2e_latency",
}


@pytest.fixture
def engine(engine_under_test):
    engine_under_test.client.continue_generation()
    return engine_under_test


def test_an_answer_has_text_ids_and_meta_info(engine):
    # ids that the tokenizer lacks have no text in ours and a mark in SGLang's
    answer = engine.generate(temperature=1.0, logit_bias={str(PROMPT[0]): 100.0})
    assert set(answer) >= {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert set(meta) >= META_INFO
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 4)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert answer["text"] == engine.tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
    spans = [{"version": meta["weight_version"], "start": 0, "end": 4}]
    assert [{key: span[key] for key in spans[0]} for span in meta["weight_versions"]] == spans


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_of_the_scaled_logits_before_filtering(engine, temperature):
    answer = engine.generate(max_new_tokens=12, temperature=temperature, top_k=5, top_p=0.8, min_p=0.01)
    engine.assert_logprobs(PROMPT, answer, temperature)


def test_greedy_takes_the_most_likely_token_with_unscaled_logprobs(engine):
    answer = engine.generate(max_new_tokens=8, temperature=0)
    engine.assert_logprobs(PROMPT, answer)
    table = engine.expected_logprobs(PROMPT + answer["output_ids"])
    assert answer["output_ids"] == table.argmax(-1)[len(PROMPT) - 1 : -1].tolist()


def test_top_k_1_and_tiny_top_p_are_greedy(engine):
    greedy = engine.generate(max_new_tokens=8, temperature=0)["output_ids"]
    assert engine.generate(max_new_tokens=8, temperature=1.0, top_k=1)["output_ids"] == greedy
    assert engine.generate(max_new_tokens=8, temperature=1.0, top_p=1e-6)["output_ids"] == greedy
    assert engine.generate(max_new_tokens=8, temperature=1.0, min_p=1.0)["output_ids"] == greedy


def test_prompt_logprobs_start_with_a_token_that_has_none(engine):
    meta = engine.generate(top={"logprob_start_len": 0}, max_new_tokens=1)["meta_info"]
    first, *rest = meta["input_token_logprobs"]
    assert first == [None, PROMPT[0], None]
    assert [triple[1] for triple in rest] == PROMPT[1:]
    expected = engine.expected_logprobs(PROMPT)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([triple[0] for triple in rest]), expected, atol=1e-4, rtol=0)


def test_a_prompt_can_be_scored_without_generating(engine):
    answer = engine.generate(top={"logprob_start_len": 0}, max_new_tokens=0, temperature=0)
    assert answer["output_ids"] == []
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_top_and_chosen_logprobs(engine):
    top = {"top_logprobs_num": 3, "token_ids_logprob": [7, 8]}
    answer = engine.generate(top=top, max_new_tokens=2, temperature=1.0)
    meta = answer["meta_info"]
    table = engine.expected_logprobs(PROMPT + answer["output_ids"])[len(PROMPT) - 1 : -1]
    for row, best, chosen in zip(
        table, meta["output_top_logprobs"], meta["output_token_ids_logprobs"], strict=True
    ):
        assert [triple[1] for triple in best] == row.topk(3).indices.tolist()
        assert [triple[1] for triple in chosen] == [7, 8]
        assert chosen[0][0] == pytest.approx(float(row[7]), abs=1e-4)


def test_logprobs_carry_text_on_request(engine):
    answer = engine.generate(top={"return_text_in_logprobs": True}, max_new_tokens=3, temperature=0)
    texts = [triple[2] for triple in answer["meta_info"]["output_token_logprobs"]]
    assert texts == [engine.tokenizer.decode([token]) for token in answer["output_ids"]]


def test_without_return_logprob_there_are_none(engine):
    meta = engine.generate(top={"return_logprob": False})["meta_info"]
    assert "output_token_logprobs" not in meta


def test_text_and_its_ids_are_the_same_prompt(engine):
    text = "12+34="
    by_text = engine.generate(text, temperature=0, max_new_tokens=6)
    by_ids = engine.generate(engine.tokenizer(text)["input_ids"], temperature=0, max_new_tokens=6)
    assert by_text["output_ids"] == by_ids["output_ids"]


def test_several_prompts_are_answered_in_their_order(engine):
    prompts = [[40, 41], [42], [43, 44, 45]]
    answers = engine.generate(prompts, temperature=0)
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 1, 3]
    single = [engine.generate(prompt, temperature=0)["output_ids"] for prompt in prompts]
    assert [answer["output_ids"] for answer in answers] == single


def test_one_prompt_in_a_list_and_n_above_one_give_lists(engine):
    assert len(engine.generate([PROMPT])) == 1
    answers = engine.generate(n=3, temperature=1.0, max_new_tokens=8)
    assert len(answers) == 3
    for answer in answers:
        engine.assert_logprobs(PROMPT, answer)


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(engine):
    greedy = engine.generate(max_new_tokens=6, temperature=0)["output_ids"]
    stop = greedy[3]
    first = greedy.index(stop)
    sampling = {"max_new_tokens": 6, "temperature": 0, "stop_token_ids": [stop], "ignore_eos": False}
    answer = engine.generate(**sampling)
    assert answer["output_ids"] == greedy[: first + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == engine.tokenizer.decode(greedy[:first])
    kept = engine.generate(**sampling, no_stop_trim=True)
    assert kept["text"] == engine.tokenizer.decode(greedy[: first + 1])
    ignored = engine.generate(**{**sampling, "ignore_eos": True})
    assert ignored["output_ids"] == greedy


def ascii_continuation(engine) -> tuple[list[int], list[int], str]:
    """A prompt whose greedy continuation has a plain character in fourth place or later."""
    for token in range(30, 90):
        prompt = [token, 41]
        ids = engine.generate(prompt, max_new_tokens=10, temperature=0)["output_ids"]
        pieces = [engine.tokenizer.decode([i]) for i in ids]
        for place in range(3, 10):
            piece = pieces[place]
            if piece.isascii() and piece.strip() and piece not in "".join(pieces[:place]):
                return prompt, ids[: place + 1], piece
    pytest.fail("no prompt with a plain continuation")


def test_a_stop_string_is_in_the_ids_and_not_in_the_text(engine):
    prompt, ids, stop = ascii_continuation(engine)
    answer = engine.generate(prompt, max_new_tokens=10, temperature=0, stop=[stop])
    assert answer["output_ids"] == ids
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == engine.tokenizer.decode(ids).removesuffix(stop)


def test_min_new_tokens_holds_back_a_stop_token(engine):
    stop = engine.generate(max_new_tokens=1, temperature=0)["output_ids"][0]
    sampling = {"max_new_tokens": 6, "temperature": 0, "stop_token_ids": [stop], "ignore_eos": False}
    assert engine.generate(**sampling)["output_ids"] == [stop]
    answer = engine.generate(**sampling, min_new_tokens=4)
    assert len(answer["output_ids"]) >= 4
    assert stop not in answer["output_ids"][:3]


def test_unknown_top_level_fields_are_ignored_and_null_means_default(engine):
    engine.generate(top={"no_such_field": 1}, temperature=None, top_p=None)


@pytest.mark.parametrize(
    "sampling",
    [
        {"no_such_parameter": 1},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"frequency_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"max_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 3},
        {"max_new_tokens": 100_000},
        {"regex": "a", "ebnf": "b"},
    ],
    ids=str,
)
def test_bad_sampling_parameters_are_a_400_with_a_reason(engine, sampling):
    response = engine.try_generate(**sampling)
    assert response.status_code == 400, response.text
    assert response.json()["error"]


def test_a_400_for_an_unknown_parameter_names_it(engine):
    assert "no_such_parameter" in engine.try_generate(no_such_parameter=1).text


@pytest.mark.parametrize("body", [{}, {"input_ids": []}], ids=str)
def test_a_missing_or_empty_prompt_is_a_400(engine, body):
    assert engine.post("/generate", **body).status_code == 400


def test_a_prompt_beyond_the_context_is_a_400(engine):
    assert engine.try_generate([40] * 100_000).status_code == 400


def stream(engine, **body) -> list[str]:
    lines = []
    with engine.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line:
                assert line.startswith("data: ")
                lines.append(line.removeprefix("data: "))
    return lines


def test_a_stream_repeats_everything_so_far_and_ends_with_done(engine):
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    *chunks, done = stream(engine, input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
    assert done == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    assert parsed[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in parsed[:-1])
    whole = engine.generate(max_new_tokens=6, temperature=0)
    assert parsed[-1]["output_ids"] == whole["output_ids"]
    assert parsed[-1]["text"] == whole["text"]
    for chunk in parsed:
        length = chunk["meta_info"]["completion_tokens"]
        assert len(chunk["meta_info"]["output_token_logprobs"]) == length


@pytest.mark.parametrize(
    "ending",
    [{"stop": "bbb"}, {"stop": "bbb", "no_stop_trim": True}, {"stop_regex": "b{3}"}],
    ids=str,
)
def test_the_text_of_a_stream_never_shrinks(engine, ending):
    letter = engine.tokenizer.encode("b", add_special_tokens=False)[0]
    sampling = {"max_new_tokens": 9, "temperature": 0, "logit_bias": {str(letter): 100.0}, **ending}
    *chunks, _ = stream(engine, input_ids=PROMPT, sampling_params=sampling)
    texts = [json.loads(chunk)["text"] for chunk in chunks]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert texts[-1] == engine.generate(PROMPT, **sampling)["text"]


def test_completions_and_chat(engine):
    sampling = {"model": "any", "max_tokens": 5, "temperature": 0}
    answer = engine.post("/v1/completions", prompt="12+34=", **sampling).json()
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["completion_tokens"] <= 5
    messages = [{"role": "user", "content": "12+34="}]
    answer = engine.post("/v1/chat/completions", messages=messages, **sampling).json()
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert isinstance(answer["choices"][0]["message"]["content"], str)


def test_information_endpoints(engine):
    info = engine.client.model_info()
    assert set(info) >= {"model_path", "tokenizer_path", "is_generation", "weight_version"}
    assert engine.client.server_info()["model_path"]
    assert engine.http.get("/v1/models").json()["data"][0]["id"]
    assert engine.http.get("/no_such_endpoint").status_code == 404
    (load,) = engine.client.loads()["loads"]
    assert set(load) >= {"dp_rank", "num_running_reqs", "num_waiting_reqs", "num_used_tokens"}
    assert engine.client.health(timeout=120)
