"""The rows of a run that trains several policies, told apart by whose metrics they hold."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any


class PolicyRows:
    """Finds the metrics of each policy in rows: ``train/POLICY/loss`` is the ``train/loss`` of POLICY.

    Args:
        names: of the metrics that are looked for, without a policy.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._known: dict[str, tuple[str, str] | None] = {}  # a run has few names, and many rows

    def split(self, metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The metrics of each policy that a row has, under their names without it."""
        found: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in metrics.items():
            if name not in self._known:
                self._known[name] = self._part(name)
            if (part := self._known[name]) is not None:
                found[part[0]][part[1]] = value
        return dict(found)

    def _part(self, name: str) -> tuple[str, str] | None:
        """The policy of a metric, and the name without it; None where it is of no policy."""
        axis, _, rest = name.partition("/")
        policy, _, own = rest.partition("/")
        plain = f"{axis}/{own}"
        return (policy, plain) if plain in self._names and name not in self._names else None
