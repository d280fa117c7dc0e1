"""What is known of the time until a run has back what it lost, and the page that says it."""

import json
from copy import deepcopy

from benchmarks.recovery import RESULTS, ROOT, broken, snapshot_table, table


def test_recovery_takes_no_longer_than_promised_and_the_page_has_the_table():
    found = json.loads(RESULTS.read_text())
    assert broken(found) == [] and found["rounds"] >= 3
    page = (ROOT / "docs" / "fleets.md").read_text()
    assert table(found) in page and snapshot_table(found) in page
    snapshots = found["snapshots"]
    assert (
        f"{snapshots['mb']} MB of state, on two CPU cores with a load of {snapshots['load_before']:.0f}\n"
        in page
    )


def test_what_takes_longer_than_promised_is_named():
    found = deepcopy(json.loads(RESULTS.read_text()))
    found["forked"]["ratios"]["engine again"] = 1.5
    found["interpreters"]["ratios"]["group again with standbys"] = 0.5
    found["interpreters"]["seconds"]["stopped rank found"] = 10.0
    assert broken(found) == [
        "forked: engine again: 1.5 of a start (wanted: under 1.5)",
        "interpreters: group again with standbys: 0.5 of a start (wanted: under 0.5)",
        "interpreters: stopped rank found after 10 s (wanted: under 10)",
    ]
