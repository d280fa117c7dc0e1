"""What was found, for people and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slime.chaos.disturbance import Outcome, Plan

_SHOWN_DIFFERENCES = 5


@dataclass
class Findings:
    """What a disturbed run has come to.

    Attributes:
        outcomes: the faults.
        problems: what is not as it should be, a sentence each.
        differences: values that are not those of the twin; None without a twin.
        seconds: how long the run took, and its twin.
    """

    outcomes: Sequence[Outcome]
    problems: list[str] = field(default_factory=list)
    differences: list[str] | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Victim:
    """What became of the faults of one kind in one role.

    Attributes:
        struck: how many.
        went_on: after how many the run went on by itself.
        started_again: after how many it was started again, from its latest checkpoint.
        slowest_s: the longest until the next optimizer step; None if there was none after any.
    """

    role: str
    kind: str
    struck: int
    went_on: int
    started_again: int
    slowest_s: float | None


def as_json(plan: Plan, findings: Findings) -> dict[str, Any]:
    """Everything, as JSON holds it."""
    return {"plan": asdict(plan), **asdict(findings)}


def page(plan: Plan, findings: Findings) -> str:
    """Markdown: the verdict, a table by victim, every fault."""
    lines = ["# Chaos", "", *_verdict(plan, findings), ""]
    lines += _table(("victim", "fault", "struck", "went on", "started again", "slowest next step"))
    lines += map(_row, victims(findings.outcomes))
    lines += ["", *_table(("at", "fault", "victim", "steps before", "starts", "next step after"))]
    for outcome in findings.outcomes:
        cells = f"{outcome.at_s:.1f} s", outcome.kind, outcome.role, str(outcome.steps)
        lines.append(f"| {' | '.join([*cells, str(outcome.restarts), _seconds(outcome.recovered_s)])} |")
    return "\n".join(lines) + "\n"


def _verdict(plan: Plan, findings: Findings) -> Iterator[str]:
    done = f"{len(findings.outcomes)} of {plan.faults} faults (seed {plan.seed})"
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in findings.seconds.items())
    yield f"{done}: {len(findings.problems) or 'no'} problem{'s' * (len(findings.problems) != 1)}. {took}."
    yield from (f"- {problem}" for problem in findings.problems)
    if findings.differences is not None:
        yield f"Values of the metrics that are not the twin's: {len(findings.differences) or 'none'}."
        yield from (f"- {line}" for line in findings.differences[:_SHOWN_DIFFERENCES])


def _table(names: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]


def victims(outcomes: Sequence[Outcome]) -> list[Victim]:
    """Counts faults by victim and kind."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.role, outcome.kind), []).append(outcome)
    rows = []
    for (role, kind), members in sorted(groups.items()):
        healed = [found.recovered_s for found in members if found.recovered_s is not None]
        again = sum(found.restarts > 0 for found in members if found.recovered_s is not None)
        rows.append(Victim(role, kind, len(members), len(healed) - again, again, max(healed, default=None)))
    return rows


def _row(found: Victim) -> str:
    counts = map(str, (found.struck, found.went_on, found.started_again))
    return f"| {' | '.join([found.role, found.kind, *counts, _seconds(found.slowest_s)])} |"


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"
