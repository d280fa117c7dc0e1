"""Text of responses that are still growing."""

import pytest

from slime.backends.embedded_engine.tokenizer import GrowingText, Tokenizer
from tools.make_tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(path)
    return Tokenizer(str(path), trust_remote_code=False)


def test_growing_text_never_shows_half_a_character(tokenizer):
    text = "aé漢🎉b"
    ids = tokenizer.encode(text)
    growing = GrowingText(tokenizer, skip_special_tokens=True)
    shown = [growing.update(ids[:end]) for end in range(1, len(ids) + 1)]
    assert all(text.startswith(part) for part in shown) and shown[-1] == text


def test_what_stays_incomplete_shows_at_the_end(tokenizer):
    ids = tokenizer.encode("é")[:1]
    growing = GrowingText(tokenizer, skip_special_tokens=True)
    assert growing.update(ids) == ""
    assert growing.update(ids, final=True) == "\ufffd"


def test_special_tokens_show_when_they_are_wanted(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.eos_token_id]
    assert GrowingText(tokenizer, True).update(ids) == "a"
    assert GrowingText(tokenizer, False).update(ids) == "a<|im_end|>"


def test_text_begins_as_the_tokenizer_has_it_begin_and_special_tokens_are_no_text(tokenizer, monkeypatch):
    class Noted:
        def encode(self, text, **options):
            return [text, options]

        def decode(self, ids, **options):
            return [ids, options]

    monkeypatch.setattr(tokenizer, "hf", Noted())
    assert tokenizer.encode("a") == ["a", {"add_special_tokens": True}]
    assert tokenizer.decode((1, 2)) == [[1, 2], {"skip_special_tokens": True}]
