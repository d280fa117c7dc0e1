"""Loading what turns text into tokens."""

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(path: str, trust_remote_code: bool = False, **kwargs: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a HF checkpoint directory.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)
    except OSError as error:
        raise ValueError(f"no tokenizer in {path!r}: {error}") from error
