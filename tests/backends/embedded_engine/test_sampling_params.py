"""Sampling parameters up to their limits, and not beyond."""

import pytest

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.sampling_params import (
    SamplingParams,
    _items,
    check_pattern,
    parse_sampling_params,
)
from tests.each import hold_each

VOCAB = 100

TAKEN = [
    ({}, SamplingParams()),
    ({"max_new_tokens": None}, SamplingParams(max_new_tokens=2**31)),
    ({"max_new_tokens": 0}, SamplingParams(max_new_tokens=0)),
    ({"max_new_tokens": 5, "min_new_tokens": 5}, SamplingParams(max_new_tokens=5, min_new_tokens=5)),
    ({"n": 4096, "stream_interval": 2**31}, SamplingParams(n=4096, stream_interval=2**31)),
    ({"sampling_seed": -(2**63)}, SamplingParams(sampling_seed=-(2**63))),
    ({"sampling_seed": 2**63 - 1}, SamplingParams(sampling_seed=2**63 - 1)),
    ({"temperature": 9e29, "top_p": 1, "min_p": 1}, SamplingParams(temperature=9e29, min_p=1.0)),
    (
        {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 2},
        SamplingParams(frequency_penalty=-2.0, presence_penalty=2.0, repetition_penalty=2.0),
    ),
    ({"top_k": -1}, SamplingParams()),
    ({"top_k": 1}, SamplingParams(top_k=1)),
    ({"top_k": 2**30 - 1}, SamplingParams(top_k=2**30 - 1)),
    ({"top_k": 2**30}, SamplingParams()),
    ({"stop_token_ids": 2**31}, SamplingParams(stop_token_ids=frozenset({2**31}))),
    ({"stop_token_ids": [0, 3]}, SamplingParams(stop_token_ids=frozenset({0, 3}))),
    ({"stop": ["a"] * 31 + [""]}, SamplingParams(stop=("a",) * 31)),
    ({"stop": "a", "stop_regex": ["b+"]}, SamplingParams(stop=("a",), stop_regex=("b+",))),
    ({"logit_bias": {"99": 3e38, "0": -1}}, SamplingParams(logit_bias=((99, 3e38), (0, -1.0)))),
    ({"logit_bias": {"0000000001": 1}}, SamplingParams(logit_bias=((1, 1.0),))),
    ({"watermark": None, "choice": [], "beam_width": {}, "custom_params": {}}, SamplingParams()),
    ({"custom_params": {"return_top_p_token_ids": True}}, SamplingParams(tells_nuclei=True)),
    (
        {"custom_params": {"return_top_p_token_ids": False}, "ignore_eos": True},
        SamplingParams(ignore_eos=True),
    ),
]

REFUSED = [
    ({"max_new_tokens": -1}, "max_new_tokens -1"),
    ({"max_new_tokens": 2**31 + 1}, "max_new_tokens"),
    ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens 5: more than max_new_tokens 4"),
    *(({"n": n}, "n ") for n in (0, 4097, True, 1.0, None)),
    *(({"sampling_seed": seed}, "sampling_seed") for seed in (-(2**63) - 1, 2**63)),
    ({"temperature": 1e30}, "temperature"),
    *(({"top_p": value}, r"wanted a number in \(0.0, 1.0\]") for value in (0, 1.01)),
    *(({"min_p": value}, r"wanted a number in \[0.0, 1.0\]") for value in (-0.01, 1.01, True)),
    *(({"frequency_penalty": value}, "frequency_penalty") for value in (-2.01, 2.01, "1")),
    *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, 2.01)),
    *(({"top_k": value}, "top_k") for value in (0, -2, 2**31 + 1)),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop": ["a"] * 33}, "stop: 33 entries"),
    ({"stop": ["a", 1]}, "wanted a string or a list of strings"),
    ({"stop_regex": "("}, "stop_regex"),
    *(({"logit_bias": {token: 1}}, "is not in") for token in ("100", "-1", "x", "00000000001")),
    *(({"logit_bias": {"1": bias}}, "logit_bias of token 1") for bias in (3.1e38, True, "1")),
    ({"logit_bias": [1]}, "wanted an object"),
    ({"watermark": True}, "not supported by the embedded engine: watermark"),
    ({"temprature": 1}, "unknown sampling parameters: temprature"),
    ({"ignore_eos": 1}, "wanted a boolean"),
    *(
        ({"custom_params": found}, "custom_params")
        for found in ([1], {"a": True}, {"return_top_p_token_ids": 1})
    ),
]

RANGES = [
    *((name, 0, 2**31, 1) for name in ("max_new_tokens", "min_new_tokens", "stream_interval")),
    ("stop_token_ids", 0, 2**31, 1),
    ("n", 1, 4096, 1),
    ("sampling_seed", -(2**63), 2**63 - 1, 1),
    ("top_k", -1, 2**31, 1),
    ("temperature", 0.0, 0.9e30, 0.1e30),
    ("top_p", 0.001, 1.0, 0.001),
    ("min_p", 0.0, 1.0, 0.001),
    *((name, -2.0, 2.0, 0.001) for name in ("frequency_penalty", "presence_penalty")),
    ("repetition_penalty", 0.001, 2.0, 0.001),
]
"""A name, its least and largest value, and what is too much beside either."""

PATTERNS = [
    ("a" * 256, True),
    ("a" * 257, False),
    ("é" * 129, False),
    ("(a{64}){64}", True),
    ("(a{64}){64}b", False),
    ("(a{64,}){65}", False),
    ("(){4096}", True),
    ("(){4097}", False),
    ("[ab]{4096}", True),
    (r"\d{4097}", False),
    ("a){4095}", None),
]


def test_what_is_within_the_limits_is_taken():
    hold_each(TAKEN, lambda case: _equal(parse_sampling_params(case[0], VOCAB), case[1]))


def _equal(found, wanted):
    assert found == wanted


def test_what_is_beyond_them_is_refused_by_name():
    def check(case):
        with pytest.raises(BadRequest, match=case[1]):
            parse_sampling_params(case[0], VOCAB)

    hold_each(REFUSED, check)


def test_a_value_is_taken_up_to_either_limit_and_no_further():
    def taken(name, value):
        # Beside it stands what its own limits need: no fewer tokens at most than at least.
        raw = {"max_new_tokens": 2**31, name: value}
        try:
            parse_sampling_params(raw, VOCAB)
        except BadRequest as error:
            assert str(error).startswith(name), error
            return False
        return True

    def check(case):
        name, low, high, step = case
        assert [taken(name, value) for value in (low - step, low, high, high + step)] == [
            *(False, True, True, False)
        ]

    hold_each(RANGES, check)


def test_patterns_are_as_long_as_their_repeats_written_out():
    def check(case):
        pattern, taken = case
        if taken:
            check_pattern(pattern)
        else:
            with pytest.raises(BadRequest, match="stop_regex" if taken is None else "longer|more than"):
                check_pattern(pattern)

    hold_each(PATTERNS, check)


def test_what_is_cut_off_or_penalised_is_known_beforehand():
    cold = 1e-6
    assert SamplingParams(temperature=0.9 * cold).greedy and not SamplingParams(temperature=cold).greedy
    assert SamplingParams(top_k=1).greedy and not SamplingParams(top_k=2).greedy
    assert (SamplingParams(temperature=0.0).scale, SamplingParams(temperature=cold).scale) == (1.0, cold)
    filtered = [SamplingParams(top_k=2), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)]
    assert all(params.filters for params in filtered)
    assert not any(params.filters for params in (SamplingParams(), SamplingParams(top_k=1, top_p=0.5)))
    kinds = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    assert all(SamplingParams(**{kind: 0.5}).penalises for kind in kinds) and not SamplingParams().penalises


def test_items_of_a_pattern_count_as_often_as_they_are_repeated():
    table = {
        **{
            "": 0,
            "ab": 2,
            "a{0}": 1,
            "a{1}": 1,
            "a{3}": 3,
            "ab{3}": 4,
            "a{2,}": 2,
            "a{2,9}": 2,
            "[a-z]{4}": 4,
        },
        **{
            "\\{{2}": 2,
            "()": 1,
            "(){5}": 5,
            "(a{2}b){3}": 9,
            "((ab){2}c){2}d": 11,
            "[a-z]{4}": 4,
            ")": 1,
            "a){2}": 3,
        },
    }
    assert {pattern: _items(pattern) for pattern in table} == table
