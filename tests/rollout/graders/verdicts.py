"""What each grader says of the table, and the page that lists where they differ.

python -m tests.rollout.graders.verdicts --write     # docs/graders.md
"""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rollout.graders.answers import Row, rows

PAGE = Path(__file__).parents[3] / "docs" / "graders.md"
_HEAD = """# Graders compared

A table of {count} answers with labels (`tests/rollout/graders/answers.py`), and what graders say of them.
"Right" means that a mathematician would take the answer for the label's value, in whatever form.

- `math`: `--rm-type math`, which asks math-verify in a process of its own. It says the same as math-verify by
  itself ({alone}).
- `math_compat`: `--rm-type math_compat`, the original's rules: strings as in MATH, then PRM800K's rules and
  sympy.

| kind | answers | `math` agrees with the truth | `math_compat` agrees | the two agree |
|---|---|---|---|---|
"""
_TAIL = """
`math` sees through form where strings do not: unreduced fractions, roots, products, sets in another order.
The rules of `math_compat` are meant as they are: an unreduced fraction is wrong there, text is compared
without regard to case, and published scores depend on that.

## Answers on which they differ

| kind | label | answer | right | `math` | `math_compat` |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Verdict:
    """A row of the table with the graders' words."""

    row: Row
    ours: bool
    alone: bool
    compat: bool


def verdicts() -> Iterator[Verdict]:
    """In this process, which has no limits: the table holds nothing that takes long."""
    from math_verify import parse, verify

    from slime.rollout.rm_hub.math_grader import equal_at_sight
    from slime.utils.grading.math_verify_equal import are_equal
    from slime.utils.grading.sympy_equal import grade_mathd_or_sympy

    logging.disable(logging.WARNING)
    try:
        for row in rows():
            sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (row.gold, row.answer)]
            alone = verify(*sides, timeout_seconds=None)
            ours = equal_at_sight(row.gold.strip(), row.answer.strip())
            ours = are_equal(row.gold, row.answer) if ours is None else ours
            yield Verdict(row, ours, bool(alone), grade_mathd_or_sympy(row.answer, row.gold))
    finally:
        logging.disable(logging.NOTSET)


def page(found: list[Verdict]) -> str:
    """docs/graders.md."""
    kinds: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in found:
        kinds[verdict.row.kind].append(verdict)
    same = sum(verdict.ours == verdict.alone for verdict in found)
    alone = "on all of them" if same == len(found) else f"on {same} of them"
    lines = [_summary(kind, group) for kind, group in kinds.items()] + [_summary("all", found)]
    differing = [_line(verdict) for verdict in found if verdict.ours != verdict.compat]
    return _HEAD.format(count=len(found), alone=alone) + "".join(lines) + _TAIL + "".join(differing)


def _summary(kind: str, group: list[Verdict]) -> str:
    ours = sum(verdict.ours == verdict.row.right for verdict in group)
    compat = sum(verdict.compat == verdict.row.right for verdict in group)
    both = sum(verdict.ours == verdict.compat for verdict in group)
    return f"| {kind} | {len(group)} | {ours} | {compat} | {both} |\n"


def _line(verdict: Verdict) -> str:
    row = verdict.row
    says = {True: "yes", False: "no"}
    cells = (
        row.kind,
        _code(row.gold),
        _code(row.answer),
        says[row.right],
        says[verdict.ours],
        says[verdict.compat],
    )
    return "| " + " | ".join(cells) + " |\n"


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


if __name__ == "__main__":
    text = page(list(verdicts()))
    if "--write" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    print(text)
