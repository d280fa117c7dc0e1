"""One answer of the parts that updates of the weights have left."""

import pytest

from slime.agent.adapters.engine import _joined, _note_end
from slime.utils.types import Sample


def part(ids, version, **more):
    meta = {
        "output_token_logprobs": [[-float(token), token, None] for token in ids],
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "completion_tokens": len(ids),
        "weight_version": version,
        "num_retractions": 0,
        "finish_reason": {"type": "abort"},
    }
    return {"meta_info": meta | more}


def test_parts_are_joined_token_by_token():
    """An engine may have made a part with several weights too."""
    versions = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    retracted = dict(weight_versions=versions, num_retractions=1, prompt_tokens=8, cached_tokens=0)
    last = dict(prompt_tokens=10, cached_tokens=9, finish_reason={"type": "stop"})
    parts = [part([4, 5, 6], "1"), part([7, 8], "3", **retracted), part([9], "4", **last)]
    meta = _joined(parts)["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == [4, 5, 6, 7, 8, 9]
    spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
    assert spans == [("1", 0, 3), ("2", 3, 4), ("3", 4, 5), ("4", 5, 6)]
    assert (meta["weight_version"], meta["finish_reason"]) == ("4", {"type": "stop"})
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (5, 2, 6)
    # The second one begins with 7 known tokens of its 8, and reads 8 of its 9 again; the third has a cache.
    assert meta["recomputed_tokens"] == 7 + 8
    assert _joined(parts[:1]) is parts[0]


@pytest.mark.parametrize(
    "nuclei",
    [
        lambda ids: {"top_p_token_ids": [0, *ids], "top_p_token_offsets": [0, *range(2, len(ids) + 2)]},
        lambda ids: {"output_token_sampling_mask": [[0, ids[0]], *([token] for token in ids[1:])]},
    ],
    ids=["of the original", "of SGLang"],
)
def test_nuclei_are_those_of_all_tokens(nuclei):
    meta = _joined([part(ids, "1", **nuclei(ids)) for ids in ([4, 5], [6])])["meta_info"]
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[4, 5, 6], log_probs=[0.0] * 3, meta_info=meta)
    found = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    assert found == ([0, 4, 5, 0, 6], [0, 2, 3, 5])


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"max_new_tokens": 9}, "stop"),
        ({"max_new_tokens": 9, "ignore_eos": True}, "abort"),
        ({"max_new_tokens": 2, "ignore_eos": True}, "length"),
    ],
)
def test_an_abort_upon_the_last_token_leaves_nothing_to_ask_for(sampling, reason):
    meta = part([4, 5], "1")["meta_info"]
    _note_end(meta, sampling, end=5)
    assert meta["finish_reason"]["type"] == reason
