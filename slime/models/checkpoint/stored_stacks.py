"""Tensors of all experts of a layer whose checkpoint has the experts one by one, quantised."""

from collections.abc import Iterable, Iterator, Mapping

import torch

from slime.models.checkpoint.weights_dir import WeightsReader

Named = Iterable[tuple[str, torch.Tensor]]


class StoredStacks:
    """The stacked experts of a checkpoint: takes [experts, rows, columns] apart into its matrices, and
    together again.
    """

    def __init__(self, reader: WeightsReader) -> None:
        self._path = reader.path
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._rows: dict[str, dict[str, tuple[int, range]]] = {}
        self._stack_of: dict[str, str] = {}
        for stack, experts in reader.stacks.items():
            if stack not in reader.quantized:
                continue  # engines know these by either name
            self._shapes[stack] = reader.shape(stack)
            self._rows[stack] = dict(_rows(reader, experts))
            self._stack_of |= dict.fromkeys(self._rows[stack], stack)

    def apart(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The matrices of each expert, views of the tensor; any other tensor as it is.

        Raises:
            ValueError: the checkpoint has other experts.
        """
        if name not in self._rows:
            return [(name, tensor)]
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(
                f"{self._path}: the experts of {name} make up {list(self._shapes[name])}, and its engines "
                f"are to be given {list(tensor.shape)}"
            )
        return [
            (part, tensor[expert, rows.start : rows.stop])
            for part, (expert, rows) in self._rows[name].items()
        ]

    def together(self, tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Puts matrices together into stacks, the reverse of taking them apart.

        Raises:
            ValueError: matrices of a tensor are missing.
        """
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            stack = self._stack_of.get(name)
            if stack is None:
                yield name, tensor
                continue
            parts = waiting.setdefault(stack, {})
            parts[name] = tensor
            if len(parts) == len(self._rows[stack]):
                yield stack, self._joined(stack, waiting.pop(stack))
        for stack, parts in waiting.items():
            missing = [part for part in self._rows[stack] if part not in parts]
            raise ValueError(
                f"weight {stack!r}: comes without {missing[0]}" + (", ..." if len(missing) > 1 else "")
            )

    def _joined(self, stack: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        whole = next(iter(parts.values())).new_empty(self._shapes[stack])
        for name, (expert, rows) in self._rows[stack].items():
            whole[expert, rows.start : rows.stop] = parts[name]
        return whole


def _rows(reader: WeightsReader, experts: list[tuple[str, ...]]) -> Iterator[tuple[str, tuple[int, range]]]:
    """(matrix, (expert, its rows there)) of a stack."""
    for number, parts in enumerate(experts):
        first = 0
        for part in parts:
            count = reader.shape(part)[0]
            yield part, (number, range(first, first + count))
            first += count
