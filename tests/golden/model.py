"""A tiny Qwen3 whose weights are the same numbers on every machine.

They are multiples of 2^-17 drawn as integers: a generator of normal numbers differs between processors in
the last digit, and every curve with it.
"""

from pathlib import Path

import numpy as np
import torch

from tools.make_tiny_model import make_config, make_model, make_tokenizer, save_checkpoint

_STEPS = 2**15
_SCALE = 2.0**-17


def save_golden_model(path: Path) -> str:
    """Writes the checkpoint with its tokenizer and returns its path."""
    tokenizer = make_tokenizer()
    config = make_config(
        tokenizer,
        hidden_size=64,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
    )
    config.tie_word_embeddings = False
    model = make_model(config)
    numbers = np.random.default_rng(20261121)
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            drawn = torch.from_numpy(
                numbers.integers(-_STEPS, _STEPS, size=tuple(param.shape), dtype=np.int64)
            )
            # Up to 0.25 for matrices, which 4 layers of this width bear, and 1 +- 0.25 for norms.
            param.copy_(drawn * _SCALE + (1.0 if "norm" in name else 0.0))
    save_checkpoint(path, model, tokenizer)
    return str(path)
