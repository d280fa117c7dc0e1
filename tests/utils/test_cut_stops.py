"""Stop strings that begin in one answer of an engine and end in the next."""

import base64

import numpy as np
import pytest

from slime.utils.cut_stops import StopsAcrossCuts
from tests.agent.test_engine_answers import part


def base64_of(values):
    return base64.b64encode(np.asarray(values, dtype="<i4").tobytes()).decode()


def text_of(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("before", "new", "found"),
    [
        ("say st", "op it", (2, "stop")),
        ("say st", "op", (2, "stop")),
        ("say sto", "p", (1, "stop")),
        ("say st", "ay, stop", None),  # which the engine sees
        ("", "stop", None),
        ("stop", " it", None),
        ("stops st", "op it", (2, "stop")),
        ("say", " nothing of it", None),
        ("an e", "nd, stop", (2, "end")),
    ],
)
def test_a_stop_string_is_found_where_it_begins_before_a_cut(before, new, found):
    before, new = [*map(ord, before)], [*map(ord, new)]
    assert StopsAcrossCuts(["stop", "end"], text_of).find(before, new) == found
    assert StopsAcrossCuts(None, text_of).find(before, new) is None
    assert StopsAcrossCuts("stop", None).find(before, new) is None


def test_a_stop_string_is_found_whose_characters_are_of_several_tokens():
    """Each byte is a token: of two characters five may be there before the cut, and one comes after."""
    text_of = lambda ids: bytes(ids).decode(errors="replace")
    whole = [*"an end: 完了 and more".encode()]
    begin = len(b"an end: ")
    for cut in range(begin + 1, begin + 6):
        found = StopsAcrossCuts("完了", text_of).find(whole[:cut], whole[cut:])
        assert found == (begin + 6 - cut, "完了"), cut


def test_what_an_answer_has_behind_such_a_string_is_taken_away():
    versions = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 4}]
    nuclei = {
        "top_p_token_ids": base64_of([1, 2, 3, 4, 5]),
        "top_p_token_offsets": base64_of([0, 1, 3, 4, 5]),
    }
    experts = np.arange(
        (5 - 1 + 4 - 2) * 3
    )  # three numbers for each position from the third on, but the last
    routes = {"routed_experts": base64_of(experts), "routed_experts_start_len": 2}
    answer = part([*map(ord, "op i")], "3", weight_versions=versions, **nuclei, **routes)
    StopsAcrossCuts("stop", text_of).note([*map(ord, "st")], answer)
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == [*map(ord, "op")]
    assert (meta["completion_tokens"], meta["finish_reason"]) == (2, {"type": "stop", "matched": "stop"})
    assert [(span["start"], span["end"]) for span in meta["weight_versions"]] == [(0, 1), (1, 2)]
    assert (meta["top_p_token_ids"], meta["top_p_token_offsets"]) == ([1, 2, 3], [0, 1, 3])
    assert meta["routed_experts"].tolist() == experts[: 4 * 3].tolist()
    whole = part([*map(ord, "on it")], "3")
    StopsAcrossCuts("stop", text_of).note([*map(ord, "st")], whole)
    assert whole == part([*map(ord, "on it")], "3")


def test_log_probs_within_nuclei_are_cut_with_their_masks():
    """SGLang's own form, in lists; no other one is put beside it."""
    masks = {
        "output_token_sampling_mask": [[1], [2, 3], [4]],
        "output_token_sampling_logprobs": [0.1, 0.2, 0.3],
    }
    answer = part([*map(ord, "op.")], "3", **masks)
    StopsAcrossCuts("stop", text_of).note([*map(ord, "st")], answer)
    meta = answer["meta_info"]
    assert meta["output_token_sampling_mask"] == [[1], [2, 3]]
    assert meta["output_token_sampling_logprobs"] == [0.1, 0.2] and "top_p_token_ids" not in meta
