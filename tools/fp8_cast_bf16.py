"""Makes a bfloat16 checkpoint of a quantised Hugging Face directory: float8, 4-bit integers or MXFP4.

    python tools/fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-V3 --output-bf16-hf-path DeepSeek-V3-BF16
    python tools/fp8_cast_bf16.py --input-fp8-hf-path gpt-oss-20b --output-bf16-hf-path gpt-oss-20b-BF16

Trainers and engines read quantised checkpoints themselves. A copy like this is for what does not, and for
engines that are to compute in bfloat16.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.models.checkpoint.quantization import KEYS
from slime.models.checkpoint.safetensors_file import Spec
from slime.models.checkpoint.weights_dir import WeightsReader
from slime.models.hf_config import read_hf_config
from tools.rewrite_checkpoint import rewrite


class PlainRecipe:
    """Quantised weights in bfloat16; the others as they are stored."""

    def __init__(self, quantized: frozenset[str]) -> None:
        self._quantized = quantized

    def specs(self, name: str, spec: Spec) -> dict[str, Spec]:
        return {name: (torch.bfloat16, spec[1]) if name in self._quantized else spec}

    def convert(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor.bfloat16() if name in self._quantized else tensor}

    def config(self, config: dict[str, Any], names: Iterable[tuple[str, Spec]]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name not in KEYS}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 and one line on standard error for bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True, help="quantised directory")
    parser.add_argument("--output-bf16-hf-path", type=Path, required=True, help="directory to make")
    options = parser.parse_args(argv)
    source, target = options.input_fp8_hf_path, options.output_bf16_hf_path
    try:
        if not any(read_hf_config(source).get(key) for key in KEYS):
            raise ValueError(f"{source}: is not quantised")
        with WeightsReader(source) as reader:
            recipe = PlainRecipe(reader.quantized)
        rewrite(source, target, recipe)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{target}: {source} in bfloat16")
    return 0


if __name__ == "__main__":
    sys.exit(main())
