"""Which experts tokens were routed to: what the engine returns for routing replay."""

import base64
from collections.abc import Sequence

import torch

from slime.config.model import MoeShape


class RouteRecorder:
    """Collects the choices of one forward pass, layer by layer."""

    def __init__(self, shape: MoeShape) -> None:
        self._layers, self._topk = len(shape.moe_layer_freq), shape.moe_router_topk
        self._chosen: dict[int, torch.Tensor] = {}

    def note(self, layer: int, chosen: torch.Tensor) -> None:
        """``chosen``: ``[..., top-k]``, experts of each token of the pass."""
        self._chosen[layer] = chosen.reshape(-1, self._topk)

    def take(self) -> torch.Tensor:
        """int32 ``[tokens, layers, top-k]`` of what was noted since the last call; zeros in dense layers.

        On the host, where responses are put together.
        """
        tokens = len(next(iter(self._chosen.values())))
        routes = torch.zeros(tokens, self._layers, self._topk, dtype=torch.int32)
        for layer, chosen in self._chosen.items():
            routes[:, layer] = chosen
        self._chosen.clear()
        return routes


def encoded(parts: Sequence[torch.Tensor], start: int, end: int) -> str | None:
    """Base64 of rows ``start:end``, int32 in C order, as SGLang writes them; None if they are not there.

    Those of a request that was aborted before its prompt was computed are not.
    """
    if sum(map(len, parts)) < end:
        return None
    rows = torch.cat(list(parts))[start:end].contiguous()
    return base64.b64encode(rows.numpy().tobytes()).decode()
