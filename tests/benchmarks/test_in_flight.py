"""What is known of answers over updates, and the page that says it."""

import json

from benchmarks.in_flight import AGENT, MODES, RESULTS, ROOT, TURN_TOKENS, table


def test_an_agent_of_300_turns_loses_nothing_to_an_update_every_second_and_the_page_has_the_table():
    found = json.loads(RESULTS.read_text())
    assert (found["seconds"], found["turns"]) == (1.0, 300) and found["modes"].keys() == {*MODES}
    for mode, told in found["modes"].items():
        rows = {name: row for name, row in told.items() if isinstance(row, dict)}
        assert rows.keys() == {AGENT, "fully async", "streaming"} and told["updates"] > 50
        assert rows[AGENT]["tokens"] == 300 * TURN_TOKENS
        for row in rows.values():
            assert row["tokens_lost"] == row["recomputed_beyond_metric"] == 0 < row["answers_met"]
            assert (row["recomputed_tokens"] == 0) == (mode == "in_place")
            if mode != "in_place":
                assert max(row["error_before"]["max"], row["error_behind"]["max"]) < 1e-5
    assert table(found) in (ROOT / "docs" / "rollouts.md").read_text()
