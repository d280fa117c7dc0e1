"""Write a tiny dataset for each task of multi_task.yaml, under the names that it has for them.

DATASETS=outputs/datasets python examples/eval_multi_task/make_data.py
"""

import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.calculator_tool import make_data as calculator

ROWS = 4


def main() -> None:
    root = Path(os.environ["DATASETS"])
    rng = random.Random(0)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(ROWS)]
    for name in ("aime-2024", "gpqa_diamond"):
        (root / name).mkdir(parents=True, exist_ok=True)
    calculator.write_jsonl(
        root / "aime-2024/aime-2024.jsonl",
        [{"prompt": [{"role": "user", "content": f"{a}+{b}"}], "label": str(a + b)} for a, b in pairs],
    )
    calculator.write_jsonl(
        root / "gpqa_diamond/gpqa_eval.jsonl",
        [
            {
                "prompt": [{"role": "user", "content": f"Which is {a}+{b}? (A) {a + b} (B) {a + b + 1}"}],
                "label": "A",
                "metadata": {"choices": [str(a + b), str(a + b + 1)]},
            }
            for a, b in pairs
        ],
    )
    calculator.main(["--output", str(root / "calculator"), "--eval-rows", str(ROWS), "--sft-rows", "1"])


if __name__ == "__main__":
    main()
