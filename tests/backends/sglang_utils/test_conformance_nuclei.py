"""Which tokens each was drawn among, as SGLang's ``return_sampling_mask`` tells it; see test_conformance.py.

What trains on it reads the answers of either engine, and those of an engine like the original's.
"""

import json
import math
from itertools import pairwise

import pytest
import torch

from slime.utils.engine_meta import ASKS_FOR_NUCLEI
from slime.utils.types import Sample
from tests.backends.sglang_utils.test_conformance import stream
from tests.each import hold_each
from tests.engines.under_test import PROMPT

MASK, WITHIN = "output_token_sampling_mask", "output_token_sampling_logprobs"
ASKED = {"return_sampling_mask": True}
CUTS = [
    {"top_k": 7},
    {"top_p": 0.9, "top_k": 300},
    {"top_p": 0.5, "top_k": 40, "temperature": 0.7},
    {"top_p": 0.97, "top_k": 300, "temperature": 1.6},
    {"top_p": 0.9, "top_k": 300, "min_p": 0.3},
    {"top_k": 1},
    {"temperature": 0.0},
]


@pytest.fixture
def engine(engine_under_test):
    engine_under_test.client.continue_generation()
    return engine_under_test


def kept_of(p: torch.Tensor, cut: dict[str, float]) -> set[int]:
    """By the definition: the likeliest, up to the one with which their probability reaches top_p."""
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    keep = (before <= cut.get("top_p", 1.0)) & (p[order] >= cut.get("min_p", 0.0) * p.max())
    return set(order[keep][: int(cut.get("top_k", len(p)))].tolist())


def within(engine, tokens: list[int], nuclei: list[list[int]], temperature: float) -> list[float]:
    """Log-probs of the last tokens within their nuclei, by a model of transformers."""
    logits = engine.expected_logprobs(PROMPT + tokens).double() / (temperature or 1.0)
    rows = logits[len(PROMPT) - 1 : -1]
    return [
        float(row[token] - row[nucleus].logsumexp(-1))
        for row, token, nucleus in zip(rows, tokens, nuclei, strict=True)
    ]


def test_nuclei_and_log_probs_within_them_are_those_of_the_cuts(engine):
    def check(cut):
        answer = engine.generate(top=ASKED, **{"max_new_tokens": 12, "temperature": 1.0, **cut})
        meta, tokens = answer["meta_info"], answer["output_ids"]
        temperature = cut.get("temperature", 1.0)
        assert (
            len(meta[MASK]) == len(meta[WITHIN]) == len(tokens) == meta["output_token_sampling_mask_length"]
        )
        p = torch.softmax(engine.expected_logprobs(PROMPT + tokens).double() / (temperature or 1.0), -1)
        greedy = cut if temperature else {"top_k": 1}
        for row, nucleus in zip(p[len(PROMPT) - 1 : -1], meta[MASK], strict=True):
            assert set(nucleus) == kept_of(row, greedy) and len(set(nucleus)) == len(nucleus)
        assert meta[WITHIN] == pytest.approx(within(engine, tokens, meta[MASK], temperature), abs=1e-4)
        # beside them the usual ones, over the whole vocabulary
        engine.assert_logprobs(PROMPT, answer, temperature or 1.0)

    hold_each(CUTS, check)


def test_a_sample_has_the_nuclei_of_its_answer_and_log_probs_within_them(engine):
    answer = engine.generate(top=ASKED, max_new_tokens=9, temperature=1.0, top_p=0.8, top_k=300)
    meta, sample = answer["meta_info"], Sample(tokens=list(PROMPT))
    log_probs = [triple[0] for triple in meta["output_token_logprobs"]]
    sample.append_response_tokens(tokens=answer["output_ids"], log_probs=log_probs, meta_info=meta)
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    nuclei = [ids[begin:end] for begin, end in pairwise(offsets)]
    assert nuclei == meta[MASK] and sample.rollout_log_probs == meta[WITHIN]
    assert sample.rollout_log_probs == pytest.approx(
        within(engine, answer["output_ids"], nuclei, 1.0), abs=1e-4
    )


def test_a_stream_tells_of_all_tokens_so_far(engine):
    params = {"max_new_tokens": 6, "ignore_eos": True, "top_k": 5}
    *chunks, _ = stream(engine, input_ids=PROMPT, sampling_params=params, return_logprob=True, **ASKED)
    events = [json.loads(chunk) for chunk in chunks]
    for event in events:
        count = len(event["output_ids"])
        assert [len(nucleus) for nucleus in event["meta_info"][MASK]] == [5] * count
        assert len(event["meta_info"][WITHIN]) == count
    assert len(events[-1]["output_ids"]) == 6


def test_a_top_k_that_is_none_or_too_large_is_refused(engine):
    for cut in ({}, {"top_p": 0.9}, {"top_k": -1}, {"top_k": 5000}):
        answer = engine.try_generate(top=ASKED, max_new_tokens=2, temperature=1.0, **cut)
        assert answer.status_code == 400, cut


def test_an_engine_like_the_originals_may_be_asked_in_its_manner_and_others_ignore_it(engine):
    answer = engine.generate(max_new_tokens=5, temperature=1.0, top_k=6, custom_params=dict(ASKS_FOR_NUCLEI))
    meta, sample = answer["meta_info"], Sample(tokens=list(PROMPT))
    log_probs = [triple[0] for triple in meta["output_token_logprobs"]]
    if "top_p_token_ids" not in meta:
        return engine.assert_logprobs(PROMPT, answer, 1.0)
    sample.append_response_tokens(tokens=answer["output_ids"], log_probs=log_probs, meta_info=meta)
    assert sample.rollout_top_p_token_offsets == [0, 6, 12, 18, 24, 30]
    ids = sample.rollout_top_p_token_ids
    nuclei = [ids[begin : begin + 6] for begin in range(0, 30, 6)]
    assert log_probs == pytest.approx(within(engine, answer["output_ids"], nuclei, 1.0), abs=1e-5)
    assert all(math.isfinite(value) for value in sample.rollout_log_probs)
