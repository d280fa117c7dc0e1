"""What is known of agents' turns while engines are killed, and the page that says it."""

import json

from benchmarks.killed_engines import RESULTS, ROOT, table


def test_agents_of_thousands_of_turns_lost_none_to_killed_engines_and_the_page_has_the_table():
    found = json.loads(RESULTS.read_text())
    assert found["turns"] > 300 and found["kills"] > 20 and found["updates"] >= found["steps"]
    assert found["kills_in_turns"] > 4 and found["kills_in_updates"] > 4
    assert found["turns_lost"] == found["recomputed_beyond_metric"] == 0 and not found["groups"]["dropped"]
    assert found["reward"]["last_quarter"] > found["reward"]["first_quarter"] + 0.1
    assert table(found) in (ROOT / "docs" / "agents.md").read_text()
