"""Engines leave a run that goes on."""

from pathlib import Path

import pytest

from slime.cli.main import main

pytestmark = pytest.mark.e2e


def test_a_run_goes_on_without_an_engine_that_leaves(start, gate, rl_flags, tmp_path: Path, capsys) -> None:
    """The gate holds the second rollout: the engine leaves while requests are under way, or between them."""
    save, middle = tmp_path / "run", gate(24)
    flags = ["--rollout-num-gpus", 2, "--num-rollout", 3, "--save", save, "--save-interval", 3]
    run = start([*rl_flags, *flags, "--custom-rm-path", "tests.e2e.plugins.waiting_reward"])
    run.wait_for(lambda: len(run.rows("train")) == 1, "the first step")
    assert len(run.engines()) == 2
    assert main(["engines", "drain", str(save), "0", "--seconds", "20", "--wait", "120"]) == 0
    assert len(run.engines()) == 1
    assert main(["engines", "drain", str(save), "1"]) == 1
    told = capsys.readouterr()
    assert "engine 1 is the last of model default that serves" in told.err
    middle.touch()
    run.expect_success()
    rows = run.rows("rollout")
    assert [rows[step].get("fleet/default/engines") for step in range(3)] == [None, 1, 1]
    assert [rows[step].get("fleet/default/missing") for step in range(3)] == [None, 0, 0]
    assert len(run.rows("train")) == 3
    assert not (save / "engines.json").exists()
    run.expect_no_processes()
