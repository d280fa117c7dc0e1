"""The fast tier starts no Ray."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
STARTS_RAY = re.compile(r"\bray\.init\(|\bfrom tests\.e2e\.conftest import .*\bstart\b")
MARKED = re.compile(r"pytest\.mark\.(cluster|e2e|gpu)\b")


def test_a_test_that_starts_ray_is_marked() -> None:
    files = [file for file in TESTS.rglob("test_*.py") if STARTS_RAY.search(file.read_text())]
    assert len(files) >= 4
    assert [str(file) for file in files if not MARKED.search(file.read_text())] == []
    runs = list(TESTS.glob("e2e/test_*.py"))
    assert [str(file) for file in runs if "pytestmark = pytest.mark.e2e" not in file.read_text()] == []


@pytest.mark.e2e
def test_an_e2e_test_is_a_cluster_test(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("cluster") is not None
