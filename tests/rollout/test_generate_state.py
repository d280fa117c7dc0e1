"""What requests of a run ask for, and how many there may be."""

import pytest

from slime.config.generation import GenerationConfig
from slime.config.run import filled
from slime.rollout import generate_state
from slime.rollout.generate_state import (
    GenerateState,
    params_for_sample,
    requests_at_once,
    training_sampling_params,
)
from slime.utils.engine_count import engine_count
from slime.utils.types import Sample


def config(args):
    return filled(GenerationConfig, args)


def test_a_response_is_sampled_by_the_flags_and_kept_to_the_letter(make_args):
    args = make_args(
        rollout_temperature=0.7, rollout_stop=["END"], rollout_stop_token_ids=[5], rollout_top_k=-1
    )
    assert training_sampling_params(config(args)) == {
        **{"temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 32},
        **{"stop": ["END"], "stop_token_ids": [5], "skip_special_tokens": False},
        **{"no_stop_trim": True, "spaces_between_special_tokens": False},
    }


@pytest.mark.parametrize(("engines", "requests"), [(0, 4), (1, 4), (3, 12)])
def test_each_engine_has_its_share_of_requests(make_args, engines, requests):
    args = make_args(sglang_server_concurrency=4, rollout_num_engines=engines)
    assert requests_at_once(config(args)) == requests


class Counted:
    engines = 2

    def count(self) -> int:
        return self.engines


def test_engines_that_serve_now_decide_where_they_are_counted(make_args, monkeypatch):
    monkeypatch.setattr(engine_count, "_counter", None)
    args, counted = make_args(sglang_server_concurrency=4, rollout_num_engines=1), Counted()
    slots = GenerateState(args).semaphore
    assert (requests_at_once(config(args)), slots._limit()) == (4, 4)
    engine_count.follow(counted.count)
    assert (requests_at_once(config(args)), slots._limit()) == (8, 8)
    counted.engines = 0
    assert requests_at_once(config(args)) == 4
    del counted
    assert slots._limit() == 4


def test_engines_of_all_policies_have_their_share(make_args):
    each = {name: make_args(rollout_num_engines=engines) for name, engines in (("a", 1), ("b", 3))}
    args = make_args(sglang_server_concurrency=4, rollout_num_engines=1, trained_policies=each)
    assert requests_at_once(config(args)) == 16


def test_seeds_follow_from_the_number_of_the_sample(make_args):
    flags, params = config(make_args(rollout_seed=42)).rollout, {"top_p": 1.0}
    seeds = [params_for_sample(flags, params, Sample(index=index)) for index in (None, 0, 7)]
    assert seeds == [{"top_p": 1.0, "sampling_seed": seed} for seed in (42, 42, 49)]
    assert params == {"top_p": 1.0}


def test_a_prompt_is_encoded_once_and_given_out_as_a_list_of_its_own(make_args, monkeypatch):
    state = GenerateState(make_args())
    first = state.encode_prompt(Sample(prompt="abc"))
    first.append(0)
    monkeypatch.setattr(state, "tokenizer", None)
    assert state.encode_prompt(Sample(prompt="abc")) == first[:-1]
    with pytest.raises(ValueError, match="the prompt of sample 3 is a list of messages"):
        state.encode_prompt(Sample(index=3, prompt=[{"role": "user", "content": "q"}]))


def test_no_more_prompts_are_kept_than_may_be(make_args, monkeypatch):
    monkeypatch.setattr(generate_state, "_PROMPTS_KEPT", 2)
    state = GenerateState(make_args())
    for prompt in "abc":
        state.encode_prompt(Sample(prompt=prompt))
    assert len(state._encoded) <= 2
