"""Which characters of a text belong to which of its tokens.

    lengths, closed = token_spans("héllo", [72, 195, 169, 108, 108, 111], tokenizer)

A tree over texts may part a sequence of tokens only where a character ends. Bytes of one character may be
spread over several tokens, and a token such as an end-of-turn mark may have no text at all.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

WINDOW = 8
"""Tokens before the one that is decoded: what a decoder looks at to the left, spaces above all."""


def token_spans(text: str, ids: Sequence[int], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each token the characters it adds, int32 [n], and whether a character ends with it, bool
    [n].

    The lengths add up to that of the text, and the last token is always an end. Tokens whose text cannot be
    told apart, all of them without a tokenizer, are one piece: their text is counted at its last token.
    """
    lengths, closed = np.zeros(len(ids), np.int32), np.zeros(len(ids), bool)
    position = 0
    for index, end in _ends(text, ids, tokenizer):
        lengths[index], closed[index] = end - position, True
        position = end
    lengths[-1] += len(text) - position
    closed[-1] = True
    return lengths, closed


def _ends(text: str, ids: Sequence[int], tokenizer: Any) -> Iterator[tuple[int, int]]:
    """(index of a token, where in the text it ends), as far as the text goes along with the tokens."""
    if tokenizer is None:
        return iter(())
    table = byte_table(tokenizer)
    if table is None:
        return _ends_by_decoding(text, ids, tokenizer)
    return _ends_by_bytes(text, ids, table)


def _ends_by_bytes(text: str, ids: Sequence[int], table: "_ByteTable") -> Iterator[tuple[int, int]]:
    """Stops where the bytes are not those of the text. Special tokens may be missing from the text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    position = 0
    for index, token in enumerate(ids):
        piece = table[token]
        if piece is None:
            return
        characters = decoder.decode(piece, final=index == len(ids) - 1)
        if text.startswith(characters, position):
            position += len(characters)
        elif token not in table.specials:
            return
        if not decoder.getstate()[0]:
            yield index, position


def _ends_by_decoding(text: str, ids: Sequence[int], tokenizer: Any) -> Iterator[tuple[int, int]]:
    """Finds the ends for any tokenizer, by decoding each token behind those before it."""
    start = read = position = 0
    for index in range(len(ids)):
        before = tokenizer.decode(ids[start:read], skip_special_tokens=False)
        after = tokenizer.decode(ids[start : index + 1], skip_special_tokens=False)
        characters = after[len(before) :]
        if not after.startswith(before) or (characters.endswith("�") and index < len(ids) - 1):
            continue
        if not text.startswith(characters, position):
            if ids[index] not in tokenizer.all_special_ids:
                return
            characters = ""
        position += len(characters)
        read, start = index + 1, max(0, index + 1 - WINDOW)
        yield index, position


class _ByteTable(dict[int, "bytes | None"]):
    """The bytes of each token id, found when it is first asked for; None where there is no such token."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._letters = _byte_letters()
        added = tokenizer.added_tokens_decoder
        self._added = {token: str(entry).encode() for token, entry in added.items()}
        self.specials = frozenset(tokenizer.all_special_ids)

    def __missing__(self, token: int) -> bytes | None:
        self[token] = found = self._look_up(token)
        return found

    def _look_up(self, token: int) -> bytes | None:
        if token in self._added:
            return self._added[token]
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None or any(letter not in self._letters for letter in piece):
            return None
        return bytes(self._letters[letter] for letter in piece)


@lru_cache(maxsize=8)
def byte_table(tokenizer: Any) -> _ByteTable | None:
    """The table of a byte-level tokenizer; None for others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str()).get("decoder") if backend is not None else None
    return _ByteTable(tokenizer) if decoder and decoder["type"] == "ByteLevel" else None


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + index): byte for index, byte in enumerate(hidden)}
