"""Checkpoints in the shapes of Qwen3, with random weights, for benchmarks on GPUs."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from slime.utils.accelerator import local_device
from tools.make_tiny_model import make_tokenizer

_VOCABULARY = 151936
# hidden size, layers, FFN size, heads, heads of keys and values, width of a head, vocabulary
SHAPES = {
    "tiny": (64, 2, 128, 4, 2, 16, 320),
    "0.6B": (1024, 28, 3072, 16, 8, 128, _VOCABULARY),
    "1.7B": (2048, 28, 6144, 16, 8, 128, _VOCABULARY),
    "4B": (2560, 36, 9728, 32, 8, 128, _VOCABULARY),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def make_checkpoint(directory: Path, size: str, dtype: torch.dtype) -> None:
    """Writes a model, made on the GPU where there is one, and a byte-level tokenizer."""
    hidden, layers, ffn, heads, groups, width, vocabulary = SHAPES[size]
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with local_device():
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
