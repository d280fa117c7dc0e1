"""Write sft.jsonl, rl.jsonl and eval.jsonl for the calculator task.

    python examples/calculator_tool/make_data.py --output outputs/calculator_data --seed 0

The questions are products of two two-digit numbers. No question is in two of the files, and no eval
question is in another with its factors swapped. All SFT demonstrations are right, but only a part uses
the tool; the others state the product at once, which a tiny model cannot do. So after SFT the model
answers in both ways and is right in one: what to prefer is left to RL.
"""

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

FACTORS = range(11, 100)
Pair = tuple[int, int]


def split_pairs(seed: int, sft_rows: int, rl_rows: int, eval_rows: int) -> tuple[list[Pair], ...]:
    """Disjoint factor pairs for SFT, RL and eval.

    Raises:
        ValueError: there are not that many pairs.
    """
    pairs = list(product(FACTORS, FACTORS))
    random.Random(seed).shuffle(pairs)
    evaluation: list[Pair] = []
    seen: set[Pair] = set()
    for left, right in pairs:
        if len(evaluation) == eval_rows:
            break
        if (left, right) not in seen:
            evaluation.append((left, right))
            seen |= {(left, right), (right, left)}
    rest = [pair for pair in pairs if pair not in seen]
    if len(evaluation) < eval_rows or len(rest) < sft_rows + rl_rows:
        raise ValueError(
            f"--sft-rows {sft_rows} + --rl-rows {rl_rows} + --eval-rows {eval_rows}: "
            f"there are {len(pairs)} products, {len(rest)} of them left by eval"
        )
    return rest[:sft_rows], rest[sft_rows : sft_rows + rl_rows], evaluation


def make_demonstration(pair: Pair, use_tool: bool) -> dict[str, Any]:
    """An SFT row: a conversation that answers with or without the tool."""
    question, answer = _question_and_answer(pair)
    boxed = {"role": "assistant", "content": f"\\boxed{{{answer}}}"}
    call = [
        {"role": "assistant", "content": f"<tool_call>{question}</tool_call>"},
        {"role": "tool", "content": answer},
    ]
    return {"messages": [{"role": "user", "content": question}, *(call if use_tool else []), boxed]}


def make_problem(pair: Pair) -> dict[str, Any]:
    """A row for RL or eval: the question and the expected answer."""
    question, answer = _question_and_answer(pair)
    return {"prompt": [{"role": "user", "content": question}], "label": answer}


def _question_and_answer(pair: Pair) -> tuple[str, str]:
    left, right = pair
    return f"{left}*{right}", str(left * right)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-rows", type=int, default=6000)
    parser.add_argument("--rl-rows", type=int, default=1600)
    parser.add_argument("--eval-rows", type=int, default=128)
    parser.add_argument("--tool-fraction", type=float, default=0.4, help="SFT rows that use the tool")
    args = parser.parse_args(argv)
    try:
        sft, rl, evaluation = split_pairs(args.seed, args.sft_rows, args.rl_rows, args.eval_rows)
    except ValueError as error:
        parser.error(str(error))
    rng = random.Random(args.seed + 1)
    args.output.mkdir(parents=True, exist_ok=True)
    write_jsonl(
        args.output / "sft.jsonl",
        (make_demonstration(pair, rng.random() < args.tool_fraction) for pair in sft),
    )
    write_jsonl(args.output / "rl.jsonl", map(make_problem, rl))
    write_jsonl(args.output / "eval.jsonl", map(make_problem, evaluation))


if __name__ == "__main__":
    main()
