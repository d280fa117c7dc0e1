"""What the runs with SGLang's own servers measured, as far as a machine without SGLang can look."""

import json
from pathlib import Path

from benchmarks.sglang_runs import RESULTS, rows
from tests.sglang_cpu.test_kinds import KINDS

REPORT = """<testsuites><testsuite>
<testcase name="one" time="61.4"><properties><property name="kind" value="PPO" />
<property name="gap" value="2e-07" /></properties></testcase>
<testcase name="two" time="9"><properties><property name="kind" value="fp8 engines" />
<property name="not_served" value="no AMX" /></properties></testcase>
<testcase name="three" time="9"><properties><property name="kind" value="FSDP" />
<property name="gap" value="1.0" />
</properties><failure message="apart" /></testcase>
<testcase name="four" time="9" />
</testsuite></testsuites>"""


def test_figures_are_those_of_tests_that_passed(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = rows(tmp_path / "report.xml")
    assert found == {
        "PPO": {"gap": 2e-07, "seconds": 61},
        "fp8 engines": {"not_served": "no AMX", "seconds": 9},
    }


def test_trainer_and_engine_agreed_in_each_kind() -> None:
    results = json.loads(RESULTS.read_text())
    assert results.keys() >= {*KINDS, "distillation", "routing replay"}
    assert all(row["gap"] < 1e-5 for row in results.values() if "not_served" not in row)
