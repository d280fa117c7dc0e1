"""Checks that every fault can still be planted, and has been found."""

import ast
import json
import subprocess
import sys

import pytest

from benchmarks.planted_faults import FOUND, NO_PROOF, RESULTS, ROOT, SURVIVED, planted
from benchmarks.process_faults import FAULTS, Fault

pytestmark = pytest.mark.slow

JUDGING = """
import json, sys
from pathlib import Path
from benchmarks.planted_faults import judge, run_tests
from benchmarks.process_faults import Fault
tree = Path(sys.argv[1])
faults = [Fault("product.py", "42", after, ("tests/test_product.py",)) for after in ("41", "40 + 2", "")]
passed = run_tests(faults[:2], tree, 60).passed
print(json.dumps([passed, *(judge(fault, tree, 60) for fault in faults)]))
"""
TEST = "import product\n\n\ndef test_product():\n    assert product.answer == 42\n"


def test_every_fault_changes_one_place_of_its_file_and_its_tests_are_there():
    for name, fault in FAULTS.items():
        source = (ROOT / fault.path).read_text()
        assert ast.dump(ast.parse(planted(fault, source))) != ast.dump(ast.parse(source)), name
        assert all((ROOT / test).is_file() for test in fault.tests), name


@pytest.mark.parametrize("source", ["", "a = 1\na = 1\n"])
def test_what_is_not_there_once_is_not_replaced(source):
    with pytest.raises(ValueError, match=r"module.py: found [02] times 'a = 1', wanted once"):
        planted(Fault("module.py", "a = 1", "a = 2", ()), source)


def test_a_fault_is_found_by_a_test_that_fails_with_it_and_not_without(tmp_path):
    """In a process of its own: it ends all that runs below the one that judges."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_product.py").write_text(TEST)
    product = tmp_path / "product.py"
    product.write_text("answer = 42\n")
    judging = subprocess.run(
        [sys.executable, "-c", JUDGING, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    passed, *rows = json.loads(judging.stdout.splitlines()[-1])
    assert passed
    assert [row["outcome"] for row in rows] == [FOUND, SURVIVED, NO_PROOF]
    assert rows[0]["why"].startswith("FAILED tests/test_product.py::test_product - ")
    assert product.read_text() == "answer = 42\n"


def test_every_fault_was_tried_and_found():
    results = json.loads(RESULTS.read_text())
    rows = results["faults"]
    assert rows.keys() == FAULTS.keys()
    assert results["found"] == results["faults_tried"] == len(rows)
    assert [
        n for n, row in rows.items() if (*row["tests"], row["choose"]) != (*FAULTS[n].tests, FAULTS[n].choose)
    ] == []
    assert {name: row["why"] for name, row in rows.items() if row["outcome"] != FOUND} == {}
