"""Makes a checkpoint with experts in MXFP4 of a Hugging Face directory of gpt-oss, as the published ones are.

    python tools/convert_hf_to_mxfp4.py --model-dir gpt-oss-20b-BF16 --save-dir gpt-oss-20b-MXFP4

Matrices of experts get 4 bits for each number and a power of two for each 32 inputs; all else stays as it is.
Numbers are rounded to the nearest. Those that came out of such a checkpoint stay the same.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.models.checkpoint.encoding import Mxfp4Encoding
from slime.models.checkpoint.quantization import read_quantization
from slime.models.checkpoint.safetensors_file import Spec
from slime.models.hf_config import HfConfig
from tools.rewrite_checkpoint import require_plain, rewrite

_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
# As published files have it.
_DESCRIBED = {
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
        *("model.embed_tokens", "lm_head"),
    ],
    "quant_method": "mxfp4",
}


class Mxfp4Recipe:
    """``_blocks`` and ``_scales`` in the place of the matrices of a layer's experts."""

    def specs(self, name: str, spec: Spec) -> dict[str, Spec]:
        return _encoding(name, spec).specs() if _is_converted(name, spec) else {name: spec}

    def convert(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        spec = (tensor.dtype, tuple(tensor.shape))
        return _encoding(name, spec).encode(tensor) if _is_converted(name, spec) else {name: tensor}

    def config(self, config: dict[str, Any], names: Iterable[tuple[str, Spec]]) -> dict[str, Any]:
        return {**config, "quantization_config": _DESCRIBED}


def _encoding(name: str, spec: Spec) -> Mxfp4Encoding:
    experts, inputs, outputs = spec[1]
    return Mxfp4Encoding(name, (experts, inputs, outputs))


def _is_converted(name: str, spec: Spec) -> bool:
    return name.endswith(_EXPERTS) and len(spec[1]) == 3 and spec[0] in _PLAIN


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
        # Refuses a model that would not be read again.
        read_quantization(HfConfig.read(options.model_dir).filled(quantization_config=_DESCRIBED))
        rewrite(options.model_dir, options.save_dir, Mxfp4Recipe(), options.max_workers)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.save_dir}: {options.model_dir} in MXFP4")
    return 0


if __name__ == "__main__":
    sys.exit(main())
