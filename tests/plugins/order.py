"""The longest files first, when several processes run them: one that begins last keeps the others waiting."""

import math
from collections import Counter

import pytest

from tests.plugins.records import file_of, recorded, seconds_of


def longest_first(files: Counter[str], records: dict[str, tuple[float, int]]) -> list[str]:
    """Files with their numbers of tests; those without a record come first."""
    seconds = seconds_of(files, records)
    length = lambda file: math.inf if (known := seconds[file]) is None else known
    return sorted(files, key=lambda file: (-length(file), file))


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        files = Counter(file_of(item.nodeid) for item in items)
        places = {file: place for place, file in enumerate(longest_first(files, recorded()))}
        items.sort(key=lambda item: places[file_of(item.nodeid)])
