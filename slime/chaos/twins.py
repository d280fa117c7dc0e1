"""Whether a disturbed run has the metrics of one that nobody disturbed."""

from collections.abc import Iterator, Mapping
from typing import Any

Steps = Mapping[int, Mapping[str, Any]]

VARYING = ("time", "_per_sec", "perf/", "fleet/", "run_id", "prefix_cache", "cached_tokens", "recomputed")
"""Parts of the names of metrics that tell of the clock, or of who answered: they differ between twins."""


def numbers(steps: Steps) -> dict[int, dict[str, Any]]:
    """What repeats exactly: everything but the clock, and who shared a prompt with whom."""
    return {
        step: {name: value for name, value in row.items() if not any(word in name for word in VARYING)}
        for step, row in steps.items()
    }


def differences(disturbed: Mapping[str, Steps], twin: Mapping[str, Steps]) -> Iterator[str]:
    """Yields a line for each value that is not the twin's, in the order of steps.

    Args:
        disturbed: rows of metrics by axis and step.
        twin: those of the other run.
    """
    for axis in ("rollout", "train", "eval"):
        found, wanted = numbers(disturbed.get(axis, {})), numbers(twin.get(axis, {}))
        for step in sorted(found.keys() | wanted.keys()):
            row, other = found.get(step, {}), wanted.get(step, {})
            for name in sorted(row.keys() | other.keys()):
                if row.get(name) != other.get(name):
                    yield f"{axis} {step}: {name} is {row.get(name)}, the twin's {other.get(name)}"


def missing_steps(steps: Steps, twin: Steps | None) -> list[int]:
    """Steps without a row: those that the twin has or, without one, those before the last."""
    wanted = range(max(steps, default=-1) + 1) if twin is None else twin
    return [step for step in wanted if step not in steps]
