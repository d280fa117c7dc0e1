"""Rotary position embedding, as config.json says it."""

import math
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding.

    Attributes:
        base: of the frequencies (``rope_theta``).
        kind: how they are scaled for longer contexts.
        factors: (name, value) pairs of the scaling.
        percent: share of a head that is rotated, its first features.
        interleaved: whether neighbouring features make a pair, or those half a head apart.
    """

    base: float
    kind: RopeKind = "default"
    factors: tuple[tuple[str, float], ...] = ()
    percent: float = 1.0
    interleaved: bool = False

    def factor(self, name: str) -> float:
        """One of the scaling, 0 if it has none of that name."""
        return dict(self.factors).get(name, 0.0)

    @property
    def magnitude(self) -> float:
        """What YaRN multiplies cosines and sines by (Peng et al. 2023, eq. 21), 1 without it."""
        if self.kind != "yarn":
            return 1.0
        if given := self.factor("attention_factor"):
            return given
        one, all_dim = self.factor("mscale"), self.factor("mscale_all_dim")
        if one and all_dim:
            return self._temperature(one) / self._temperature(all_dim)
        return self._temperature(1.0)

    @property
    def score_factor(self) -> float:
        """What DeepSeek's attention multiplies its scores by beside that."""
        all_dim = self.factor("mscale_all_dim")
        return self._temperature(all_dim) ** 2 if self.kind != "default" and all_dim else 1.0

    def _temperature(self, weight: float) -> float:
        factor = self.factor("factor")
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """The rotary embeddings of the trained model.

    Attributes:
        rope: None where no family reads config.json.
        local_rope: of layers with a window, where it is another one.
    """

    rope: Rope | None
    local_rope: Rope | None
