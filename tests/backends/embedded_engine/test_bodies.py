"""What a request means by what it leaves out: what SGLang 0.5.23 takes for it."""

from slime.backends.embedded_engine.http import bodies
from slime.backends.embedded_engine.http.openai_bodies import ChatBody, CompletionBody
from slime.backends.embedded_engine.http.parsing_routes import ReasoningBody
from slime.backends.embedded_engine.sampling_params import parse_sampling_params
from tests.each import hold_each

_UPDATE = {"flush_cache": True, "abort_all_requests": False, "weight_version": None}
_OF_BOTH = {
    **{"model": None, "seed": None, "stream": False, "stream_options": None, "rid": None},
    **{"min_tokens": 0, "return_token_ids": False, "lora_path": None},
}
LEFT_OUT = {
    bodies.GenerateBody: {
        **{"text": None, "input_ids": None, "rid": None, "sampling_params": None},
        **{"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0},
        **{"token_ids_logprob": None, "return_text_in_logprobs": False, "return_prompt_token_ids": False},
        **{"return_routed_experts": False, "routed_experts_start_len": 0, "return_sampling_mask": False},
        **{"require_reasoning": False, "stream": False, "lora_path": None},
    },
    bodies.AbortBody: {"rid": "", "abort_all": False},
    bodies.PauseBody: {"mode": "abort"},
    bodies.UpdateFromTensorBody: _UPDATE | {"load_format": None},
    bodies.UpdateFromDistributedBody: _UPDATE | {"group_name": "weight_update_group", "load_format": None},
    bodies.UpdateFromDiskBody: _UPDATE,
    bodies.UpdateVersionBody: {"abort_all_requests": True},
    bodies.WeightByNameBody: {"truncate_size": 100},
    bodies.TokenizeBody: {"add_special_tokens": True},
    bodies.DetokenizeBody: {"skip_special_tokens": True},
    ReasoningBody: {"return_blocks": False},
    CompletionBody: _OF_BOTH | {"max_tokens": 16, "echo": False, "logprobs": None},
    ChatBody: {
        **_OF_BOTH,
        **{"max_tokens": None, "max_completion_tokens": None, "logprobs": False, "top_logprobs": None},
        **{"chat_template_kwargs": None, "reasoning_effort": None, "continue_final_message": False},
        **{"separate_reasoning": True, "stream_reasoning": True, "return_prompt_token_ids": False},
    },
}


def test_each_field_that_a_body_may_leave_out_has_sglangs_default():
    def holds(body):
        fields = body.model_fields.items()
        found = {name: field.default for name, field in fields if not field.is_required()}
        assert found == LEFT_OUT[body]

    hold_each(LEFT_OUT, holds)


def test_ports_and_sizes_of_a_group_of_ranks_have_limits():
    group = {"master_address": "127.0.0.1", "rank_offset": 1}

    def fits(port, size):
        try:
            bodies.validated(bodies.JoinGroupBody, {**group, "master_port": port, "world_size": size})
        except bodies.BadRequest:
            return False
        return True

    assert fits(1, 100_000) and fits(65535, 2)
    assert not fits(0, 2) and not fits(65536, 2) and not fits(1, 100_001)


def test_sampling_parameters_that_are_left_out_are_sglangs():
    assert vars(parse_sampling_params({}, 100)) == {
        **{"max_new_tokens": 128, "min_new_tokens": 0, "n": 1, "ignore_eos": False},
        **{"stop": (), "stop_token_ids": frozenset(), "stop_regex": (), "no_stop_trim": False},
        **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logit_bias": ()},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        **{"sampling_seed": None, "skip_special_tokens": True, "spaces_between_special_tokens": True},
        **{"stream_interval": None, "grammar": None, "tells_nuclei": False},
    }
