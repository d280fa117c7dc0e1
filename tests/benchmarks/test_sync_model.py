"""The arithmetic of the model of weight updates, by hand."""

from math import inf

import pytest

from benchmarks.sync_model import (
    Cluster,
    Update,
    figures,
    on_cluster,
    one_after_the_other,
    requests_of,
    seconds,
)

ALONE = Update(prepare=50.0, take=10.0, lanes=2.0, request=0.5)


@pytest.mark.parametrize(
    ("update", "engines", "requests", "wanted"),
    [
        (ALONE, 1, 0, 2 + 10),
        (ALONE, 2, 0, 2 + 10),  # side by side
        (ALONE, 4, 0, 2 + 20),  # two after two
        (ALONE, 4, 3, 2 + 20 + 4 * 3 * 0.5),
        (Update(inf, 10.0, inf, 0.0), 1000, 7, 10),
    ],
)
def test_engines_take_turns_where_lanes_are_few_and_each_request_counts(update, engines, requests, wanted):
    assert seconds(update, 100.0, engines, requests) == pytest.approx(wanted)


def test_what_is_announced_bucket_by_bucket_is_asked_more_often():
    assert [requests_of(nbytes, 10) for nbytes in (9, 10, 11)] == [6, 6, 7]


def test_steps_that_each_take_all_bytes_add_up():
    assert one_after_the_other(2.0, 2.0) == 1.0 and one_after_the_other(3.0) == 3.0


def test_the_figures_of_one_engine_give_its_update_back(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    found = figures({"wall_s": 12.0, "cpu_s": 12.0}, 100, 4, prepared=2.0, request=0.5)
    assert found == Update(50.0, 100 / 8, 2.0, 0.5)
    assert seconds(found, 100, 1, 4) == pytest.approx(12.0)
    busy = figures({"wall_s": 12.0, "cpu_s": 20.0}, 100, 4, prepared=2.0, request=0.5)
    assert busy.lanes == 1.0  # sender and receiver have a core each already
    assert figures({"wall_s": 9.0, "cpu_s": 9.0}, 100, 0, 0.0, 0.0).prepare == inf


def test_a_cluster_is_as_fast_as_its_narrowest_part():
    cluster = Cluster(link=10, write=5, read=10, read_by_all=20, load=10, find=2, made=4, changed=0.5)
    found = on_cluster(cluster, 0.01, 100.0, 4, 50.0)
    assert found["process group"] == pytest.approx(100 / 10 + 4 * 7 * 0.01)
    # written once; two of four engines at a time read all and load it
    assert found["disk"] == pytest.approx(100 / 5 + 2 * (100 / 10 + 100 / 10) + 4 * 5 * 0.01)
    # found and half of it written; each engine reads that half, makes the changes and loads all
    each = 50 / 10 + 100 / 4 + 100 / 10
    side_by_side = 20 / (50 / each)
    assert found["changes"] == pytest.approx(
        100 / 2 + 50 / 5 + each * max(1, 4 / side_by_side) + 4 * 6 * 0.01
    )
