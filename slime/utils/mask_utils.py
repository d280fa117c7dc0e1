"""Which tokens of a conversation a model is trained on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from slime.utils.data_rows import holds_written_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
IdsAndMask = tuple[list[int], list[int]]

_DUMMY_USER = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}
_DEEPSEEK_ASSISTANT = "<｜Assistant｜>"
_CHATML_ASSISTANT = "<|im_start|>assistant\n"
_CHATML_END = "<|im_end|>"


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each mask the number of tokens from its first 1 to its end; 0 without a 1."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


@dataclass(frozen=True)
class _TemplateLengths:
    """Lengths in tokens: the default system prompt that some templates put first, the dummy user's turn, and
    the
    header of a turn to be generated."""

    system: int
    dummy_turn: int
    header: int


class MultiTurnLossMaskGenerator:
    """Token ids and loss mask of a chat, by the habits of a family of templates.

    Trained is an assistant's turn after its header: the content, the token that ends the turn, and what the
    template puts after that (a newline in ChatML). A message with ``step_loss_mask`` other than 1 is not
    trained on.

    Args:
        tokenizer_type: ``qwen`` renders message by message; ``qwen3`` renders each beside a dummy user
            message, for templates that treat the last turn specially; ``qwen3_5`` renders the whole
            conversation and finds the turns in it; ``distill_qwen`` takes the first message as prompt
            and the last one's content as response.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tokenizer_type: str = "qwen") -> None:
        methods = {
            "qwen": self._mask_qwen,
            "qwen3": self._mask_qwen3,
            "qwen3_5": self._mask_whole_conversation,
            "distill_qwen": self._mask_first_and_last,
        }
        if tokenizer_type not in methods:
            raise ValueError(f"--loss-mask-type {tokenizer_type}: expected one of {', '.join(methods)}")
        if tokenizer_type == "qwen" and _DEEPSEEK_ASSISTANT in tokenizer.get_vocab():
            tokenizer_type = "distill_qwen"
        self._tokenizer = tokenizer
        self._method = methods[tokenizer_type]

    def get_loss_mask(self, messages: list[Message], tools: list[Any] | None = None) -> IdsAndMask:
        """Ids and 0/1 mask, of equal length, of the whole conversation."""
        if not messages:
            raise ValueError("a conversation needs at least one message")
        return self._method(messages, tools)

    def get_loss_mask_with_multimodal_alignment(
        self, messages: list[Message], input_ids: list[int], tools: list[Any] | None = None
    ) -> IdsAndMask:
        """``input_ids`` with the mask of the text in ``messages``, zeros before it.

        A processor has put the tokens of images into ``input_ids``, all of them before the text of the
        answer.

        Raises:
            ValueError: the text alone has more tokens.
        """
        _, mask = self.get_loss_mask([_text_of(message) for message in messages], tools)
        if len(mask) > len(input_ids):
            raise ValueError(f"{len(input_ids)} input ids, but the text alone has {len(mask)} tokens")
        return input_ids, [0] * (len(input_ids) - len(mask)) + mask

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_mask: Sequence[int]) -> list[str]:
        """The text of each stretch of trained tokens."""
        stretches = groupby(zip(token_ids, loss_mask, strict=True), key=lambda pair: pair[1])
        return [self._tokenizer.decode([i for i, _ in pairs]) for trained, pairs in stretches if trained]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _render(self, messages: list[Message], tools: Any = None, generation: bool = False) -> list[int]:
        return self._encode(self._render_text(messages, tools, generation))

    def _render_text(self, messages: list[Message], tools: Any, generation: bool = False) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation
        )
        if holds_written_parts(text, messages):
            raise ValueError("the chat template takes no list of parts as content (wanted: text)")
        return text

    @cached_property
    def _lengths(self) -> "_TemplateLengths":
        one, two = len(self._render([_DUMMY_USER])), len(self._render([_DUMMY_USER] * 2))
        header = len(self._render([_DUMMY_USER], generation=True)) - one
        return _TemplateLengths(system=2 * one - two, dummy_turn=two - one, header=header)

    def _mask_turn(self, turn: list[Message], ids: list[int]) -> list[int]:
        message = turn[0]
        if message["role"] != "assistant" or message.get("step_loss_mask", 1) != 1:
            return [0] * len(ids)
        header = self._lengths.header
        return [0] * header + [1] * (len(ids) - header)

    def _mask_qwen(self, messages: list[Message], tools: list[Any] | None) -> IdsAndMask:
        all_ids: list[int] = []
        all_mask: list[int] = []
        for position, turn in enumerate(_turns(messages)):
            ids = self._render(turn, tools if position == 0 else None)
            if position > 0 and turn[0]["role"] != "system":
                ids = ids[self._lengths.system :]
            mask = self._mask_turn(turn, ids)
            all_ids, all_mask = all_ids + ids, all_mask + mask
        return all_ids, all_mask

    def _mask_qwen3(self, messages: list[Message], tools: list[Any] | None) -> IdsAndMask:
        lengths = self._lengths
        all_ids: list[int] = []
        all_mask: list[int] = []
        for position, turn in enumerate(_turns(messages)):
            if position == 0:
                ids = self._render([*turn, _DUMMY_USER], tools)[: -lengths.dummy_turn]
            else:
                ids = self._render([_DUMMY_USER, *turn])[lengths.system + lengths.dummy_turn :]
            mask = self._mask_turn(turn, ids)
            all_ids, all_mask = all_ids + ids, all_mask + mask
        return all_ids, all_mask

    def _mask_whole_conversation(self, messages: list[Message], tools: list[Any] | None) -> IdsAndMask:
        text = self._render_text(messages, tools)
        spans = list(_assistant_spans(text, messages))
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [
            int(any(start < right and end > left for left, right in spans))
            for start, end in encoded["offset_mapping"]
        ]
        return encoded["input_ids"], mask

    def _mask_first_and_last(self, messages: list[Message], tools: list[Any] | None) -> IdsAndMask:
        prompt = self._render(messages[:1], tools, generation=True)
        response = self._encode(messages[-1]["content"])
        trained = int(messages[-1].get("step_loss_mask", 1) == 1)
        return prompt + response, [0] * len(prompt) + [trained] * len(response)


def _text_of(message: Message) -> Message:
    """The message with the text parts of its content as one."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [part.get("text", "") if isinstance(part, dict) else str(part) for part in message["content"]]
    return {**message, "content": " ".join(part for part in parts if part)}


def _turns(messages: list[Message]) -> Iterator[list[Message]]:
    """Messages one by one, but consecutive tool messages together, as templates render them."""
    for is_tool, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_tool:
            yield list(run)
        else:
            yield from ([message] for message in run)


def _assistant_spans(text: str, messages: list[Message]) -> Iterator[tuple[int, int]]:
    """Character spans of the trained assistant turns in a rendered ChatML conversation.

    A turn is trained from after its header, and after an opening ``<think>`` line that the
    generation prompt brings along, through ``<|im_end|>`` and the newline.
    """
    position = 0
    for message in messages:
        if message["role"] != "assistant":
            continue
        header = text.find(_CHATML_ASSISTANT, position)
        end = text.find(_CHATML_END, header)
        if header < 0 or end < 0:
            raise ValueError("--loss-mask-type qwen3_5: the chat template does not render ChatML turns")
        start = header + len(_CHATML_ASSISTANT)
        start += len("<think>\n") if text.startswith("<think>\n", start) else 0
        position = end + len(_CHATML_END)
        position += 1 if text.startswith("\n", position) else 0
        if message.get("step_loss_mask", 1) == 1:
            yield start, position
