"""Text of users and tools, which never becomes a control token, whatever it spells."""

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

import orjson
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from slime.agent.adapters.session import Refused

_HELD = "messages hold the text of a control token"
_MARKUP = re.compile(r"[<\[|].*[>\]|]", re.DOTALL)


class PlainText:
    """Guards text before a template sees it, and encodes what the template made of it.

    A control token is one that the tokenizer calls special, or an added one in brackets that the template
    writes, as ``</tool_response>``. Guarded text has a random mark in each, which the template passes on.
    Without the marks it is encoded by a tokenizer that knows the control tokens by other, random names.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._mark, self._names = secrets.token_hex(8), secrets.token_hex(8)
        self._safe: Tokenizer | None = None
        self._is_its_fast_form = all(
            getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name)
            for name in ("__call__", "_encode_plus")
        )
        self._controls = _control_tokens(tokenizer)
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._begins = {text[:2] for text in self._controls}
        self._normalized = _NormalizedTokens(tokenizer, self._controls)

    def guarded(self, text: str) -> str:
        """Text that is encoded as what it spells."""
        while any(begin in text for begin in self._begins) and self._any.search(text):
            text = self._any.sub(lambda found: f"{found[0][0]}{self._mark}{found[0][1:]}", text)
        return f"{text[0]}{self._mark}{text[1:]}" if self._normalized.are_in(text) else text

    def guarded_in(self, value: Any) -> Any:
        """Does the same for all text in a JSON value."""
        if isinstance(value, str):
            return self.guarded(value)
        written = orjson.dumps(value).decode()
        return self._walked(value) if self._any.search(written) or self._normalized.are_in(written) else value

    def _walked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.guarded(value)
        if isinstance(value, dict):
            return {self.guarded(key): self._walked(item) for key, item in value.items()}
        return [self._walked(item) for item in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Tokens of what a template made of guarded text.

        Raises:
            Refused: there is some, and the tokenizer is not one of ``tokenizers`` whose names can be changed.
        """
        if self._mark not in text:
            return self._plain_ids(text)
        if self._safe is None:
            self._safe = self._renamed_tokenizer()
        named = self._any.sub(lambda found: self._name(found[0]), text)
        return self._safe.encode(named.replace(self._mark, ""), add_special_tokens=False).ids

    def _plain_ids(self, text: str) -> list[int]:
        """What the tokenizer makes of a text, by the fast form alone where the tokenizer adds nothing to it.

        That finds no places of tokens in the text, which takes as long as the tokens themselves.
        """
        fast = self._tokenizer.backend_tokenizer if self._is_its_fast_form else None
        if fast is None or fast.truncation or fast.padding or fast.encode_special_tokens:
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _name(self, token: str) -> str:
        return f"<{self._names}-{self._controls[token]}>"

    def _renamed_tokenizer(self) -> Tokenizer:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise Refused(400, f"{_HELD}, and this tokenizer has no fast form")
        spelled = json.loads(backend.to_str())
        for token in spelled["added_tokens"]:
            if token["content"] in self._controls:
                token["content"] = self._name(token["content"])
        vocab = spelled["model"].get("vocab")
        if isinstance(vocab, dict):  # some hold them there as well
            spelled["model"]["vocab"] = {
                self._name(text) if text in self._controls else text: number for text, number in vocab.items()
            }
        elif isinstance(vocab, list):
            for row in vocab:
                row[0] = self._name(row[0]) if row[0] in self._controls else row[0]
        if (unknown := spelled["model"].get("unk_token")) in self._controls:
            spelled["model"]["unk_token"] = self._name(unknown)
        renamed = Tokenizer.from_str(json.dumps(spelled))
        renamed.no_truncation()
        renamed.no_padding()
        moved = [t for t, number in self._controls.items() if renamed.token_to_id(self._name(t)) != number]
        if moved:
            raise Refused(400, f"{_HELD}, {moved[0]}, which has no plain form")
        return renamed


class _NormalizedTokens:
    """Control tokens that a tokenizer finds in normalized text: in capitals, for instance, or wide ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, controls: Iterable[str]) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = backend.normalizer if isinstance(backend, Tokenizer) else None
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        texts = [text for text in controls if added[text].normalized] if self._normalizer else []
        if self._normalizer:
            texts += [self._normalizer.normalize_str(text) for text in texts]
        self._any = re.compile("|".join(map(re.escape, texts))) if texts else None

    def are_in(self, text: str) -> bool:
        """Whether a text becomes one, or has one in it."""
        if self._normalizer is None or self._any is None:
            return False
        return self._any.search(self._normalizer.normalize_str(text)) is not None


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    template = str(tokenizer.chat_template or "")
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if len(token.content) > 1
        and (token.special or (_MARKUP.fullmatch(token.content) and token.content in template))
    }
