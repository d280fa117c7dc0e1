"""Make a small, randomly initialised Hugging Face checkpoint with a byte-level chat tokenizer.

    python -m slime.cli.tiny_model --output outputs/tiny                       # the quickstart's model
    python -m slime.cli.tiny_model --output outputs/tiny-llama --family llama --num-layers 2

Nothing is downloaded. The defaults are a Qwen3 of 0.5 million parameters that two CPU cores can train
in minutes, with head counts that tensor parallelism can divide.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_TOKEN, _, EOS_TOKEN = SPECIAL_TOKENS

# One id each, so that a demonstration is short. Not special: they survive decode(skip_special_tokens=True),
# which is what reward functions and tool parsers read.
WHOLE_WORDS = (
    "system",
    "user",
    "assistant",
    "tool",
    "\\boxed{",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

# ChatML; like Qwen3 it shows a tool's answer to the model as a user turn, and calls as JSON in tags. Of tools
# it tells the names alone: to a model of this size a description says nothing.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{% set known = tool['function'] or tool %}"
    "{{ known['name'] }}({{ ((known['parameters'] or {})['properties'] or []) | join(', ') }})\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "<|im_start|>user\n<tool_response>{{ message['content'] }}</tool_response><|im_end|>\n"
    "{% else %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{% set called = call['function'] or call %}"
    "<tool_call>{\"name\": {{ called['name'] | tojson }}, "
    "\"arguments\": {{ called['arguments'] | tojson }}}</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: 256 bytes, the special tokens and some whole words. It has no unknowns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in WHOLE_WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(
    tokenizer: PreTrainedTokenizerFast,
    family: str = "qwen3",
    *,
    hidden_size: int = 128,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 256,
    vocab_size: int = 320,
    num_experts: int = 8,
    experts_per_token: int = 2,
    expert_intermediate_size: int = 64,
) -> PreTrainedConfig:
    """A model config. ``vocab_size`` leaves room above the tokenizer's 270 ids, as real models do."""
    if head_dim * num_heads != hidden_size and family == "qwen2":
        raise ValueError(
            f"--head-dim {head_dim}: qwen2 needs hidden_size / heads = {hidden_size / num_heads:g}"
        )
    config_class, _ = FAMILIES[family]
    # qwen2 derives the head size and has no field for it.
    special: dict[str, Any] = {} if family == "qwen2" else {"head_dim": head_dim}
    if family == "qwen3_moe":
        special |= {"num_experts": num_experts, "num_experts_per_tok": experts_per_token}
        special |= {"moe_intermediate_size": expert_intermediate_size, "norm_topk_prob": True}
    return config_class(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        # Wider than the usual 0.02: a model this small learns about twice as fast from it.
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(EOS_TOKEN),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD_TOKEN),
        **special,
    )


def make_model(config: PreTrainedConfig, family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """A float32 model whose weights depend on ``seed`` alone."""
    torch.manual_seed(seed)
    _, model_class = FAMILIES[family]
    model = model_class(config).float()
    # transformers makes the padding token's row zero, and the norm of a zero vector has a gradient a
    # thousand times larger than any other: a random model does sample that token.
    padding = model.get_input_embeddings().weight.data[config.pad_token_id]
    torch.nn.init.normal_(padding, std=config.initializer_range)
    return model


def save_checkpoint(output: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the checkpoint the way ``AutoModelForCausalLM`` and ``AutoTokenizer`` read it."""
    disable_progress_bar()  # it would stand before the first line of a run
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    for name, default in (
        ("hidden-size", 128),
        ("num-layers", 3),
        ("num-heads", 4),
        ("num-kv-heads", 2),
        ("head-dim", 32),
        ("intermediate-size", 256),
        ("vocab-size", 320),
        ("num-experts", 8),
        ("experts-per-token", 2),
        ("expert-intermediate-size", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    values = vars(parser.parse_args(argv))
    output, seed, family = values.pop("output"), values.pop("seed"), values.pop("family")
    tokenizer = make_tokenizer()
    model = make_model(make_config(tokenizer, family, **values), family, seed)
    save_checkpoint(output, model, tokenizer)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{output}: {family}, {size:,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
