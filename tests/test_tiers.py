"""The fast tier starts no Ray."""

import re
from pathlib import Path

import pytest

from tests.forking import ForkedScript

TESTS = Path(__file__).parent
ROOT = TESTS.parent
STARTS_RAY = re.compile(r"\bray\.init\(|\bfrom tests\.e2e\.conftest import .*\bstart\b")
MARKED = re.compile(r"pytest\.mark\.(cluster|e2e|gpu)\b")


def test_a_test_that_starts_ray_is_marked() -> None:
    files = [file for file in TESTS.rglob("test_*.py") if STARTS_RAY.search(file.read_text())]
    assert len(files) >= 4
    assert [str(file) for file in files if not MARKED.search(file.read_text())] == []
    runs = list(TESTS.glob("e2e/test_*.py"))
    assert [
        str(file)
        for file in runs
        if not re.search(r"^pytestmark = \[?pytest\.mark\.e2e\b", file.read_text(), re.MULTILINE)
    ] == []


@pytest.mark.e2e
def test_an_e2e_test_is_a_cluster_test(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("cluster") is not None


def test_nightly_tests_run_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\ndef test_short(): pass\n\n@pytest.mark.nightly\ndef test_long(): pass\n"
    )

    def collected(*chosen: str) -> list[str]:
        words = ["-q", "--collect-only", "-p", "tests.plugins.tiers", "-c", str(ROOT / "pyproject.toml")]
        log = tmp_path / f"out{len(chosen)}{chosen[-1:]}"
        words += ["--rootdir", str(tmp_path), str(tmp_path / "test_one.py"), *chosen]
        assert ForkedScript("pytest", words, log).wait(600) == 0, log.read_text()
        return re.findall(r"::(\w+)", log.read_text())

    assert collected() == collected("-m", "not cluster") == ["test_short"]
    assert collected("-m", "nightly") == ["test_long"]
