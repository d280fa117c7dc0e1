"""What is known of agents' turns while engines are killed, and the page that says it."""

import json

import pytest

from benchmarks.killed_engines import RESULTS, ROOT, not_learned, table


def test_agents_of_thousands_of_turns_lost_none_to_killed_engines_and_the_page_has_the_table():
    found = json.loads(RESULTS.read_text())
    assert found["turns"] > 300 and found["kills"] > 20 and found["updates"] >= found["steps"]
    assert found["kills_in_turns"] > 4 and found["kills_in_updates"] > 4
    assert found["turns_lost"] == found["recomputed_beyond_metric"] == 0 and not found["groups"]["dropped"]
    assert found["reward"]["last_quarter"] > found["reward"]["first_quarter"] + 0.1
    assert table(found) in (ROOT / "docs" / "agents.md").read_text()


@pytest.mark.parametrize(
    ("steps", "first", "last", "told"),
    [(100, 0.5, 0.55, True), (100, 0.5, 0.61, False), (100, 0.94, 0.95, False), (99, 0.5, 0.4, False)],
)
def test_a_long_run_that_has_not_learned_is_told_of(steps, first, last, told):
    reward = {"first_quarter": first, "last_quarter": last}
    assert (not_learned({"steps": steps, "reward": reward}) is not None) == told
