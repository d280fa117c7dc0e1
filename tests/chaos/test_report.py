"""The report names every fault and every problem."""

import json

from slime.chaos.disturbance import Outcome, Plan
from slime.chaos.faults import Kind
from slime.chaos.report import Findings, as_json, page

OUTCOMES = [
    Outcome(Kind.KILL, "engine", 10, 5.0, 1, 0, 2.0),
    Outcome(Kind.KILL, "engine", 11, 9.0, 2, 1, 30.0),
    Outcome(Kind.STOP, "driver", 12, 50.0, 3),
]


def test_faults_are_counted_by_victim():
    text = page(Plan(faults=4), Findings(OUTCOMES, seconds={"disturbed": 60.0}))
    assert "3 of 4 faults (seed 0): no problems. disturbed 60 s." in text
    assert "| engine | kill | 2 | 1 | 1 | 30.0 s |" in text
    assert "| driver | stop | 1 | 0 | 0 | never |" in text
    assert "| 9.0 s | kill | engine | 2 | 1 | 30.0 s |" in text


def test_problems_and_differences_are_told():
    findings = Findings(OUTCOMES, ["process 7 is left: x"], [f"train {n}: a is 1" for n in range(9)])
    text = page(Plan(), findings)
    assert "1 problem." in text and "- process 7 is left: x" in text
    assert "not the twin's: 9." in text and "- train 4: a is 1" in text and "train 5" not in text
    found = json.loads(json.dumps(as_json(Plan(), findings)))
    assert found["outcomes"][2] == {
        **dict(kind="stop", role="driver", pid=12, at_s=50.0, steps=3, restarts=0, recovered_s=None)
    }
    assert found["plan"]["kinds"] == ["kill", "stop", "pause"] and len(found["differences"]) == 9
