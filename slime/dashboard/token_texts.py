"""What tokens say, by the vocabulary of the run's model."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


class TokenTexts:
    """Texts of single tokens; their numbers where there is no ``tokenizer.json`` that can be read."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def of(self, ids: Sequence[int]) -> list[str]:
        """Returns a text for each id; what is a part of a character only has none of its own."""
        tokenizer = self._tokenizer
        return [f"{token} " if tokenizer is None else _text(tokenizer, token) for token in ids]

    @cached_property
    def _tokenizer(self) -> Any:
        if self._path is None or not self._path.is_file():
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(self._path))
        except Exception:  # all that the library raises; of a file that is broken, or of a newer version
            return None


def _text(tokenizer: Any, token: int) -> str:
    name = tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
    if name is None:
        return f"<{token}>"
    if "\u2581" in name:  # a space, which a decoder leaves out before the first token
        return str(name.replace("\u2581", " "))
    return str(tokenizer.decode([token], skip_special_tokens=False)) or str(name)
