"""A trainer that lost its ranks is built again within the run."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from slime.chaos.twins import differences
from tests.e2e.test_layouts import CHECKS
from tests.e2e.test_resume import numbers

pytestmark = pytest.mark.e2e


def test_ranks_are_built_again_from_a_checkpoint_and_engines_get_newer_versions(
    start, rl_flags, tmp_path
) -> None:
    """One was killed, the other one hangs; standbys take their places.

    The engines' log-probs are held against the trainer's after each update; the step that is taken again
    gives the same numbers.
    """
    more = ["--num-rollout", 3, "--actor-num-gpus-per-node", 2, "--save", tmp_path / "saved", *CHECKS]
    more += ["--use-fault-tolerance", "--trainer-standbys", 1]
    run = start([*rl_flags, *more], script="tests/e2e/rebuilt.py").expect_success()
    assert re.search(r"^lost: actor: training on rollout 2: rank 0 .*killed by SIGKILL", run.output, re.M)
    assert run.output.count("actor: 2 of 2 ranks were standbys") == 1
    assert re.search("^rebuilt: rollout 1, version 3 and then 4$", run.output, re.M)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = [(row["step"], numbers({0: row})[0]) for row in rows if row["axis"] == "train"]
    assert [step for step, _ in steps] == [0, 1, 1, 2]
    assert steps[1] == steps[2]
    run.expect_no_processes()


def test_a_rank_that_is_lost_without_a_checkpoint_costs_the_step_under_way(
    start, gate, rl_flags, tmp_path
) -> None:
    """The state of all others is in memory, with the position in the data; the memory goes with the run."""
    under_way = gate(2 * 16)
    more = [*rl_flags, "--num-rollout", 4, "--rollout-shuffle", *CHECKS]
    own = ["--custom-rm-path", "tests.e2e.plugins.waiting_reward", "--use-fault-tolerance"]
    own += ["--trainer-snapshot-interval", 1, "--trainer-snapshot-dir", tmp_path / "memory"]
    own += ["--no-save-optim", "--no-save-rng"]  # of which snapshots take no notice
    run = start([*more, *own])
    run.wait_for(lambda: "perf/step_time" in run.rows("rollout").get(1, {}), "the end of the second step")
    (place,) = (tmp_path / "memory").glob("slime_snapshots_*/actor")
    os.kill(run.pid_of("ray::TrainRayActor"), signal.SIGKILL)
    under_way.touch()
    run.expect_success()
    told = (
        f"is started again from iteration 1 of {place}, a snapshot in memory, which costs the step under way"
    )
    assert run.output.count(told) == 1
    twin = start(more).expect_success()
    for axis in ("rollout", "train"):
        ours, theirs = run.rows(axis), twin.rows(axis)
        assert list(ours) == list(theirs) == list(range(4))
        # Weights that are sent again have a number of their own.
        assert not [line for line in differences({axis: ours}, {axis: theirs}) if "/staleness/" not in line]
    run.expect_no_processes()
    assert not [*Path(tmp_path / "memory").iterdir()]
