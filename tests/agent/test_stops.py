"""Stop strings are no part of what agents are told, and the tokens are trained on with them."""

from hypothesis import given
from hypothesis import strategies as st

from slime.agent.adapters.stops import until_any, untold_stops, without_stop


def ended(text, stop, stops=None):
    """Each character is a token."""
    meta = {"finish_reason": {"type": "stop", "matched": stop}}
    return without_stop(list(map(ord, text)), meta, stops or [stop], lambda ids: "".join(map(chr, ids)))


def test_an_answer_ends_before_the_string_that_ended_it():
    assert ended("one END", "END") == "one "
    assert ended("one END END", "END") == "one END "  # min_new_tokens passes over the first
    assert ended("aaa", "aa") == "a"
    assert ended("one END", 7) == ended("one END", "END", ["other"]) == "one END"
    assert ended("one E", "END") == "one E"
    assert ended("", "END") == ""


def test_what_the_last_token_has_behind_it_is_left_out_too():
    parts = ["on", "e E", "ND and"]
    meta = {"finish_reason": {"type": "stop", "matched": "END"}}
    text = without_stop([0, 1, 2], meta, ["END"], lambda ids: "".join(parts[i] for i in ids))
    assert text == "one "


def test_the_end_of_a_call_belongs_to_an_answer_and_so_does_all_that_is_not_trimmed():
    assert untold_stops({"stop": ["a", "</tool_call>"]}, call_ends=True) == ["a"]
    assert untold_stops({"stop": "a"}, call_ends=False) == ["a"]
    assert untold_stops({"stop": "a", "no_stop_trim": True}, call_ends=False) == []
    assert untold_stops({"stop": ["", "a", ""]}, call_ends=False) == ["a"]
    assert untold_stops({"stop": None}, call_ends=False) == untold_stops({}, call_ends=False) == []


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_told_of_a_text_that_grows_is_never_taken_back(text, stops):
    ends = [text.find(stop) for stop in stops if stop in text]
    whole = text[: min(ends, default=len(text))]
    told = [until_any(text[:n], stops) for n in range(len(text) + 1)]
    assert all(whole.startswith(one) for one in told)
    assert not ends or told[-1] != text
    assert stops or told[-1] == text
