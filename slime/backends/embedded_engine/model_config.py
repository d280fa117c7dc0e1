"""What the engine serves, read from an HF checkpoint directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.models import ModelShape, read_shape
from slime.models.hf_config import read_hf_config, read_stop_ids

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

    @classmethod
    def from_directory(cls, path: str | Path, dtype: str = "auto") -> "ModelConfig":
        """Reads ``config.json`` (and the stop ids of ``generation_config.json``) of a checkpoint.

        Raises:
            ValueError: the architecture, or an option of it, is not one the engine can compute.
        """
        raw = read_hf_config(path)
        return cls(
            shape=read_shape(path),
            architectures=tuple(raw.get("architectures") or ()),
            eos_token_ids=read_stop_ids(path),
            dtype=_dtype(raw, dtype),
        )


def _dtype(raw: dict[str, Any], requested: str) -> torch.dtype:
    name = requested if requested != "auto" else raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"--dtype {name}: not supported (wanted: one of {sorted(DTYPES)})")
    return DTYPES[name]
