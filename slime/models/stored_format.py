"""Tensors in the format in which a quantised checkpoint stores them, and back.

stored = StoredFormat(path)
stored.encode([("a.weight", matrix)])      # a.weight in float8 and a.weight_scale_inv, as in that checkpoint
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from slime.models.encoding import Encoding
from slime.models.safetensors_file import Spec
from slime.models.weights_dir import WeightsReader

Named = Iterable[tuple[str, torch.Tensor]]


class StoredFormat:
    """That of a checkpoint, read off the headers of its files: names, formats and shapes are its own.

    Raises:
        ValueError: see `WeightsReader`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        with WeightsReader(path) as reader:
            self._encodings, quantized = reader.encodings(), reader.quantized
            self._shapes = {name: reader.shape(name) for name in reader.names() if name not in quantized}
            # What trainers have in one tensor for all experts of a layer, and this checkpoint one by one.
            self._stacks = {name: rows for name, rows in reader.stacks.items() if name in quantized}
        self._stack_of = {
            part: stack for stack, rows in self._stacks.items() for parts in rows for part in parts
        }
        # The tensors that stand in the place of weights, and which weight that is.
        self._parts: dict[str, tuple[Encoding, str, Spec]] = {
            part: (encoding, name, spec)
            for name, encoding in self._encodings.items()
            for part, spec in encoding.specs().items()
        }

    def encode(self, tensors: Named) -> list[tuple[str, torch.Tensor]]:
        """What stands in the place of these weights; those that are not quantised stay as they are.

        Raises:
            ValueError: the checkpoint has no such weight, or one of another shape; or a number is not finite.
        """
        matrices = (matrix for name, tensor in tensors for matrix in self._matrices(name, tensor))
        return [part for name, matrix in matrices for part in self._encoded(name, matrix)]

    def _matrices(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of a tensor that are stored one by one."""
        if name not in self._stacks:
            yield name, tensor
            return
        experts = self._stacks[name]
        shapes = [self._encodings[part].shape for part in experts[0]]
        rows = [shape[0] for shape in shapes]
        self._require_shape(name, tensor, (len(experts), sum(rows), shapes[0][1]))
        for parts, expert in zip(experts, tensor, strict=True):
            yield from zip(parts, expert.split(rows), strict=True)

    def _require_shape(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{self._path}: {name} is {list(shape)}, and its engines are to be given {list(tensor.shape)}"
            )

    def _encoded(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        encoding = self._encodings.get(name)
        if encoding is None:
            if name not in self._shapes:
                raise ValueError(f"{self._path}: has no weight {name!r}, which its engines are to be given")
            self._require_shape(name, tensor, self._shapes[name])
            return [(name, tensor)]
        self._require_shape(name, tensor, encoding.shape)
        try:
            return list(encoding.encode(tensor).items())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

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
        open_stacks: dict[str, dict[str, torch.Tensor]] = {}
        for name, weight in self._weights(tensors):
            stack = self._stack_of.get(name)
            if stack is None:
                yield name, weight
                continue
            matrices = open_stacks.setdefault(stack, {})
            matrices[name] = weight
            if len(matrices) == sum(map(len, self._stacks[stack])):
                del open_stacks[stack]
                experts = self._stacks[stack]
                yield stack, torch.stack([torch.cat([matrices[part] for part in parts]) for parts in experts])
        for stack, matrices in open_stacks.items():
            missing = {part for parts in self._stacks[stack] for part in parts} - matrices.keys()
            raise ValueError(f"weight {stack!r}: comes without {min(missing)}")

    def _weights(self, tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, experts one by one."""
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
