"""Answers that are told while they are written."""

from copy import copy

from hypothesis import given
from hypothesis import strategies as st

from slime.agent.adapters.growing import GrowingAnswer
from tools.make_tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()


def told(tokenizer, ids, steps=(1,)):
    """All text that is told of an answer which grows by so many tokens, again and again."""
    growing, text, end, at = GrowingAnswer(tokenizer, calls=False, reasons=False), "", 0, 0
    while end < len(ids):
        end, at = end + steps[at % len(steps)], at + 1
        text += growing.more([(0.0, token, None) for token in ids[:end]])[1]
    return text


@given(st.text(max_size=60), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_what_is_told_is_the_beginning_of_the_answer(text, steps):
    ids = TOKENIZER(text + "|", add_special_tokens=False)["input_ids"] + [TOKENIZER.eos_token_id]
    whole = TOKENIZER.decode(ids[:-1])
    assert told(TOKENIZER, ids, steps) == whole.rstrip().rstrip("\ufffd")


def test_only_new_tokens_are_decoded():
    counted, decoded = copy(TOKENIZER), []
    decode = TOKENIZER.decode
    counted.decode = lambda ids, *rest: decoded.append(len(ids)) or decode(ids, *rest)
    ids = TOKENIZER("some words. " * 60, add_special_tokens=False)["input_ids"]
    assert told(counted, ids).strip() == decode(ids).strip()
    assert max(decoded) < 10 < len(ids) and sum(decoded) < 10 * len(ids)
