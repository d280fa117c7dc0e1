"""Text in and out: the checkpoint's tokenizer and chat template, and decoding of text that still grows."""

from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any, Protocol

import jinja2
import jinja2.ext

from slime.backends.embedded_engine.errors import BadRequest
from slime.utils.processing_utils import load_tokenizer

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """The few operations the server needs, over ``AutoTokenizer``."""

    def __init__(self, path: str, trust_remote_code: bool) -> None:
        self.hf = load_tokenizer(path, trust_remote_code)

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Seq[int], skip_special_tokens: bool = True) -> str:
        return self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def chat_takes_parts(self) -> bool:
        """Whether the chat template takes content as a list of parts."""
        template = self.hf.chat_template
        return takes_parts(template if isinstance(template, str) else None)

    def render_chat(self, messages: list[dict[str, Any]], prefix: str = "", **template: Any) -> list[int]:
        """Ids of a conversation under the chat template, opened for the assistant's turn, and of its prefix.

        Raises:
            BadRequest: there is no template, or it does not accept these messages.
        """
        try:
            text = self.hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template
            )
        except Exception as error:  # the template is the checkpoint's program and raises what it likes
            raise BadRequest(f"chat template: {error}") from error
        return self.encode(text, add_special_tokens=False) + self._prefix_ids(prefix)

    def _prefix_ids(self, prefix: str) -> list[int]:
        ids = self.encode(prefix) if prefix else []
        return ids[1:] if ids and ids[0] == self.hf.bos_token_id else ids


class Decodes(Protocol):
    """What decodes ids: a `Tokenizer`, or one of transformers."""

    def decode(self, ids: Any, skip_special_tokens: bool, /) -> Any: ...


class GrowingText:
    """Text of a growing list of ids, decoded a few ids at a time.

    Decoding ids one by one is wrong (a character can span several), and decoding all of them each
    time is quadratic. So only the ids since the last settled point are decoded again, together with
    those before it that give them context.
    """

    def __init__(self, tokenizer: Decodes, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context = 0
        self._settled = 0
        self._text = ""

    def update(self, ids: Seq[int], final: bool = False) -> str:
        """The text of ``ids``, of which those seen before are a prefix.

        An incomplete character at the end is left out until it is complete or ``final``.
        """
        if len(ids) == self._settled:
            return self._text
        before = self._decode(ids[self._context : self._settled])
        after = self._decode(ids[self._context :])
        if after.endswith(_REPLACEMENT) and not final:
            return self._text
        self._text += after[len(before) :]
        self._context, self._settled = self._settled, len(ids)
        return self._text

    def _decode(self, ids: Seq[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens) if ids else ""


_MEDIA = ("image", "audio", "video", "vision")
_LOOP_NAMES = ("message", "msg", "m")


def takes_parts(template: str | None) -> bool:
    """Whether a chat template goes through the parts of a message's content, found as SGLang finds it."""
    if template is None:
        return False
    if any(word in template for word in _MEDIA):
        return True
    try:
        tree = jinja2.Environment(extensions=[jinja2.ext.loopcontrols]).parse(template)
    except jinja2.TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node) -> bool:
    while isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test | jinja2.nodes.Getitem):
        if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const):
            return node.arg.value == "content" and _is_message(node.node)
        if node.node is None:
            return False
        node = node.node
    return isinstance(node, jinja2.nodes.Getattr) and node.attr == "content" and _is_message(node.node)


def _is_message(node: jinja2.nodes.Node) -> bool:
    return isinstance(node, jinja2.nodes.Name) and node.name in _LOOP_NAMES
