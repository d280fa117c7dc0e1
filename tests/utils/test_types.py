import base64
import json

import numpy as np
import pytest
import torch

from slime.utils.types import Sample
from tests.run_args import plugin_args, run_args


def meta(reason="stop", **more):
    return {"finish_reason": {"type": reason}, "weight_version": "3", **more}


def test_engine_and_tool_tokens_are_appended_with_mask_and_log_probs():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-1.0, -2.0], text="ab", meta_info=meta())
    sample.append_response_tokens(tokens=[5], trainable=False, text="c")
    sample.append_response_tokens(tokens=[6], log_probs=[-3.0], text="d", meta_info=meta("length"))
    assert sample.tokens == [1, 2, 3, 4, 5, 6]
    assert sample.response == "abcd"
    assert sample.response_length == 4
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0, -3.0]
    assert sample.effective_response_length == 3
    assert sample.status == Sample.Status.TRUNCATED
    assert sample.weight_versions == ["3", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1, 2], "log_probs": [-1.0]}, "2 tokens but 1 log-probs"),
        ({"tokens": [1]}, "lack log-probs"),
        ({"tokens": [1], "log_probs": [-1.0], "trainable": False}, "not trainable bring log-probs"),
        ({"log_probs": [-1.0]}, "0 tokens but 1 log-probs"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sample().append_response_tokens(**arguments)


def test_trainable_tokens_after_a_response_without_log_probs_are_refused():
    sample = Sample(tokens=[1], response_length=1)
    with pytest.raises(ValueError, match="have no log-probs"):
        sample.append_response_tokens(tokens=[2], log_probs=[-1.0])


def test_an_answer_that_was_aborted_before_its_first_token_adds_nothing():
    sample = Sample(tokens=[1])
    sample.append_response_tokens(meta_info=meta("abort"), text="")
    assert sample.status == Sample.Status.ABORTED and sample.weight_versions == ["3"]
    assert (sample.tokens, sample.response_length) == ([1], 0)
    assert sample.loss_mask is sample.rollout_log_probs is None
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0], meta_info=meta("abort"))
    sample.append_response_tokens(tokens=[], log_probs=[], meta_info=meta("abort"))
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1], [-1.0])
    assert sample.version_spans == [("3", 1)]


@pytest.mark.parametrize("made", [np.array, torch.tensor, tuple])
def test_tokens_and_log_probs_may_be_arrays(made):
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=made([2, 3]), log_probs=made([-1.0, -0.5]))
    sample.append_response_tokens(tokens=made([4]), trainable=False)
    assert sample.tokens == [1, 2, 3, 4] and sample.loss_mask == [1, 1, 0]
    assert sample.rollout_log_probs == [-1.0, -0.5, 0.0]
    assert {type(token) for token in sample.tokens} == {int}


def test_a_finish_reason_that_nobody_knows_leaves_the_status():
    sample = Sample()
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info=meta("tool_calls"))
    assert sample.status == Sample.Status.PENDING and sample.weight_versions == ["3"]


def test_a_refused_call_changes_nothing():
    sample = Sample(tokens=[1], response_length=1)
    before = sample.to_dict()
    with pytest.raises(ValueError, match="have no log-probs"):
        sample.append_response_tokens(tokens=[2], log_probs=[-1.0], text="x", meta_info=meta())
    assert sample.to_dict() == before


def test_the_end_of_an_answer_can_be_taken_by_itself():
    sample = Sample(tokens=[1, 2], response_length=1)
    args = plugin_args(sglang_speculative_algorithm="EAGLE")
    sample.update_from_meta_info(args, meta("length", spec_verify_ct=2, prompt_tokens=4, cached_tokens=3))
    assert sample.status == Sample.Status.TRUNCATED and sample.weight_versions == ["3"]
    assert sample.spec_info == Sample.SpecInfo(spec_verify_ct=2)
    assert sample.prefix_cache_info == Sample.PrefixCacheInfo(cached_tokens=3, total_prompt_tokens=4)
    sample.update_from_meta_info(None, meta("stop", spec_verify_ct=2))
    assert sample.spec_info.spec_verify_ct == 2


def test_terminal_info_can_be_left_for_later():
    sample = Sample()
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info=meta(), update_terminal_info=False)
    assert sample.status == Sample.Status.PENDING and sample.weight_versions == []


def spans(*parts):
    ends = [sum(count for _, count in parts[: i + 1]) for i in range(len(parts))]
    return [
        {"version": version, "start": end - count, "end": end}
        for (version, count), end in zip(parts, ends, strict=True)
    ]


def test_each_response_token_knows_the_version_of_its_weights():
    sample = Sample(tokens=[1], response_length=1, rollout_log_probs=[-1.0])
    answer = meta("abort", weight_versions=spans(("2", 1), ("3", 2)))
    sample.append_response_tokens(tokens=[3, 4, 5], log_probs=[-1.0] * 3, meta_info=answer)
    sample.append_response_tokens(tokens=[6], trainable=False)
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0], meta_info=meta(), update_terminal_info=False)
    sample.append_response_tokens(tokens=[8], log_probs=[-1.0], meta_info=meta())
    assert sample.version_spans == [(None, 1), ("2", 1), ("3", 2), (None, 1), ("3", 2)]
    assert sample.token_versions == [None, "2", "3", "3", None, "3", "3"]
    assert sample.weight_versions == ["3", "3"]
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


def test_versions_follow_a_response_that_user_code_cuts_or_clears():
    sample = Sample()
    sample.append_response_tokens(tokens=[1] * 4, log_probs=[-1.0] * 4, meta_info=meta())
    sample.response_length, sample.loss_mask, sample.rollout_log_probs = 2, [1] * 2, [-1.0] * 2
    assert sample.token_versions == ["3", "3"]
    sample.append_response_tokens(tokens=[5], trainable=False)
    assert sample.version_spans == [("3", 2), (None, 1)]
    sample.response_length, sample.loss_mask, sample.rollout_log_probs = 0, None, None
    sample.append_response_tokens(tokens=[6], log_probs=[-1.0], meta_info=meta(weight_version="4"))
    assert sample.version_spans == [("4", 1)]


def test_an_answer_of_which_user_code_keeps_a_part_has_the_versions_of_that_part():
    sample = Sample()
    answer = meta(weight_versions=spans(("2", 1), ("3", 5)))
    sample.append_response_tokens(tokens=[1, 2], log_probs=[-1.0] * 2, meta_info=answer)
    assert sample.version_spans == [("2", 1), ("3", 1)]


def test_a_sample_made_by_hand_has_the_version_of_all_its_answers():
    assert Sample(response_length=2, weight_versions=["5", "5"]).token_versions == ["5", "5"]
    assert Sample(response_length=2, weight_versions=["5", "6"]).token_versions == [None, None]
    assert Sample(response_length=2).token_versions == [None, None]


def test_nuclei_of_several_calls_are_merged():
    sample = Sample()
    nucleus = {"top_p_token_ids": [7, 8, 9], "top_p_token_offsets": [0, 1, 3]}
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-1.0] * 2, meta_info=nucleus)
    sample.append_response_tokens(tokens=[5], trainable=False)
    nucleus = {"top_p_kept_token_ids": [4], "top_p_kept_token_offsets": [0, 1]}
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0], meta_info=nucleus)
    assert sample.rollout_top_p_token_ids == [7, 8, 9, 4]
    assert sample.rollout_top_p_token_offsets == [0, 1, 3, 3, 4]


def test_a_nucleus_after_tokens_without_one_finds_them_empty():
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-1.0] * 2)
    nucleus = {
        "top_p_token_ids": base64.b64encode(np.array([7, 8], np.int32)).decode(),
        "top_p_token_offsets": torch.tensor([0, 2]),
    }
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0], meta_info=nucleus)
    assert sample.rollout_top_p_token_ids == [7, 8]
    assert sample.rollout_top_p_token_offsets == [0, 0, 0, 2]
    with pytest.raises(ValueError, match="4 top-p offsets for 4 tokens"):
        sample.append_response_tokens(tokens=[9], log_probs=[-1.0])
    for offsets in ([0], [1, 2]):
        with pytest.raises(ValueError, match="top_p_token_offsets: expected 2 entries from 0"):
            Sample().append_response_tokens(
                tokens=[7], log_probs=[-1.0], meta_info=nucleus | {"top_p_token_offsets": offsets}
            )


def test_routed_experts_keep_the_rows_before_the_start():
    args = run_args(num_layers=2, moe_router_topk=1)
    sample = Sample(tokens=[1, 2])
    first = np.arange(4, dtype=np.int32)
    sample.append_response_tokens(
        args, tokens=[3], log_probs=[-1.0], meta_info={"routed_experts": first.tobytes()}
    )
    assert sample.rollout_routed_experts.shape == (2, 2, 1)
    more = {"routed_experts": [8, 9], "routed_experts_start_len": 2}
    sample.append_response_tokens(args, tokens=[4], log_probs=[-1.0], meta_info=more)
    assert sample.rollout_routed_experts.reshape(-1).tolist() == [0, 1, 2, 3, 8, 9]


def test_a_sample_survives_the_dict_form_with_extra_attributes():
    sample = Sample(index=3, prompt="p", metadata={"a": 1}, status=Sample.Status.ABORTED)
    sample.spec_info.add({"spec_accept_token_num": 2, "spec_draft_token_num": 4})
    sample.prefix_cache_info.add({"cached_tokens": 1, "prompt_tokens": 2})
    sample.trace = {"version": 1}
    data = sample.to_dict()
    assert data["status"] == "aborted"
    again = Sample.from_dict(data)
    assert again == sample
    assert again.trace == {"version": 1}
    assert again.spec_info.spec_accept_rate == again.prefix_cache_info.prefix_cache_hit_rate == 0.5


def test_drafts_are_counted_under_the_names_of_sglang():
    sample = Sample()
    sample.spec_info.add({"spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 4, "spec_verify_ct": 2})
    assert sample.spec_info.spec_accept_rate == 0.75 and sample.spec_info.spec_verify_ct == 2


def test_the_reward_key_picks_a_number():
    args = run_args(reward_key="score")
    assert Sample(reward={"score": 2.0}).get_reward_value(args) == 2.0
    with pytest.raises(ValueError, match="--reward-key score"):
        Sample(reward=1.0).get_reward_value(args)


def test_lists_grow_where_a_plug_in_holds_them_too() -> None:
    """As in the original: a generate function may go on with its own name for the mask."""
    sample = Sample(tokens=[1], loss_mask=[], rollout_log_probs=[])
    tokens, mask, log_probs = sample.tokens, sample.loss_mask, sample.rollout_log_probs
    versions = sample.weight_versions
    sample.append_response_tokens(tokens=[2, 3], log_probs=[-1.0, -0.5], meta_info=meta())
    sample.append_response_tokens(tokens=[4], trainable=False)
    assert (tokens, mask, log_probs) == ([1, 2, 3, 4], [1, 1, 0], [-1.0, -0.5, 0.0]) and versions
    sample.loss_mask = mask
    sample.append_response_tokens(tokens=[5], log_probs=[-2.0])
    assert mask == [1, 1, 0, 1]


def test_what_is_no_list_is_extended_as_one() -> None:
    sample = Sample(tokens=(1,), loss_mask=np.array([], dtype=int))  # type: ignore[arg-type]
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0])
    assert (sample.tokens, sample.loss_mask) == ([1, 2], [1])


def test_tokens_that_an_update_had_computed_again_are_counted():
    spans = [{"version": str(v), "start": v * 5, "end": v * 5 + 5} for v in range(3)]
    meta = {"prompt_tokens": 7, "cached_tokens": 2, "weight_versions": spans}
    counters = Sample.PrefixCacheInfo()
    counters.add(meta | {"num_retractions": 0})  # kept in place
    assert counters.recomputed_tokens == 0
    counters.add(meta | {"num_retractions": 2})
    assert counters.recomputed_tokens == (7 + 5 - 1) + (7 + 10 - 1)
    counters.add_resumed({"prompt_tokens": 12, "cached_tokens": 4})
    counters.add_resumed({"prompt_tokens": 12, "cached_tokens": 12})
    assert counters.recomputed_tokens == 27 + 7
    assert Sample.PrefixCacheInfo.from_dict(counters.to_dict()) == counters
