"""The FSDP trainer."""

from dataclasses import dataclass
from typing import Literal

from slime.config.flag import flag, refused


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """What the trainer of --train-backend fsdp does otherwise."""

    gradient_checkpointing: bool = flag(False, help="compute layers again in the backward pass (fsdp)")
    attn_implementation: Literal["flash_attention_2", "sdpa", "eager", "flash_attention_3"] = flag(
        "flash_attention_2",
        supported=("flash_attention_2", "sdpa", "eager"),
        help="attention of the transformers model (fsdp): flash_attention_2 keeps rows packed, with torch's "
        "kernels; with the others each sequence gets a padded row",
    )
    fsdp_cpu_offload: bool = flag(
        False, help="keep weights, gradients and optimizer state on the host between uses (fsdp)"
    )
    fsdp_state_dict_cpu_offload: bool = refused(
        True, help="checkpoints pass through the host (fsdp; always so)", wanted="leave it out"
    )
    fsdp_cpu_backend: Literal["gloo"] = flag(
        "gloo", supported=("gloo",), help="who sends host tensors (fsdp)"
    )
    warmup_ratio: float | None = refused(
        help="part of the run that warms up (fsdp)", wanted="use --lr-warmup-fraction"
    )
