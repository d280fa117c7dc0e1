"""Whether a response begins as reasoning, by what template and prompt say, as SGLang's parsers take it."""

from slime.backends.embedded_engine.reasoning import FORMATS, ReasoningFormat, ReasoningStream, split
from tests.each import hold_each

_THINKING, _ENABLE = "thinking", "enable_thinking"
ASKED = {
    **dict.fromkeys(("deepseek-r1", "step3", "qwen3-thinking", "minimax"), (True, True, True)),
    **dict.fromkeys(("glm45", "interns1", "qwen3"), (True, False, True)),
    "deepseek-v3": (False, False, True),
    "kimi": (False, False, False),
    "kimi_k2": (True, False, True),
    "mimo": (False, False, True),
}
"""By format: whether it reasons where the chat says nothing, not to, and to."""
TOGGLES = {"deepseek-v3": _THINKING, "kimi_k2": _THINKING}


def test_chats_begin_in_reasoning_as_they_ask_for_it():
    assert set(ASKED) == set(FORMATS)

    def check(name):
        toggle = TOGGLES.get(name, _ENABLE)
        templates = ({}, {toggle: False}, {toggle: True})
        found = tuple(FORMATS[name].begins_in_reasoning(template, "") for template in templates)
        assert found == ASKED[name]
        assert FORMATS[name].begins_in_reasoning({toggle: False}, f"x{FORMATS[name].start} \n")
        assert FORMATS[name].begins_in_reasoning({toggle: None}, "") is ASKED[name][0]

    hold_each(ASKED, check)


SPLITS = [
    (False, "plain", ("", "plain")),
    (True, "plain", ("plain", "")),
    (True, "a</t>b", ("a", "b")),
    (False, "a</t>b", ("", "a</t>b")),
    (False, "<t><t>a</t>b</t>", ("a", "b</t>")),
    (True, "a[call]b", ("a", "[call]b")),
    (True, "a</t>b[call]", ("a", "b[call]")),
    (True, "</t>", ("", "")),
    (True, "", ("", "")),
]


def test_reasoning_ends_at_its_mark_or_where_calls_begin():
    form = ReasoningFormat("<t>", "</t>", calls_begin="[call]")

    def check(case):
        inside, text, wanted = case
        assert split(form, inside, text) == wanted
        for size in (1, 2, 100):
            stream, found = ReasoningStream(form, inside, False), []
            for start in range(0, max(len(text), 1), size):
                found.append(stream.feed(text[start : start + size], start + size >= len(text)))
            if not text.startswith("<t><t>"):  # whose second mark was sent before it was known for one
                assert tuple(map("".join, zip(*found, strict=True))) == wanted

    hold_each(SPLITS, check)


def test_what_may_be_part_of_a_mark_is_held_back_and_nothing_else():
    form = ReasoningFormat("<t>", "</t>", calls_begin="[call]")
    stream = ReasoningStream(form, True, False)
    fed = [stream.feed(piece) for piece in ("ab<", "/t", "x</t", ">c[ca", "ll]")]
    assert fed == [("ab", ""), ("", ""), ("</tx", ""), ("", "c[ca"), ("", "ll]")]
    whole = ReasoningStream(form, True, True)
    assert [whole.feed(piece) for piece in ("a", "b</t>c", "d")] == [("", ""), ("ab", "c"), ("", "d")]
    cut = ReasoningStream(form, True, True)
    assert [cut.feed("a"), cut.feed("b</", final=True)] == [("", ""), ("ab</", "")]
