"""Write customers, their orders and what each of them wants.

python examples/simulated_user/make_data.py --output outputs/customers.jsonl
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("lamp", "desk", "chair", "shelf", "clock", "rug")


def row_of(rng: random.Random) -> dict[str, Any]:
    """A row of the data: all of it is the environment's."""
    numbers = iter(rng.sample(range(100, 1000), 4))
    orders = {
        name: {str(next(numbers)): thing for thing in rng.sample(THINGS, 2)} for name in rng.sample(NAMES, 2)
    }
    name = next(iter(orders))
    number, thing = rng.choice(list(orders[name].items()))
    left = {who: {n: t for n, t in owned.items() if n != number} for who, owned in orders.items()}
    wish = f"cancel the {thing} that you ordered, and only that."
    return {"prompt": name, "metadata": {"name": name, "wish": wish, "orders": orders, "left": left}}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    args.output.write_text("".join(json.dumps(row_of(rng)) + "\n" for _ in range(args.rows)))


if __name__ == "__main__":
    main()
