"""Chat templates in the formats of model families, written from what these formats are."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_ANSWER = "{% if add_generation_prompt %}"

# A family: its control tokens, of which the first ends an answer, and its template.
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "qwen": (
        ("<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }} in <tool_call></tool_call><|im_end|>\n"
        "{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        "\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "<|im_end|>\n{% endif %}{% endfor %}" + _ANSWER + "<|im_start|>assistant\n{% endif %}",
    ),
    "qwen-thinking": (
        ("<|im_end|>", "<|im_start|>", "<think>", "</think>"),
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n"
        "</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        + _ANSWER
        + "<|im_start|>assistant\n<think>\n{% endif %}",
    ),
    "llama": (
        ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        "<|begin_of_text|>{% for m in messages %}"
        "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
        "{% if loop.first %}" + _TOOLS + "{% endif %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
        "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
        + _ANSWER
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    "mistral": (
        ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}<s>{% for m in messages %}"
        "{% if m.role == 'user' %}{% if loop.index0 == ns.last and tools %}"
        "[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}[INST]"
        "{% if loop.index0 == ns.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ {'content': m.content} | tojson }}[/TOOL_RESULTS]"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}",
    ),
    "gemma": (
        ("<end_of_turn>", "<bos>", "<start_of_turn>"),
        "<bos>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) and m.role != 'tool' "
        "and messages[0].role == 'user' and not tools %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
        "<end_of_turn>\n{% endfor %}" + _ANSWER + "<start_of_turn>model\n{% endif %}",
    ),
    "deepseek": (
        (
            "<｜end▁of▁sentence｜>",
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁output▁begin｜>",
        ),
        "<｜begin▁of▁sentence｜>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}<｜tool▁begin｜>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}" + _ANSWER + "<｜Assistant｜>{% endif %}",
    ),
    "glm": (
        ("<|endoftext|>", "[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
        "[gMASK]{% for m in messages %}{% if m.role == 'tool' %}<|observation|>"
        "{% else %}<|{{ m.role }}|>{% endif %}\n{{ m.content }}{% endfor %}"
        + _ANSWER
        + "<|assistant|>{% endif %}",
    ),
    "rounds": (
        ("<|im_end|>",),
        "{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index }}] {% endif %}"
        "{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}",
    ),
}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Bytes, and the control tokens: every second one is special, the others are added ones."""
    tokens, template = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    for number, token in enumerate(tokens):
        special = number % 2 == 0
        add = core.add_special_tokens if special else core.add_tokens
        add([AddedToken(token, special=special, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=tokens[0])
    tokenizer.chat_template = template
    return tokenizer
