"""The prefixes under which a checkpoint stores its language model."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightPrefix:
    """The prefixes of a language model's tensors in a checkpoint that may hold more, such as a vision tower.

    Attributes:
        trunk, head: what the checkpoint has in place of ``model.`` and ``lm_head.``.
    """

    trunk: str = "model."
    head: str = "lm_head."

    def outer(self, name: str) -> str:
        """The name in this checkpoint of a tensor of the language model alone."""
        return _moved(name, {"model.": self.trunk, "lm_head.": self.head})

    def inner(self, name: str) -> str:
        """Reverses `outer`; other tensors keep their names."""
        return _moved(name, {self.trunk: "model.", self.head: "lm_head."})


def _moved(name: str, prefixes: Mapping[str, str]) -> str:
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if found is None else prefixes[found] + name.removeprefix(found)


TEXT_ONLY = WeightPrefix()
"""The prefix of a checkpoint that holds a language model alone."""
