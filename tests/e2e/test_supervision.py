"""A supervised run whose processes are killed ends as one that nobody disturbed."""

import os
import signal

import psutil
import pytest

from tests.e2e.test_resume import numbers

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_a_run_whose_driver_and_rank_are_killed_ends_as_its_twin(start, start_alone, rl_flags, tmp_path):
    def flags(name):
        training = [*rl_flags, "--colocate", "--num-rollout", 4]
        return [*training, "--run-dir", tmp_path / name, "--save-interval", 1]

    whole = start(flags("whole")).expect_success()
    words, metrics = ["train", "--supervise", *flags("disturbed")], tmp_path / "disturbed.jsonl"
    disturbed = start_alone(words, script="slime/cli/__main__.py", metrics=metrics)
    disturbed.wait_for(lambda: len(disturbed.rows("train")) > 0, "the first step")
    (driver,) = psutil.Process(disturbed.process.pid).children()
    driver.kill()
    disturbed.wait_for(lambda: len(disturbed.rows("train")) > 1, "a step after it")
    # The rank, or what it has forked to write a checkpoint: the run ends, and is started again.
    os.kill(max(disturbed.pids_of("ray::TrainRayActor")), signal.SIGKILL)
    disturbed.expect_success()
    assert "supervisor: the run was killed by SIGKILL: it starts again in 5 s (1 of 5)" in disturbed.output
    for axis in ("train", "rollout"):
        assert numbers(disturbed.rows(axis)) == numbers(whole.rows(axis))
    disturbed.expect_no_processes()
