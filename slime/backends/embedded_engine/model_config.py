"""What the engine serves, read from an HF checkpoint directory."""

from dataclasses import dataclass
from pathlib import Path

import torch

from slime.models import ModelShape, read_shape
from slime.models.hf_config import HfConfig, read_stop_ids

CPU = torch.device("cpu")
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape, and what serving needs beside it."""

    shape: ModelShape
    architectures: tuple[str, ...]
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device = CPU
    """Where weights and cache are, and everything is computed."""

    @classmethod
    def from_directory(
        cls, path: str | Path, dtype: str = "auto", device: torch.device = CPU
    ) -> "ModelConfig":
        """Reads ``config.json`` (and the stop ids of ``generation_config.json``) of a checkpoint.

        Raises:
            ValueError: the architecture, or an option of it, is not one the engine can compute.
        """
        config = HfConfig.read(path)
        return cls(
            shape=read_shape(path),
            architectures=tuple(config.get("architectures") or ()),
            eos_token_ids=read_stop_ids(path),
            dtype=_dtype(config, dtype),
            device=device,
        )


def _dtype(config: HfConfig, requested: str) -> torch.dtype:
    name = requested if requested != "auto" else config.dtype or "float32"
    if name not in DTYPES:
        raise ValueError(f"--dtype {name}: not supported (wanted: one of {sorted(DTYPES)})")
    return DTYPES[name]
