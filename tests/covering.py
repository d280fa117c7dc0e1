"""Covering arrays: few rows of a product in which each pair of values is seen that any row of it has.

    rows = covering({"TP": [1, 2], "PP": [1, 2], "CP": [1, 2]}, lambda row: row["TP"] * row["CP"] < 4)

Faults of combinations are nearly always those of two values (Kuhn, Wallace & Gallo 2004, "Software Fault
Interactions").
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def full_product(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """All rows that may be, in the order in which the values are given."""
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [row for row in rows if allowed(row)]


def pairs(rows: Iterable[Row]) -> set[Pair]:
    """Returns the pairs of two factors' values that are seen together."""
    return {pair for row in rows for pair in combinations(row.items(), 2)}


def covering(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool] = lambda row: True,
    cost: Callable[[Row], float] = lambda row: 1.0,
) -> list[Row]:
    """Rows of the product with all of its pairs.

    The row with the most new pairs for its cost is taken, until there are none. Of equally good ones it is
    the first, so that the same factors give the same rows.
    """
    rows = full_product(factors, allowed)
    bits = {pair: 1 << number for number, pair in enumerate(sorted(pairs(rows), key=repr))}
    seen_in = [sum(bits[pair] for pair in pairs([row])) for row in rows]
    costs = [cost(row) for row in rows]
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        gains = [(mask & missing).bit_count() / price for mask, price in zip(seen_in, costs, strict=True)]
        best = max(range(len(rows)), key=gains.__getitem__)
        missing &= ~seen_in[best]
        chosen.append(rows[best])
    return chosen
