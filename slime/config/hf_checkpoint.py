"""The Hugging Face directory that says what the model is: its config, tokenizer and first weights."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag, refused


@dataclass(frozen=True, kw_only=True)
class HfCheckpointConfig:
    """The sources of the model and its tokenizer."""

    hf_checkpoint: str = flag(
        required=True, place=True, help="HF directory: tokenizer, config, first weights of the engines"
    )
    model_name: str | None = flag(help="name of the weight converter; config.json names the model")
    trust_remote_code: bool = flag(False, help="run Python code that comes with the checkpoint")
    tokenizer_type: Literal["HuggingFaceTokenizer"] = flag(
        "HuggingFaceTokenizer", help="kind of tokenizer; it is read from --hf-checkpoint"
    )
    tokenizer_model: str | None = refused(
        help="tokenizer directory", wanted="leave it out, --hf-checkpoint has it"
    )
