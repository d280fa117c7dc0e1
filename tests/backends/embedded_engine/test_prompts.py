"""What a body makes of each prompt, up to every limit and one beyond it."""

from types import SimpleNamespace

import pytest

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import GenerateBody, validated
from slime.backends.embedded_engine.http.prompts import check_unsupported, make_generation
from slime.backends.embedded_engine.sequence import LogprobOptions
from tests.each import hold_each

VOCAB, CONTEXT = 50, 40


def made(body, *, context=10_000, most=100_000, tokenizer=None, live=(), **args):
    """The generation of a body, by a server with these arguments."""
    defaults = {"allow_auto_truncate": False, "enable_return_routed_experts": True}
    state = SimpleNamespace(
        args=SimpleNamespace(**{**defaults, "sampling_mask_max_tokens": 8, **args}),
        config=SimpleNamespace(shape=SimpleNamespace(vocab_size=VOCAB)),
        **{"context_length": context, "max_total_tokens": most, "tokenizer": tokenizer},
        live_rids=set(live),
        noise_seed=lambda seed, sample: (seed, sample),
    )
    return make_generation(state, validated(GenerateBody, body))


def body_of(length=3, **more):
    tokens = more.pop("tokens", 8)
    params = {"max_new_tokens": tokens, **more.pop("params", {})}
    return {"input_ids": [1] * length, "sampling_params": params, **more}


FITS = [
    # prompt, tokens asked for, options; the response that there is room for, None if it is refused
    (33, 7, {}, 5),
    (34, 1, {}, None),
    (33, 8, {}, None),
    (33, None, {}, 5),
    (30, 8, {}, 8),
    (30, 9, {}, 8),
    (3, 37, {}, 35),
    (3, 38, {}, None),
    (23, 9, {"most": 30}, 5),
    (24, 1, {"most": 30}, None),
    (39, 1, {"allow_auto_truncate": True}, 1),
    (30, 10, {"allow_auto_truncate": True}, 10),
    (30, 11, {"allow_auto_truncate": True}, 10),
    (50, 5, {"allow_auto_truncate": True}, 1),
    (40, 0, {"allow_auto_truncate": True}, 0),
    (28, 5, {"allow_auto_truncate": True, "most": 30}, 2),
]


def test_prompt_and_response_fit_into_the_context():
    def check(case):
        length, tokens, options, room = case
        body = body_of(length, tokens=tokens)
        if room is None:
            with pytest.raises(BadRequest, match="prompt tokens"):
                made(body, context=CONTEXT, **options)
            return
        (sequence,) = made(body, context=CONTEXT, **options).sequences
        assert sequence.params.max_new_tokens == room
        limit = min(CONTEXT, options.get("most", CONTEXT))
        cut = options.get("allow_auto_truncate") and length >= limit
        assert len(sequence.prompt_ids) == (limit - 1 if cut else length)

    hold_each(FITS, check)


def test_what_a_shorter_response_must_have_at_least_is_no_more_than_it():
    (sequence,) = made(body_of(33, tokens=7, params={"min_new_tokens": 6}), context=CONTEXT).sequences
    assert (sequence.params.max_new_tokens, sequence.params.min_new_tokens) == (5, 5)
    (sequence,) = made(body_of(33, tokens=7, params={"min_new_tokens": 4}), context=CONTEXT).sequences
    assert (sequence.params.max_new_tokens, sequence.params.min_new_tokens) == (5, 4)


OPTIONS = [
    ({}, LogprobOptions()),
    ({"return_logprob": True}, LogprobOptions(True)),
    ({"return_logprob": True, "logprob_start_len": 0}, LogprobOptions(True, 0)),
    ({"return_logprob": True, "logprob_start_len": 2}, LogprobOptions(True, 2)),
    ({"return_logprob": True, "logprob_start_len": 3}, LogprobOptions(True)),
    ({"return_logprob": None, "logprob_start_len": 0}, LogprobOptions()),
    ({"return_logprob": True, "logprob_start_len": None}, LogprobOptions(True)),
    ({"return_logprob": True, "top_logprobs_num": VOCAB}, LogprobOptions(True, top=VOCAB)),
    ({"top_logprobs_num": None}, LogprobOptions()),
    ({"token_ids_logprob": [0, VOCAB - 1]}, LogprobOptions(token_ids=(0, VOCAB - 1))),
    ({"token_ids_logprob": [[4]]}, LogprobOptions(token_ids=(4,))),
    ({"token_ids_logprob": [None]}, LogprobOptions()),
]


def test_options_of_log_probs_are_taken_up_to_their_limits():
    def check(case):
        (sequence,) = made(body_of(**case[0])).sequences
        options = sequence.logprob_options
        assert (
            LogprobOptions(bool(options.wanted), options.prompt_start, options.top, options.token_ids)
            == (case[1])
        )

    hold_each(OPTIONS, check)


_TWO = {"input_ids": [[1, 2], [3]]}
REFUSED = [
    ({}, "wanted one of text and input_ids"),
    ({"text": "a", "input_ids": [1]}, "wanted one of text and input_ids"),
    ({"text": "a"}, "text: the server runs with --skip-tokenizer-init"),
    ({"input_ids": []}, "input_ids: the prompt is empty"),
    ({"input_ids": [[1], []]}, "input_ids: the prompt is empty"),
    ({"input_ids": [1, -1]}, r"token id -1 is not in \[0, 50\)"),
    ({"input_ids": [1, VOCAB, 60]}, r"token id 50 is not in \[0, 50\)"),
    (body_of(logprob_start_len=4), "logprob_start_len 4: wanted -1 to 3"),
    (body_of(logprob_start_len=-2), "logprob_start_len -2"),
    (body_of(top_logprobs_num=VOCAB + 1), "top_logprobs_num 51: wanted 0 to 50"),
    (body_of(top_logprobs_num=-1), "top_logprobs_num -1"),
    (body_of(token_ids_logprob=[VOCAB]), r"token_ids_logprob: wanted ids in \[0, 50\)"),
    (body_of(token_ids_logprob=[-1]), "token_ids_logprob"),
    (body_of(return_routed_experts=True, routed_experts_start_len=-1), "wanted 0 or more"),
    (body_of(return_routed_experts=True, routed_experts_start_len=4), "wanted at most 3, the prompt's"),
    (body_of(lora_path=["a"]), "lora_path: a list, but there is a single prompt"),
    (body_of(rid=["a"]), "rid: a list, but there is a single prompt"),
    (body_of(params={"stop": "x"}), "stop: the server runs with --skip-tokenizer-init"),
    (body_of(params={"stop_regex": "x"}), "stop: the server runs with --skip-tokenizer-init"),
    (body_of(params={"n": 4096}) | {"input_ids": [[1]] * 3}, "n: 12288 responses in one request"),
    (_TWO | {"lora_path": ["a"]}, r"lora_path: 1 entries \(wanted: 2, one per prompt\)"),
    (_TWO | {"rid": ["a"]}, "rid: wanted 2 distinct ids"),
    (_TWO | {"rid": ["a", "a"]}, "rid: wanted 2 distinct ids"),
    (_TWO | {"sampling_params": [{"n": 1}, {"n": 2}]}, r"n is 1 and 2 \(wanted: one n\)"),
    (
        _TWO | {"sampling_params": {"n": 2}, "return_logprob": [True, True]},
        "return_logprob: a list beside an n",
    ),
    (
        _TWO | {"sampling_params": {"n": 2}, "token_ids_logprob": [[1], [2]]},
        "token_ids_logprob: a list beside",
    ),
    (_TWO | {"rid": ["a_0", "a"], "sampling_params": {"n": 1}, "token_ids_logprob": [[1]]}, "1 entries"),
    ({"input_ids": [[1], [2]], "rid": ["a", "taken"]}, "rid 'taken' is in use"),
    (
        {"input_ids": [[1], [2]], "rid": ["a", "a_1"], "sampling_params": {"n": 1}, "lora_path": []},
        "0 entries",
    ),
    (
        {"input_ids": [[1], [2]], "rid": ["a", "a_0"], "sampling_params": {"n": 2}, "stream": True},
        None,
    ),
]


def test_what_does_not_go_together_is_refused_by_name():
    def check(case):
        body, said = case
        if said is None:
            assert len(made(body, live={"taken"}).sequences) == 4
            return
        with pytest.raises(BadRequest, match=said):
            made(body, live={"taken"})

    hold_each(REFUSED, check)
    with pytest.raises(BadRequest, match="wanted: a server with --enable-return-routed-experts"):
        made(body_of(return_routed_experts=True), enable_return_routed_experts=False)


def test_stop_strings_of_any_prompt_need_a_tokenizer():
    body = {"input_ids": [[1], [2]], "sampling_params": [{"stop": "x"}, {}]}
    with pytest.raises(BadRequest, match="stop: the server runs with --skip-tokenizer-init"):
        made(body)


@pytest.mark.parametrize(("prompts", "samples"), [(8192, 1), (2, 4096)])
def test_a_request_has_8192_responses_at_most(prompts, samples):
    body = {"input_ids": [[1]] * prompts, "sampling_params": {"n": samples, "max_new_tokens": 1}}
    assert len(made(body).sequences) == 8192
    with pytest.raises(BadRequest, match=r"responses in one request \(wanted: at most 8192\)"):
        made(body | {"input_ids": [[1]] * (prompts + 1)})


def test_two_responses_never_have_one_id():
    body = {"input_ids": [[1], [2]], "rid": ["a", "a_0"], "sampling_params": {"n": 1}}
    assert [s.rid for s in made(body).sequences] == ["a", "a_0"]
    clash = {"input_ids": [[1], [2]], "rid": "a", "sampling_params": {"n": 2}}
    assert [s.rid for s in made(clash).sequences] == ["a_0_0", "a_0_1", "a_1_0", "a_1_1"]
    one = made(body_of(rid="a", params={"n": 2}))
    assert [s.rid for s in one.sequences] == ["a_0", "a_1"] and not one.single
    assert len({s.rid for s in made({"input_ids": [[1], [2]]}).sequences}) == 2


def test_each_sequence_has_what_its_prompt_was_given():
    body = {
        **{"input_ids": [[1, 2], [3]], "sampling_params": [{"sampling_seed": 5}, {"sampling_seed": 6}]},
        **{"lora_path": ["x", None], "return_logprob": [True, False], "top_logprobs_num": [2, 0]},
        **{"token_ids_logprob": [[7], None], "return_routed_experts": True, "routed_experts_start_len": 1},
    }
    first, second = made(body).sequences
    assert (first.prompt_ids, second.prompt_ids) == ([1, 2], [3])
    assert (first.noise_seed, second.noise_seed) == ((5, 0), (6, 0))
    assert (first.lora_path, second.lora_path) == ("x", None)
    assert first.logprob_options == LogprobOptions(True, None, 2, (7,))
    assert second.logprob_options == LogprobOptions()
    assert (first.routes_from, second.routes_from) == (1, 1)
    several = made(body_of(params={"n": 3, "sampling_seed": 5})).sequences
    assert [s.noise_seed for s in several] == [(5, 0), (5, 1), (5, 2)]
    assert made(body_of()).single and not made({"input_ids": [[1]]}).single
    assert made(body_of()).sequences[0].routes_from is None


@pytest.mark.parametrize(
    ("params", "taken"),
    [
        ({"temperature": 0.0}, True),
        ({"top_k": 1}, True),
        ({"top_k": 2}, True),
        ({"top_k": 8}, True),
        ({"top_k": 9}, False),
        ({}, False),
    ],
)
def test_masks_are_told_of_as_many_tokens_as_the_server_tells(params, taken):
    body = body_of(params=params, return_sampling_mask=True)
    if taken:
        assert made(body).sequences[0].tells_mask
    else:
        with pytest.raises(BadRequest, match=r"return_sampling_mask: top_k .* \(wanted: 1 to 8\)"):
            made(body)
    assert not made(body_of(params=params)).sequences[0].tells_mask


def test_texts_are_encoded_one_by_one():
    tokenizer = SimpleNamespace(encode=lambda text: [len(text)] * 2)
    assert made({"text": "abc"}, tokenizer=tokenizer).sequences[0].prompt_ids == [3, 3]
    both = made({"text": ["a", "bb"], "sampling_params": {"stop": "x"}}, tokenizer=tokenizer)
    assert [s.prompt_ids for s in both.sequences] == [[1, 1], [2, 2]] and not both.single
    with pytest.raises(BadRequest, match="text: no prompts"):
        made({"text": []}, tokenizer=tokenizer)


def test_what_no_embedded_engine_does_is_refused_unless_it_is_off():
    check_unsupported({"image_data": None, "session_id": "", "return_hidden_states": False, "audio_data": []})
    with pytest.raises(BadRequest, match="not supported by the embedded engine: image_data, bootstrap_room"):
        check_unsupported({"image_data": ["x"], "bootstrap_room": 5})
