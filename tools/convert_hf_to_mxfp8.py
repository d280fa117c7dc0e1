"""Makes a checkpoint in MXFP8 of a Hugging Face directory, as SGLang reads it (``quant_method: mxfp8``).

    python tools/convert_hf_to_mxfp8.py --model-dir Qwen3-4B --save-dir Qwen3-4B-MXFP8

Matrices of linear layers get float8 numbers (``weight``) and a power of two for each 32 inputs
(``weight_scale_inv``, bytes); what ``convert_hf_to_fp8.py`` leaves alone is left alone here too, and so is
``kv_b_proj`` of latent attention, of which SGLang would make float8 with one scale, group by group, with each
load. A matrix whose inputs are no multiple of 32 is refused, as SGLang refuses it.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.models.checkpoint import mxfp8
from slime.models.checkpoint.encoding import Mxfp8Encoding
from slime.models.checkpoint.safetensors_file import Spec
from tools import convert_hf_to_fp8
from tools.rewrite_checkpoint import require_plain, rewrite


class Mxfp8Recipe:
    """Float8 matrices, each with a ``weight_scale_inv`` beside it."""

    def specs(self, name: str, spec: Spec) -> dict[str, Spec]:
        """Raises ValueError if rows are not made up of whole groups."""
        return _encoding(name, spec).specs() if _is_converted(name, spec) else {name: spec}

    def convert(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        spec = (tensor.dtype, tuple(tensor.shape))
        return _encoding(name, spec).encode(tensor) if _is_converted(name, spec) else {name: tensor}

    def config(self, config: dict[str, Any], names: Iterable[tuple[str, Spec]]) -> dict[str, Any]:
        described = {
            **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "mxfp8"},
            **{"scale_fmt": "ue8m0", "weight_block_size": list(mxfp8.BLOCK)},
            "modules_to_not_convert": convert_hf_to_fp8.kept_modules(names, _is_converted),
        }
        return {**config, "quantization_config": described}


def _is_converted(name: str, spec: Spec) -> bool:
    return convert_hf_to_fp8.is_converted(name, spec) and not name.endswith(".kv_b_proj.weight")


def _encoding(name: str, spec: Spec) -> Mxfp8Encoding:
    return Mxfp8Encoding(name, (spec[1][0], spec[1][1]))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 and one line on standard error for bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory to convert")
    parser.add_argument("--save-dir", type=Path, required=True, help="directory to make")
    parser.add_argument("--max-workers", type=int, default=1, help="threads")
    options = parser.parse_args(argv)
    try:
        if options.max_workers < 1:
            raise ValueError(f"--max-workers {options.max_workers}: wanted: 1 or more")
        require_plain(options.model_dir)
        rewrite(options.model_dir, options.save_dir, Mxfp8Recipe(), options.max_workers)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.save_dir}: {options.model_dir} in MXFP8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
