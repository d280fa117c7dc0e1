"""Makes a checkpoint with 4-bit integers of a Hugging Face directory.

    python tools/convert_hf_to_int4.py --model-dir Moonlight-16B-A3B --save-dir Moonlight-16B-A3B-INT4

The format is that of Kimi-K2-Thinking (compressed-tensors, ``pack-quantized``): --group-size neighbours of
a row share a scale. --ignore-rules name what stays as it is: a module, its beginning, or ``re:`` and a
regular expression. By default only routed experts are converted; a dense model needs rules of its own. Rows
that are no multiple of a group stay as they are too. Numbers are rounded to the nearest; there is no
calibration (GPTQ).
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.models.checkpoint import int4
from slime.models.checkpoint.encoding import Int4Encoding
from slime.models.checkpoint.safetensors_file import Spec
from tools.rewrite_checkpoint import require_plain, rewrite

DEFAULT_RULES = (
    *("re:.*lm_head.*", "re:.*norm.*", "re:.*embed.*", "re:.*self_attn.*", "re:.*shared_expert.*"),
    *(r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", r"re:.*\.gate$", "re:.*router.*"),
)
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)


class Int4Recipe:
    """``weight_packed``, ``weight_scale`` and ``weight_shape`` in the place of a matrix."""

    def __init__(self, group: int, rules: Sequence[str]) -> None:
        self._group, self._rules = group, list(rules)

    def specs(self, name: str, spec: Spec) -> dict[str, Spec]:
        if not self._is_converted(name, spec):
            return {name: spec}
        return self._encoding(name, spec).specs()

    def convert(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        spec = (tensor.dtype, tuple(tensor.shape))
        return self._encoding(name, spec).encode(tensor) if self._is_converted(name, spec) else {name: tensor}

    def config(self, config: dict[str, Any], names: Iterable[tuple[str, Spec]]) -> dict[str, Any]:
        kept = [
            name.removesuffix(".weight")
            for name, spec in names
            if _is_matrix(name, spec) and not self._ignored(name) and not self._is_converted(name, spec)
        ]
        weights = {
            **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"},
            **{"group_size": self._group, "dynamic": False, "actorder": None},
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        quantization = {
            **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
            **{"config_groups": {"group_0": group}, "ignore": [*self._rules, *kept], "kv_cache_scheme": None},
            "quantization_status": "compressed",
        }
        return {**config, "quantization_config": quantization}

    def _encoding(self, name: str, spec: Spec) -> Int4Encoding:
        return Int4Encoding(name, (spec[1][0], spec[1][1]), self._group, scale_dtype=spec[0])

    def _is_converted(self, name: str, spec: Spec) -> bool:
        return _is_matrix(name, spec) and spec[1][1] % self._group == 0 and not self._ignored(name)

    def _ignored(self, name: str) -> bool:
        module = name.removesuffix(".weight")
        return any(
            re.match(rule.removeprefix("re:"), module) is not None
            if rule.startswith("re:")
            else module == rule or module.startswith(f"{rule}.")
            for rule in self._rules
        )


def _is_matrix(name: str, spec: Spec) -> bool:
    return name.endswith(".weight") and len(spec[1]) == 2 and spec[0] in _PLAIN and 0 not in spec[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 and one line on standard error for bad input."""
    options = _parser().parse_args(argv)
    try:
        if options.group_size < 1 or options.group_size % int4.PER_WORD:
            raise ValueError(f"--group-size {options.group_size}: wanted: a multiple of {int4.PER_WORD}")
        if options.max_workers < 1:
            raise ValueError(f"--max-workers {options.max_workers}: wanted: 1 or more")
        if options.is_symmetric.lower() not in ("true", "1"):
            raise ValueError(f"--is-symmetric {options.is_symmetric}: not supported (wanted: True)")
        for rule in options.ignore_rules:
            _check_rule(rule)
        require_plain(options.model_dir)
        recipe = Int4Recipe(options.group_size, options.ignore_rules)
        rewrite(options.model_dir, options.save_dir, recipe, options.max_workers)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.save_dir}: {options.model_dir} in 4-bit integers")
    return 0


def _check_rule(rule: str) -> None:
    try:
        re.compile(rule.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"--ignore-rules {rule}: no regular expression ({error})") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory to convert")
    parser.add_argument("--save-dir", type=Path, required=True, help="directory to make")
    parser.add_argument("--group-size", type=int, default=32, help="neighbours that share a scale")
    parser.add_argument("--is-symmetric", default="True", help="True: there are no zero points")
    parser.add_argument("--ignore-rules", nargs="*", default=list(DEFAULT_RULES), help="what stays as it is")
    parser.add_argument("--max-workers", type=int, default=1, help="threads")
    return parser


if __name__ == "__main__":
    sys.exit(main())
