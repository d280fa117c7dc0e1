"""Make a small, randomly initialised Hugging Face checkpoint with a byte-level chat tokenizer.

    python tools/make_tiny_model.py --output outputs/tiny                       # the quickstart's model
    python tools/make_tiny_model.py --output outputs/tiny-llama --family llama --num-layers 2

It is ``python -m slime.cli.tiny_model``, which an installed package has too.
"""

from slime.cli.tiny_model import (
    CHAT_TEMPLATE,
    FAMILIES,
    main,
    make_config,
    make_model,
    make_tokenizer,
    save_checkpoint,
)

__all__ = [
    "CHAT_TEMPLATE",
    "FAMILIES",
    "main",
    "make_config",
    "make_model",
    "make_tokenizer",
    "save_checkpoint",
]

if __name__ == "__main__":
    main()
