"""Mathematical answers graded in killable processes against math-verify in one's own process.

    python benchmarks/math_grading.py [--labels 100] [--repeats 3]

Each label has eight answers, as a group of GRPO has. "distinct": no two of them are alike; "usual": half of
them are the most frequent one. Ours is `--rm-type math` with one grading process, so that both sides have one
core; its CPU seconds are those of the caller, its threads and the grading process together. The other side
calls `verify(parse(label), parse(answer))`, with math-verify's own time limits, which need the main thread,
and without limits, which no run can afford. Prints and writes JSON: answers per CPU second and per second of
the wall clock, and the ratios of ours (target: 0.9 of the side without limits on distinct answers, which is
what isolation may cost).
"""

import argparse
import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from math_verify import parse, verify

from slime.rollout.rm_hub import grading_pool, math_grader
from slime.rollout.rm_hub.grading_pool import GradingPool

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "math_grading.json"
GROUP = 8
Pair = tuple[str, str]
FORMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{n}", ("{n}", "{n}.0", "{m}", "{n}\\text{{ cm}}", "x={n}", "\\frac{{{n}}}{{1}}", "{m}.5", "{n}+{m}")),
    (
        "\\frac{{{n}}}{{{m}}}",
        (
            "{n}/{m}",
            "\\dfrac{{{n}}}{{{m}}}",
            "\\frac{{{m}}}{{{n}}}",
            "{n}",
            "{n}.{m}",
            "-{n}/{m}",
            "0",
            "{m}",
        ),
    ),
    (
        "{n}\\sqrt{{{m}}}",
        (
            "{n}\\sqrt{m}",
            "\\sqrt{{{m}}}\\cdot {n}",
            "{n}{m}",
            "{m}\\sqrt{{{n}}}",
            "{n}",
            "\\sqrt{{{n}}}",
            "1",
            "{m}",
        ),
    ),
    (
        "({n},{m})",
        ("({n}, {m})", "({m},{n})", "[{n},{m}]", "{n},{m}", "({n}.0,{m})", "\\{{{n},{m}\\}}", "{n}", "({n})"),
    ),
    (
        "x^2+{n}x+{m}",
        ("{m}+{n}x+x^2", "x^2+{m}x+{n}", "x(x+{n})+{m}", "x^2", "{n}", "(x+{n})(x+{m})", "x+{m}", "2x+{n}"),
    ),
)


def make_groups(labels: int, usual: bool) -> list[tuple[str, list[str]]]:
    """Labels with eight answers each."""
    rng = random.Random(0)
    groups = []
    for number in range(labels):
        gold, answers = FORMS[number % len(FORMS)]
        values = {"n": 2 + number, "m": 3 + 2 * number}
        filled = [answer.format(**values) for answer in answers]
        if usual:
            filled = [filled[rng.randrange(2)]] * (GROUP // 2) + rng.choices(filled, k=GROUP - GROUP // 2)
        groups.append((gold.format(**values), filled))
    return groups


def in_process(groups: Sequence[tuple[str, list[str]]], limit_s: int | None) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for gold, answers in groups:
        for answer in answers:
            sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=limit_s) for text in (gold, answer)]
            verify(*sides, timeout_seconds=limit_s)
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def in_one_process_of_its_own(groups: Sequence[tuple[str, list[str]]], pool: GradingPool) -> dict[str, float]:
    pool._verdicts.clear()
    worker = psutil.Process(pool.pids[0])

    async def grade() -> None:
        for gold, answers in groups:
            await asyncio.gather(
                *(math_grader.grade_math(f"\\boxed{{{answer}}}", gold) for answer in answers)
            )

    before = sum(worker.cpu_times()[:2])
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(grade())
    own = time.process_time() - cpu
    return {
        "cpu_s": own + sum(worker.cpu_times()[:2]) - before,
        "wall_s": time.perf_counter() - wall,
    }


def measure(labels: int, repeats: int) -> dict:
    logging.disable(logging.WARNING)  # math-verify's, at every call without its limits
    pool = GradingPool(1)
    grading_pool._pool = lambda: pool  # type: ignore[assignment]
    pool.call("slime.utils.grading.math_verify_equal.are_equal", "1", "1.0")
    in_process([("1", ["1.0"])], None)
    result = {"labels": labels, "answers": labels * GROUP}
    try:
        for kind in ("distinct", "usual"):
            groups = make_groups(labels, kind == "usual")
            sides: dict[str, Callable[[], dict[str, float]]] = {
                "ours": lambda groups=groups: in_one_process_of_its_own(groups, pool),  # type: ignore[misc]
                "math_verify": lambda groups=groups: in_process(groups, 5),  # type: ignore[misc]
                "math_verify_without_limits": lambda groups=groups: in_process(groups, None),  # type: ignore[misc]
            }
            result[kind] = _best(sides, labels * GROUP, repeats)
    finally:
        pool.close()
    return result


def _best(sides: dict[str, Callable[[], dict[str, float]]], answers: int, repeats: int) -> dict:
    best = {name: {"cpu_s": 1e9, "wall_s": 1e9} for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            best[name] = {key: min(best[name][key], value) for key, value in side().items()}
    speed = {name: {f"per_{key}": answers / value for key, value in b.items()} for name, b in best.items()}
    ratios = {
        name: {key: best[name][key] / best["ours"][key] for key in ("cpu_s", "wall_s")}
        for name in sides
        if name != "ours"
    }
    return {"answers": speed, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--labels", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = measure(options.labels, options.repeats)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
