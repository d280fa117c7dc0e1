"""How a checkpoint says that its weights are quantised: ``quantization_config`` of config.json.

Four methods are read: ``fp8`` (DeepSeek-V3, Qwen3-FP8, MiniMax-M2), ``compressed-tensors``, in which
weights are float8 or groups of 4-bit integers (Kimi-K2-Thinking), ``mxfp4`` (gpt-oss) and ``mxfp8``, as
SGLang has it. Which tensors are quantised is seen in the files: those with a scale beside them, so lists of
modules that are not (``modules_to_not_convert``, ``ignore``) need no reading.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime.models.families import FAMILIES
from slime.models.hf_config import HfConfig, HfConfigError

KEYS = ("quantization_config", "compression_config")
"""Where config.json has it; the second name is an older one."""
MX_GROUP = 32
"""Neighbours that share a scale in MXFP4 and MXFP8."""


@dataclass(frozen=True)
class Quantization:
    """What shares a scale.

    Attributes:
        block: rows and columns of float8 weights, None for what their scales' shape says: all, or a row.
        group: how many neighbours in a row, of 4-bit numbers and of MXFP8; None for all.
        power_of_two: whether scales are powers of two: of float8 with ``scale_fmt: ue8m0``, of MXFP4 and
            MXFP8 always.
    """

    kind: Literal["fp8", "int4", "mxfp4", "mxfp8"]
    block: tuple[int, int] | None = None
    group: int | None = None
    power_of_two: bool = False

    @property
    def is_float8(self) -> bool:
        """Whether numbers have 8 bits, which are those of all linear layers; those of 4 bits are experts."""
        return self.kind in ("fp8", "mxfp8")

    @property
    def is_laid_out_anew(self) -> bool:
        """Whether SGLang gives loaded weights another layout, and takes others in an update session alone."""
        return self.kind in ("int4", "mxfp8")


def read_quantization(config: HfConfig) -> Quantization | None:
    """Reads how weights are quantised; None if they are stored as they are.

    Raises:
        HfConfigError: they are quantised in a way that is not read.
    """
    found = config.mapping(*KEYS)
    if not found:
        return None
    method = found.get("quant_method")
    if method == "fp8":
        _require(config, "fmt", found.get("fmt", "e4m3"), "e4m3")
        block = _block(config, "weight_block_size", found.get("weight_block_size"))
        return Quantization("fp8", block=block, power_of_two=found.get("scale_fmt") == "ue8m0")
    if method == "compressed-tensors":
        return _compressed(config, found)
    if method == "mxfp8":
        return _mxfp8(config, found)
    if method == "mxfp4":
        known = [name for name, family in FAMILIES.items() if family.in_mxfp4]
        if (model := config.get("model_type")) not in known:
            raise _refused(
                config, "quant_method", method, f"that of {', '.join(known)} alone; this is {model!r}"
            )
        return Quantization("mxfp4", group=MX_GROUP, power_of_two=True)
    algorithm = found.get("quant_algo")  # of ModelOpt, which has NVFP4 and others under one method
    named = method if algorithm is None else f"{method} {algorithm}"
    raise _refused(config, "quant_method", named, "fp8, compressed-tensors, mxfp4 or mxfp8")


def _mxfp8(config: HfConfig, found: Mapping[str, Any]) -> Quantization:
    for name, wanted in (("fmt", "e4m3"), ("scale_fmt", "ue8m0"), ("weight_block_size", [1, MX_GROUP])):
        _require(config, name, found.get(name) or wanted, wanted)
    return Quantization("mxfp8", group=MX_GROUP, power_of_two=True)


def _compressed(config: HfConfig, found: Mapping[str, Any]) -> Quantization:
    sparsity = found.get("sparsity_config") or {}
    _require(config, "sparsity_config.format", sparsity.get("format", "dense"), "dense")
    if "nvfp4" in str(layout := found.get("format")):
        raise _refused(config, "format", layout, "float-quantized or pack-quantized")
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused(config, "config_groups", groups, "a mapping of groups")
    kinds = {_weights_of(config, name, group) for name, group in groups.items()}
    if len(kinds) > 1:
        raise _refused(config, "config_groups", sorted(groups), "one way for all weights")
    return kinds.pop()


def _weights_of(config: HfConfig, name: str, group: Any) -> Quantization:
    where = f"config_groups.{name}.weights"
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _refused(config, where, weights, "a mapping")
    number = (weights.get("num_bits"), weights.get("type"))
    if number not in ((8, "float"), (4, "int")):
        raise _refused(config, where, f"{number[1]} of {number[0]} bits", "float of 8 bits or int of 4 bits")
    for key, wanted in (("symmetric", True), ("actorder", None)):
        _require(config, f"{where}.{key}", weights.get(key, wanted), wanted)
    strategy = weights.get("strategy")
    if number == (8, "float"):
        if strategy not in ("tensor", "channel", "block"):
            raise _refused(config, f"{where}.strategy", strategy, "tensor, channel or block")
        given = weights.get("block_structure") if strategy == "block" else None
        return Quantization("fp8", block=_block(config, f"{where}.block_structure", given))
    if strategy not in ("group", "channel"):
        raise _refused(config, f"{where}.strategy", strategy, "group or channel")
    size = weights.get("group_size") if strategy == "group" else None
    if strategy == "group" and (type(size) is not int or size < 1):
        raise _refused(config, f"{where}.group_size", size, "a number above 0")
    return Quantization("int4", group=size)


def _block(config: HfConfig, name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise _refused(config, name, value, "rows and columns of a block")
    return value[0], value[1]


def _require(config: HfConfig, name: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise _refused(config, name, found, wanted)


def _refused(config: HfConfig, name: str, found: Any, wanted: Any) -> HfConfigError:
    return HfConfigError(
        f"{config.origin}: quantization_config: {name} {found!r:.80} is not supported (wanted: {wanted})"
    )
