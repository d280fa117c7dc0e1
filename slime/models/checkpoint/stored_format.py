"""Tensors in the format in which a quantised checkpoint stores them, and back.

stored = StoredFormat(path)
stored.encode([("a.weight", matrix)])      # a.weight in float8 and a.weight_scale_inv, as in that checkpoint
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from slime.models.checkpoint.encoding import Encoding
from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.models.checkpoint.safetensors_file import Spec
from slime.models.checkpoint.stored_stacks import StoredStacks
from slime.models.checkpoint.weights_dir import WeightsReader

Named = Iterable[tuple[str, torch.Tensor]]


class StoredFormat:
    """The format of a checkpoint, read off the headers of its files: names, formats and shapes are its own.

    Experts that it has one by one, and the model in one tensor for each layer, are taken apart.

    Raises:
        ValueError: see `WeightsReader`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._scales: SafetensorReader | None = None
        with WeightsReader(path) as reader:
            self._encodings = reader.encodings()
            self._plain = {
                name: reader.shape(name) for name in reader.names() if name not in reader.quantized
            }
            self._stacks = StoredStacks(reader)
        # The tensors that stand in the place of weights, and which weight that is.
        self._parts: dict[str, tuple[Encoding, str, Spec]] = {
            part: (encoding, name, spec)
            for name, encoding in self._encodings.items()
            for part, spec in encoding.specs().items()
        }

    def encode(self, tensors: Named) -> list[tuple[str, torch.Tensor]]:
        """What stands in the place of these weights; those that are not quantised stay as they are.

        Weights that are the checkpoint's become its tensors again, bit for bit: groups keep its scales, as
        `is_kept` says, which are read from its files each time.

        Raises:
            ValueError: the checkpoint has no such weight, or one of another shape; or a number is not finite.
        """
        return [
            part
            for name, tensor in tensors
            for weight, matrix in self._stacks.apart(name, tensor)
            for part in self._encoded(weight, matrix)
        ]

    def encoded(self, name: str, spec: Spec) -> dict[str, Spec]:
        """Names, formats and shapes of what `encode` gives for a weight of this format and shape.

        Raises:
            ValueError: the checkpoint has no such weight, or one of another shape.
        """
        empty = torch.empty(spec[1], dtype=spec[0], device="meta")
        found: dict[str, Spec] = {}
        for weight, matrix in self._stacks.apart(name, empty):
            encoding = self._encoding(weight, matrix)
            plain = {weight: (matrix.dtype, tuple(matrix.shape))}
            found |= plain if encoding is None else encoding.specs()
        return found

    def _encoding(self, name: str, tensor: torch.Tensor) -> Encoding | None:
        """How a weight of this checkpoint is stored; None if it is as it is."""
        encoding = self._encodings.get(name)
        if encoding is None and name not in self._plain:
            raise ValueError(f"{self._path}: has no weight {name!r}, which its engines are to be given")
        wanted = list(self._plain[name] if encoding is None else encoding.shape)
        if (given := list(tensor.shape)) != wanted:
            raise ValueError(f"{self._path}: {name} is {wanted}, and its engines are to be given {given}")
        return encoding

    def _encoded(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        encoding = self._encoding(name, tensor)
        if encoding is None:
            return [(name, tensor)]
        try:
            scales = self._stored_scales(encoding.scale_name).to(tensor.device)
            return list(encoding.encode(tensor, scales).items())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _stored_scales(self, name: str) -> torch.Tensor:
        if self._scales is None:  # by those who encode alone
            self._scales = SafetensorReader(self._path)
        return self._scales.read(name)

    def spec(self, name: str) -> Spec | None:
        """Format and shape of what stands in the place of a weight; None for what does not.

        Raises:
            ValueError: it is a weight in whose place other tensors stand.
        """
        if name in self._parts:
            return self._parts[name][2]
        if name in self._encodings:
            raise ValueError(f"weight {name!r}: is stored as {', '.join(self._encodings[name].specs())}")
        return None

    def decode(self, tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights for what stands in their place, in float32; all else as it is.

        Raises:
            ValueError: a tensor is of another format or shape than in the checkpoint, or some of those that
                make up a weight are missing.
        """
        yield from self._stacks.together(self._decoded(tensors))

    def _decoded(self, tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Decodes weights, experts as they come."""
        open_weights: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            spec = self.spec(name)
            if spec is None:
                yield name, tensor
                continue
            if (tensor.dtype, tuple(tensor.shape)) != spec:
                raise ValueError(
                    f"weight {name!r}: {_shown((tensor.dtype, tuple(tensor.shape)))} (wanted: {_shown(spec)})"
                )
            encoding, weight, _ = self._parts[name]
            parts = open_weights.setdefault(weight, {})
            parts[name] = tensor
            if len(parts) == len(encoding.specs()):
                del open_weights[weight]
                yield weight, encoding.decode(parts)
        for weight, parts in open_weights.items():
            missing = sorted(self._encodings[weight].specs().keys() - parts.keys())
            raise ValueError(f"weight {weight!r}: comes without {', '.join(missing)}")


def _shown(spec: Spec) -> str:
    return f"{str(spec[0]).removeprefix('torch.')} {list(spec[1])}"
