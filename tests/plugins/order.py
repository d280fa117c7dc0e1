"""What runs in one of several processes, the longest first: what begins last keeps the others waiting.

A unit is a file, as what its tests share is made once, or all files of whole runs: the Ray cluster that these
join takes some of a core for as long as it is there.
"""

import math
import os
import zlib
from collections import Counter

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.plugins.records import file_of, recorded, seconds_of

_RUNS = "e2e/"
_CLUSTERS = max((os.cpu_count() or 1) // 4, 1)
"""Where there are many cores, one after the other would take longer than everything else."""


def unit_of(file: str, clusters: int = _CLUSTERS) -> str:
    if _RUNS not in file:
        return file
    return f"runs in cluster {zlib.crc32(file.encode()) % clusters}"


def longest_first(files: Counter[str], records: dict[str, tuple[float, int]]) -> list[str]:
    """Files with their numbers of tests, those of a unit together; those without a record come first."""
    seconds = seconds_of(files, records)
    length = {file: math.inf if (known := seconds[file]) is None else known for file in files}
    units: Counter[str] = Counter()
    for file in files:
        units[unit_of(file)] += length[file]  # type: ignore[assignment]
    return sorted(files, key=lambda file: (-units[unit_of(file)], unit_of(file), -length[file], file))


class _Units(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(file_of(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return _Units(config, log) if config.getoption("dist") == "loadfile" else None  # type: ignore[arg-type]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        files = Counter(file_of(item.nodeid) for item in items)
        places = {file: place for place, file in enumerate(longest_first(files, recorded()))}
        items.sort(key=lambda item: places[file_of(item.nodeid)])
