"""What there is to know about a metric."""

import re
from dataclasses import dataclass

TOKENS, SAMPLES, COUNT = "trained tokens, by rollout", "samples", "count"
STEP, SUM = "optimizer step", "sum of the step"
"""Words for `Metric.average`."""


@dataclass(frozen=True)
class Metric:
    """One metric, or several that differ in a word of their names.

    Attributes:
        average: over what the value is taken.
        healthy: where a run does well.
    """

    name: str
    meaning: str
    unit: str = ""
    average: str = ""
    healthy: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that are meant."""
        return re.compile("".join(map(_part, re.split(r"(<[^>]*>|\{[^}]*\})", self.name))))


def _part(part: str) -> str:
    if part.startswith("<"):
        return ".+"
    if part.startswith("{"):
        return f"(?:{'|'.join(map(re.escape, part[1:-1].split(',')))})"
    return re.escape(part)
