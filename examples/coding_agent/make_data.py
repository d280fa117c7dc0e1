"""Write functions with a bug each, and the cases by which a repair is graded.

python examples/coding_agent/make_data.py --output outputs/bugs.jsonl
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Bug(NamedTuple):
    """A function as it should be and as it is, and arguments to try it with."""

    wanted: str
    right: Callable[..., Any]
    source: str
    arguments: Sequence[Any]


BUGS = {
    "last": Bug(
        "the last item of a list; None of an empty one",
        lambda items: items[-1] if items else None,
        "def last(items):\n    return items[len(items)]\n",
        ([[1, 2, 3]], [[7]], [[]]),
    ),
    "clamp": Bug(
        "the number, but at least `low` and at most `high`",
        lambda number, low, high: max(low, min(number, high)),
        "def clamp(number, low, high):\n    return min(low, max(number, high))\n",
        ([5, 0, 3], [-1, 0, 3], [2, 0, 3], [3, 3, 3]),
    ),
    "mean": Bug(
        "the mean of numbers; 0.0 of none",
        lambda numbers: sum(numbers) / len(numbers) if numbers else 0.0,
        "def mean(numbers):\n    return sum(numbers) // len(numbers)\n",
        ([[1, 2]], [[]], [[3, 3, 3]], [[0.5]]),
    ),
    "vowels": Bug(
        "how many vowels (a, e, i, o, u, also as capitals) there are in a text",
        lambda text: sum(letter in "aeiou" for letter in text.lower()),
        "def vowels(text):\n    return len([letter for letter in text if letter in 'aeio'])\n",
        (["Education"], [""], ["rhythm"], ["UUU"]),
    ),
}


def row_of(name: str, bug: Bug) -> dict[str, Any]:
    """A row of the data: what the model is asked, and what its environment needs."""
    asked = (
        f"`{name}` in solution.py is wrong. Wanted: {bug.wanted}. Repair it by the tool `shell`, then say "
        "done without a call."
    )
    cases = [[arguments, bug.right(*arguments)] for arguments in bug.arguments]
    return {
        "prompt": [{"role": "user", "content": asked}],
        "metadata": {"source": bug.source, "function": name, "cases": cases},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows = (row_of(name, bug) for name, bug in BUGS.items())
    args.output.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
