"""Makes a float8 checkpoint of a Hugging Face directory.

    python tools/convert_hf_to_fp8.py --model-dir Qwen3-4B --save-dir Qwen3-4B-FP8 [--strategy block]

--strategy says what shares a scale: blocks of --block-size (``quant_method: fp8``, as DeepSeek-V3 has it),
the rows (channel) or the whole of a matrix (tensor; both ``compressed-tensors``). Matrices of linear layers
are converted, those of experts one by one; embeddings, the head, routers, norms and towers for images stay as
they are. Each of --max-workers threads holds one matrix.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.models.checkpoint import fp8
from slime.models.checkpoint.encoding import Fp8Encoding
from slime.models.checkpoint.safetensors_file import Spec
from tools.rewrite_checkpoint import require_plain, rewrite

_KEPT = ("norm", "embed", "router", "lm_head", "eh_proj", "weights_proj")
_KEPT += ("visual.", "vision_tower.", "multi_modal_projector.")
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)


class Fp8Recipe:
    """Float8 matrices, each with a ``weight_scale_inv`` or, without blocks, a ``weight_scale`` beside it."""

    def __init__(
        self,
        strategy: Literal["block", "channel", "tensor"],
        block: tuple[int, int] = (128, 128),
        power_of_two: bool = False,
    ) -> None:
        self._strategy, self._block, self._power_of_two = strategy, block, power_of_two

    def specs(self, name: str, spec: Spec) -> dict[str, Spec]:
        if not is_converted(name, spec):
            return {name: spec}
        return self._encoding(name, spec).specs()

    def convert(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        spec = (tensor.dtype, tuple(tensor.shape))
        return self._encoding(name, spec).encode(tensor) if is_converted(name, spec) else {name: tensor}

    def config(self, config: dict[str, Any], names: Iterable[tuple[str, Spec]]) -> dict[str, Any]:
        return {**config, "quantization_config": self._described(kept_modules(names, is_converted))}

    def _described(self, kept: list[str]) -> dict[str, Any]:
        if self._strategy == "block":
            fmt = {"scale_fmt": "ue8m0"} if self._power_of_two else {}
            return {
                **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
                **{"weight_block_size": list(self._block), "modules_to_not_convert": kept, **fmt},
            }
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        by_token = "token" if self._strategy == "channel" else "tensor"
        group = {
            "targets": ["Linear"],
            "weights": {**weights, "strategy": self._strategy},
            "input_activations": {**weights, "strategy": by_token, "dynamic": True},
        }
        return {
            **{"quant_method": "compressed-tensors", "format": "float-quantized"},
            **{"config_groups": {"group_0": group}, "ignore": kept, "kv_cache_scheme": None},
            "quantization_status": "compressed",
        }

    def _encoding(self, name: str, spec: Spec) -> Fp8Encoding:
        shape = (spec[1][0], spec[1][1])
        block = {"block": self._block, "channel": (1, shape[1]), "tensor": shape}[self._strategy]
        scales = (1,) if self._strategy == "tensor" else fp8.scale_shape(shape, block)
        scale_name = f"{name}_scale_inv" if self._strategy == "block" else f"{name}_scale"
        return Fp8Encoding(name, shape, block, scale_name, (torch.float32, scales), self._power_of_two)


def block_fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 [O, I] and the float32 scale of each block; one of zeros has the scale 1."""
    return fp8.quantize(weight, (block[0], block[1]), power_of_two=False)


def kept_modules(names: Iterable[tuple[str, Spec]], is_converted: Callable[[str, Spec], bool]) -> list[str]:
    """The modules that have matrices and keep them."""
    return [
        name.removesuffix(".weight")
        for name, spec in names
        if name.endswith(".weight") and len(spec[1]) > 1 and not is_converted(name, spec)
    ]


def is_converted(name: str, spec: Spec) -> bool:
    """Whether it is the matrix of a linear layer; routers and the gates of shared experts are kept."""
    if not name.endswith(".weight") or len(spec[1]) != 2 or spec[0] not in _PLAIN or 0 in spec[1]:
        return False
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return not module.endswith("gate") and not any(word in name for word in _KEPT)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 and one line on standard error for bad input."""
    options = _parser().parse_args(argv)
    try:
        for name, value in (
            ("--block-size", min(options.block_size)),
            ("--max-workers", options.max_workers),
        ):
            if value < 1:
                raise ValueError(f"{name} {value}: wanted: 1 or more")
        if options.strategy != "block" and options.scale_fmt:
            raise ValueError(f"--scale-fmt {options.scale_fmt}: wanted: --strategy block with it")
        require_plain(options.model_dir)
        recipe = Fp8Recipe(options.strategy, tuple(options.block_size), options.scale_fmt == "ue8m0")
        rewrite(options.model_dir, options.save_dir, recipe, options.max_workers)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.save_dir}: {options.model_dir} in float8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory to convert")
    parser.add_argument("--save-dir", type=Path, required=True, help="directory to make")
    parser.add_argument("--strategy", choices=("block", "channel", "tensor"), default="block")
    parser.add_argument("--block-size", type=int, nargs=2, default=[128, 128], help="rows and columns")
    parser.add_argument("--max-workers", type=int, default=1, help="threads")
    parser.add_argument("--scale-fmt", choices=("ue8m0",), help="scales are powers of two")
    return parser


if __name__ == "__main__":
    sys.exit(main())
