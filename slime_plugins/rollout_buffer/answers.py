"""How much of the file one answer holds, so that the service has the memory for it."""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

GROUP_BYTES = 512 * 2**20
"""How much the trajectories have that are given out at once, unless the first group is larger."""
ROW_BYTES = 128 * 2**20
"""How much those have that a query finds, unless the first one is larger."""


def fitting_groups(connection: sqlite3.Connection, found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The first groups, by their ids and instances; the others are still there the next time."""
    size = 0
    for count, (group_id, _) in enumerate(found):
        sql = "SELECT COALESCE(SUM(LENGTH(body)), 0) FROM items WHERE group_id = ?"
        size += connection.execute(sql, (group_id,)).fetchone()[0]
        if count and size > GROUP_BYTES:
            return found[:count]
    return found


def fitting_rows(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The first rows, whose bodies are at their ends."""
    size = 0
    for row in rows:
        size += len(row[-1])
        if size > ROW_BYTES and size > len(row[-1]):
            return
        yield row
