"""A trainer that lost its ranks is built again within the run."""

import json
import re

import pytest

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
