"""Weights under their HF names: views of one flat buffer, into which updates are copied."""

from collections.abc import Iterable, Mapping

import torch

from slime.backends.embedded_engine.adapters import LinearLayer
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.models import family_of
from slime.utils.accelerator import host_like

ALIGNMENT = 64
"""Bytes."""


class NamedWeights:
    """All weights of a model; ``named`` maps HF names to views into ``flat``.

    To the layers in ``linear_layers``, by HF names, adapters may add.

    A weight update copies into the views, so the model object never changes and no memory is allocated.
    """

    flat: torch.Tensor
    embedding: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.named: dict[str, torch.Tensor] = {}
        self.linear_layers: dict[str, LinearLayer] = {}
        self._rules = family_of(config.shape.model_type).weights
        self._backup: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def require_memory(self) -> None:
        """Reading or writing the views of a released buffer would end the process.

        Raises:
            BadRequest: the buffer is released.
        """
        if self.flat.untyped_storage().nbytes() == 0:
            raise BadRequest("the memory of the weights is released: /resume_memory_occupation comes first")

    def destination(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Returns where a tensor of a checkpoint goes; None for names that carry no weight of this model.

        Raises:
            BadRequest: no such weight, another shape, or numbers that are no floats.
        """
        target = self.named.get(name)
        if target is None:
            if self._is_ignored(name):
                return None
            raise BadRequest(
                f"weight {name!r}: this {self.config.shape.model_type} model has none of that name"
            )
        if tuple(shape) != tuple(target.shape):
            raise BadRequest(f"weight {name!r}: shape {list(shape)} (wanted: {list(target.shape)})")
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise BadRequest(f"weight {name!r}: {dtype} (wanted: a floating point dtype of 16 bits or more)")
        return target

    def _is_ignored(self, name: str) -> bool:
        if name.endswith("rotary_emb.inv_freq") or name == self._rules.prefix.outer("lm_head.weight"):
            return True
        return self._rules.untrained(name, self.config.shape.num_layers)

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies tensors in under their HF names; nothing is copied if one of them does not fit."""
        self.require_memory()
        placed = [(self.destination(name, tensor.shape, tensor.dtype), tensor) for name, tensor in tensors]
        with torch.no_grad():
            for target, tensor in placed:
                if target is not None:
                    target.copy_(tensor)

    def copy(self) -> dict[str, torch.Tensor]:
        """Copies on the host."""
        self.require_memory()
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.named.items()}

    def restore(self, copies: Mapping[str, torch.Tensor]) -> None:
        self.update(copies.items())

    def release(self, keep_backup: bool) -> None:
        """Frees the buffer; the views stay and come back to life with ``resume``."""
        self._backup = host_like(self.flat).copy_(self.flat) if keep_backup else None
        self.flat.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Allocates the buffer again; without a backup the weights are zero until the next update."""
        self.flat.untyped_storage().resize_(self.num_bytes)
        if self._backup is None:
            self.flat.zero_()
        else:
            self.flat.copy_(self._backup)
            self._backup = None
