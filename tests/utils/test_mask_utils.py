import pytest

from slime.utils.mask_utils import MultiTurnLossMaskGenerator, get_response_lengths
from tools.make_tiny_model import make_tokenizer

CONVERSATION = [
    {"role": "user", "content": "47*28"},
    {"role": "assistant", "content": "<tool_call>47*28</tool_call>"},
    {"role": "tool", "content": "1316"},
    {"role": "assistant", "content": "\\boxed{1316}"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def rendered(tokenizer, messages, **kwargs):
    text = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["qwen", "qwen3"])
def test_a_turn_is_trained_from_after_its_header_to_its_end(tokenizer, kind):
    masks = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = masks.get_loss_mask(CONVERSATION)
    assert ids == rendered(tokenizer, CONVERSATION)
    assert len(ids) == len(mask)
    assert masks.get_text_from_loss_mask(ids, mask) == [
        "<tool_call>47*28</tool_call><|im_end|>\n",
        "\\boxed{1316}<|im_end|>\n",
    ]


# <|im_start|> 257, <|im_end|> 258, user 260, assistant 261, <think> 264, newline 198, "1" to "4" 16 to 19.
FIRST = [257, 260, 198, 16, 258, 198, 257, 261, 198, 17, 258, 198]
SECOND = [257, 260, 198, 18, 258, 198, 257, 261, 198, 264, 198, 19, 258, 198]


@pytest.mark.parametrize(
    ("kind", "ids", "mask"),
    [
        ("qwen", FIRST + SECOND, [0] * 9 + [1] * 3 + [0] * 9 + [1] * 5),
        ("qwen3", FIRST + SECOND, [0] * 9 + [1] * 3 + [0] * 9 + [1] * 5),
        ("qwen3_5", FIRST + SECOND, [0] * 9 + [1] * 3 + [0] * 11 + [1] * 3),
        ("distill_qwen", [*FIRST[:9], 264, 198, 19], [0] * 9 + [1] * 3),
    ],
)
def test_ids_and_masks_worked_out_by_hand(tokenizer, kind, ids, mask):
    contents = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "<think>\n4")]
    messages = [{"role": role, "content": content} for role, content in contents]
    assert MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(messages) == (ids, mask)


def test_qwen3_5_trains_through_the_newline_and_after_an_opened_thought(tokenizer):
    masks = MultiTurnLossMaskGenerator(tokenizer, "qwen3_5")
    messages = [*CONVERSATION[:3], {"role": "assistant", "content": "<think>\nhm</think>4"}]
    ids, mask = masks.get_loss_mask(messages)
    assert ids == rendered(tokenizer, messages)
    assert masks.get_text_from_loss_mask(ids, mask) == [
        "<tool_call>47*28</tool_call><|im_end|>\n",
        "hm</think>4<|im_end|>\n",
    ]


def test_distill_takes_the_first_message_and_the_last_content(tokenizer):
    masks = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen")
    ids, mask = masks.get_loss_mask(CONVERSATION)
    assert tokenizer.decode(ids) == "<|im_start|>user\n47*28<|im_end|>\n<|im_start|>assistant\n\\boxed{1316}"
    assert masks.get_text_from_loss_mask(ids, mask) == ["\\boxed{1316}"]


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5", "distill_qwen"])
def test_a_message_can_opt_out(tokenizer, kind):
    messages = [dict(m, step_loss_mask=0) if m["role"] == "assistant" else m for m in CONVERSATION]
    assert sum(MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(messages)[1]) == 0


@pytest.mark.parametrize("kind", ["qwen", "qwen3"])
def test_a_default_system_prompt_and_grouped_tool_results_are_rendered_once(kind):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m['role'] == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
        "\n<tool_response>{{ m['content'] }}</tool_response>"
        "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [*CONVERSATION[:3], {"role": "tool", "content": "again"}, CONVERSATION[3]]
    masks = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = masks.get_loss_mask(messages)
    assert ids == rendered(tokenizer, messages)
    assert masks.get_text_from_loss_mask(ids, mask)[1] == "\\boxed{1316}<|im_end|>\n"


def test_an_unknown_kind_is_refused(tokenizer):
    with pytest.raises(ValueError, match="--loss-mask-type llama: expected one of qwen, qwen3"):
        MultiTurnLossMaskGenerator(tokenizer, "llama")


def test_the_response_begins_at_the_first_trained_token():
    assert get_response_lengths([[0, 1, 0, 1], [0, 0], [1]]) == [3, 0, 1]


def test_images_before_the_text_get_zeros(tokenizer):
    masks = MultiTurnLossMaskGenerator(tokenizer)
    ids, mask = masks.get_loss_mask(CONVERSATION)
    parts = [{"type": "image"}, {"type": "text", "text": CONVERSATION[0]["content"]}]
    messages = [{"role": "user", "content": parts}, *CONVERSATION[1:]]
    padded = [7, 7, 7, *ids]
    assert masks.get_loss_mask_with_multimodal_alignment(messages, padded) == (padded, [0, 0, 0, *mask])
    with pytest.raises(ValueError, match="1 input ids, but the text alone has"):
        masks.get_loss_mask_with_multimodal_alignment(messages, [1])
