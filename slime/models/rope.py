"""Rotary position embedding: what config.json says of it, and the angles that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

from slime.config.rope import Rope, RopeKind
from slime.models.hf_config import HfConfig, HfConfigError

if TYPE_CHECKING:
    import torch

_NEEDED: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# YaRN's defaults (Peng et al. 2023, section 3.2, and the reference code).
_OPTIONAL = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}


def read_rope(
    config: HfConfig, *, percent: float | None = None, interleaved: bool = False, base: float = 10000.0
) -> Rope:
    """Reads the RoPE of config.json; transformers 5 nests it, 4 has ``rope_theta`` and ``rope_scaling``.

    Args:
        config: it.
        percent: share of a head that is rotated where config.json does not say; None if it is all of it.
        interleaved: what the family does.
        base: where it gives none.

    Raises:
        HfConfigError: a kind of scaling that is not computed, or a number that is missing or none.
    """
    values = config.mapping("rope_parameters", "rope_scaling")
    if (outer := config.get("rope_theta")) is not None:  # whoever reads another one of the two must not fail
        base = config.positive("rope_theta", outer)
    base = config.positive("rope_theta", values.get("rope_theta", config.get("rope_theta", base)))
    kind: Any = values.get("rope_type") or values.get("type") or "default"
    if kind not in get_args(RopeKind):
        wanted = ", ".join(get_args(RopeKind))
        raise HfConfigError(f"{config.origin}: RoPE type {kind!r} is not supported (wanted: {wanted})")
    if missing := [name for name in _NEEDED[kind] if values.get(name) is None]:
        raise HfConfigError(f"{config.origin}: RoPE {', '.join(missing)}: missing (RoPE type is {kind})")
    factors = {name: config.positive(f"RoPE {name}", values[name]) for name in _NEEDED[kind]}
    if kind == "yarn":
        factors |= _yarn_options(config, values)
    return Rope(base, kind, tuple(factors.items()), _share(config, values, percent), interleaved)


def _share(config: HfConfig, values: Mapping[str, Any], default: float | None) -> float:
    given = values.get("partial_rotary_factor"), config.get("partial_rotary_factor"), default
    found = next((value for value in given if value is not None), 1.0)
    share = config.positive("partial_rotary_factor", found)
    if share > 1 or (default is None and share != 1):
        wanted = "1.0" if default is None else "a number above 0, at most 1"
        raise config.wrong("partial_rotary_factor", share, wanted)
    return share


def _yarn_options(config: HfConfig, values: Mapping[str, Any]) -> dict[str, float]:
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise config.wrong("RoPE truncate", truncate, "true or false")
    given = {name: values.get(name) for name in (*_OPTIONAL, "attention_factor")}
    return (
        _OPTIONAL
        | {name: config.positive(f"RoPE {name}", value) for name, value in given.items() if value}
        | ({} if truncate else {"fractional": 1.0})
    )


@cache
def inverse_frequencies(rope: Rope, width: int) -> torch.Tensor:
    """``[width / 2]`` float32, radians per position of each pair of ``width`` rotated features."""
    import torch  # takes a second, which whoever reads config.json alone need not wait for

    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    frequencies = 1.0 / rope.base**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor("factor")
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, rope.base**exponents, width)
    return frequencies


def _llama3(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's reference code.

    Wavelengths above ``original_max / low_freq_factor`` are stretched by ``factor``, those below
    ``original_max / high_freq_factor`` stay, and between the two they are interpolated.
    """
    import torch

    factor, low, high, original = (rope.factor(name) for name in _NEEDED["llama3"])
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, blended)
    return torch.where(wavelength < original / high, frequencies, scaled)


def _yarn(rope: Rope, wavelengths: torch.Tensor, width: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023, section 3.2): slow pairs are stretched, fast ones are not."""
    import torch

    original = rope.factor("original_max_position_embeddings")

    def pair_that_turns(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = (pair_that_turns(rope.factor(name)) for name in ("beta_fast", "beta_slow"))
    if not rope.factor("fractional"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = (high - low) or 0.001
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    kept = 1 - stretched
    return 1.0 / (rope.factor("factor") * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
