"""Which change of a ratio counts as worse."""

import json

import pytest

from benchmarks.compare import RATIOS, RESULTS, ROOT, compare, leaves


def packing(ratio):
    return {"0.5M": {"ratio_cpu": {"padded": ratio}, "seconds": {"packed": 3.0}}}


@pytest.mark.parametrize(("before", "after", "change"), [(2.0, 1.0, -0.5), (1.0, 1.1, 0.1)])
def test_a_higher_ratio_is_better(before, after, change):
    (row,) = compare("trainer_packing", packing(before), packing(after))
    assert row.name == "trainer_packing/0.5M/ratio_cpu/padded"
    assert row.change == pytest.approx(change)


def test_a_smaller_share_of_the_rest_is_better():
    step = lambda share: {"10M": {"wall_s": {"rest_share": share}}}
    (row,) = compare("grpo_step", step(0.02), step(0.01))
    assert row.change == pytest.approx(1.0)


@pytest.mark.parametrize("benchmark", RATIOS)
def test_every_results_file_has_ratios(benchmark):
    results = json.loads((ROOT / RESULTS / f"{benchmark}.json").read_text())
    assert compare(benchmark, results, results)
    assert dict(leaves(results))
