"""Low-rank adapters beside the weights: what the output of a linear layer gets on top."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from slime.adapters.peft_config import not_computed, scale_of
from slime.adapters.peft_format import module_of, tensor_name
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.linear import linear

DOWN, UP = "lora_A", "lora_B"


class Projection(NamedTuple):
    """The adapter of one linear layer of a checkpoint: A [rank, in], B [out, rank]."""

    down: torch.Tensor
    up: torch.Tensor


class LinearLayer(NamedTuple):
    """Where the output of a layer of a checkpoint is: rows ``start...`` of what one product computes.

    Attributes:
        key: of the product.
        outputs: all rows of it.
        shape: ``[out, in]`` of the layer.
    """

    key: Any
    start: int
    outputs: int
    shape: tuple[int, int]


@dataclass(frozen=True)
class LowRank:
    """What one product gets on top: A of all its layers, one below the other, and B, each in its rows."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return linear(linear(rows, self.down) * self.scale, self.up).view(*x.shape[:-1], -1)


@dataclass(frozen=True, eq=False)
class Adapter:
    """What is added in the layer of which products.

    Attributes:
        identity: of this load: another adapter of the same name has another one.
    """

    parts: Mapping[Any, LowRank]
    identity: str = field(default_factory=lambda: uuid4().hex)


def read_projections(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], max_rank: int
) -> tuple[dict[str, Projection], float]:
    """The layers of an adapter in PEFT's format, and the scale of what they add.

    Raises:
        BadRequest: it is of a kind that is not computed here, or its tensors are not what it says.
    """
    if wrong := next(iter(not_computed(config)), None):
        raise BadRequest(f"config_dict: {wrong}")
    try:
        rank, scale = int(config["r"]), scale_of(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadRequest(f"config_dict: no r and lora_alpha that are numbers ({error!r})") from error
    if not 1 <= rank <= max_rank:
        raise BadRequest(f"config_dict: r {rank} (wanted: 1 to {max_rank}, --max-lora-rank)")
    projections = {}
    for module in dict.fromkeys(module_of(name) for name in tensors):
        down, up = (tensors.get(tensor_name(module, part)) for part in (DOWN, UP))
        if down is None or up is None or not _is_pair(down, up, rank):
            raise BadRequest(f"adapter: {module} has no {DOWN} [{rank}, in] and {UP} [out, {rank}]")
        projections[module] = Projection(down, up)
    if len(tensors) != 2 * len(projections):
        raise BadRequest("adapter: has tensors beside those of its layers")
    return projections, scale


def _is_pair(down: torch.Tensor, up: torch.Tensor, rank: int) -> bool:
    return down.dim() == up.dim() == 2 and len(down) == up.size(1) == rank


def joined(
    projections: Mapping[str, Projection],
    scale: float,
    layers: Mapping[str, LinearLayer],
    like: torch.Tensor,
) -> Adapter:
    """The adapter of a model whose layers are at these layers; ``like`` has its dtype and device.

    Raises:
        BadRequest: the model has no such layer, or one of another shape.
    """
    by_key: dict[Any, list[tuple[LinearLayer, Projection]]] = {}
    for module, projection in projections.items():
        layer = layers.get(module)
        if layer is None:
            raise BadRequest(f"adapter: {module} is no linear layer of this model that can have one")
        found = (len(projection.up), projection.down.size(1))
        if found != layer.shape:
            raise BadRequest(f"adapter: {module} is of a layer {list(found)} (wanted: {list(layer.shape)})")
        by_key.setdefault(layer.key, []).append((layer, projection))
    return Adapter({key: _low_rank(pairs, scale, like) for key, pairs in by_key.items()})


def _low_rank(pairs: Sequence[tuple[LinearLayer, Projection]], scale: float, like: torch.Tensor) -> LowRank:
    down = torch.cat([projection.down for _, projection in pairs]).to(like)
    up = down.new_zeros(pairs[0][0].outputs, len(down))
    column = 0
    for layer, projection in pairs:
        end = column + projection.up.size(1)
        up[layer.start : layer.start + layer.shape[0], column:end] = projection.up.to(like)
        column = end
    return LowRank(down, up, scale)


class Adapters:
    """The adapters that are loaded, by name.

    Args:
        max_rank: the largest that one may have; 0 where there may be none.
    """

    def __init__(self, layers: Mapping[str, LinearLayer], like: torch.Tensor, max_rank: int) -> None:
        self._layers, self._like, self._max_rank = layers, like, max_rank
        self._loaded: dict[str, Adapter] = {}

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    def require_enabled(self) -> None:
        """Raises BadRequest if there may be none."""
        if not self._max_rank:
            raise BadRequest("adapters: the server runs without --enable-lora")

    def load(self, name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """
        Raises:
            BadRequest: the name is taken, or the adapter is none of this model; nothing is changed.
        """
        self.require_enabled()
        if name in self._loaded:
            raise BadRequest(f"adapter {name!r} is loaded already (wanted: /unload_lora_adapter before)")
        projections, scale = read_projections(tensors, config, self._max_rank)
        self._loaded[name] = joined(projections, scale, self._layers, self._like)

    def unload(self, name: str) -> None:
        """Requests under way keep theirs.

        Raises:
            BadRequest: there is none of that name.
        """
        self.require_enabled()
        if name not in self._loaded:
            raise BadRequest(f"adapter {name!r} is not loaded (loaded: {', '.join(self._loaded) or 'none'})")
        del self._loaded[name]

    def find(self, name: str | None) -> Adapter | None:
        """The adapter of a name; None for the base.

        Raises:
            BadRequest: there is none of that name.
        """
        if not name:
            return None
        self.require_enabled()
        if name not in self._loaded:
            raise BadRequest(
                f"lora_path {name!r}: no such adapter (loaded: {', '.join(self._loaded) or 'none'})"
            )
        return self._loaded[name]
