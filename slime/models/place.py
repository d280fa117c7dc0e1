"""Where a checkpoint has its language model."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a checkpoint has the tensors of its language model.

    Attributes:
        trunk, head: what stands for the ``model.`` and the ``lm_head.`` of a checkpoint of nothing else.
    """

    trunk: str = "model."
    head: str = "lm_head."

    def outer(self, name: str) -> str:
        """How the checkpoint calls a tensor that has this name in one of nothing else."""
        return _moved(name, {"model.": self.trunk, "lm_head.": self.head})

    def inner(self, name: str) -> str:
        """The reverse; other tensors keep their names."""
        return _moved(name, {self.trunk: "model.", self.head: "lm_head."})


def _moved(name: str, prefixes: Mapping[str, str]) -> str:
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if found is None else prefixes[found] + name.removeprefix(found)


ALONE = Place()
"""In a checkpoint of nothing else."""
