"""Engines join a run that goes on, and others leave it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime.cli.main import main
from slime.rollout.data_state import read_state, state_path

pytestmark = pytest.mark.e2e


def test_an_engine_joins_a_run_that_goes_on_and_the_first_one_leaves_it(
    start, gate, rl_flags, tmp_path: Path, capsys
) -> None:
    """The second rollout is held while an engine starts, which serves with the next weights, and the third
    while the first engine leaves: with requests under way, or between them. Then its manager is killed, and
    the next one has the engine that joined, and it alone.
    """
    save, second, third = tmp_path / "run", gate(24), gate(40)
    flags = ["--rollout-spare-gpus", 1, "--num-rollout", 3, "--save", save, "--save-interval", 3]
    flags += [
        "--use-fault-tolerance",
        "--check-weight-checksums",
        "--custom-rm-path",
        "tests.e2e.plugins.waiting_reward",
    ]
    run = start([*rl_flags, *flags, "--sglang-api-key", "k"])

    def states() -> dict[int, str]:
        capsys.readouterr()
        if main(["engines", "list", str(save), "--json"]):
            return {}  # the rollout side is lost
        rows[:] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        urls.update({row["rank"]: row["url"] for row in rows})
        return {row["rank"]: row["state"] for row in rows}

    urls: dict[int, str] = {}
    rows: list[dict[str, Any]] = []
    run.wait_for(lambda: len(run.rows("train")) == 1, "the first step")
    assert main(["engines", "add", str(save), "2"]) == 1
    assert "2 more of model default: 1 of its places are free" in capsys.readouterr().err
    assert main(["engines", "add", str(save)]) == 0
    run.wait_for(lambda: states()[1] == "ready, joins with the next update", "the start of the other")
    second.touch()
    run.wait_for(lambda: states() == {0: "serving", 1: "serving"}, "the next update")
    run.wait_for(lambda: states() and all(row["health"] == "answers" for row in rows), "their answers")
    assert [row["version"] for row in rows] == ["3", "3"]
    assert all(row["running"] is not None and row["since"] for row in rows)
    for rank in (0, 1):
        told = httpx.get(f"{urls[rank]}/model_info", headers={"Authorization": "Bearer k"})
        assert told.json()["weight_version"] == "3"
    assert main(["engines", "drain", str(save), "0", "--seconds", "20", "--wait", "120"]) == 0
    assert len(run.engines()) == 1 and states() == {0: "free", 1: "serving"}
    assert main(["engines", "drain", str(save), "1"]) == 1
    assert "engine 1 is the last of model default that serves" in capsys.readouterr().err
    os.kill(run.pid_of("ray::RolloutManager"), signal.SIGKILL)
    run.wait_for(lambda: "the rollout side is started again" in run.output, "the loss of the manager")
    run.wait_for(lambda: states() == {0: "free", 1: "serving"}, "the next manager")
    third.touch()
    run.expect_success()
    steps = run.rows("rollout")
    assert [steps[step].get("fleet/default/engines") for step in range(3)] == [None, None, 1]
    assert [steps[step].get("fleet/default/missing") for step in range(3)] == [None, None, 0]
    assert len(run.rows("train")) == 3
    assert [books["trained"] for books in run.books().values()] == [4, 8, 12]
    books = read_state(state_path(str(save), 2))["ledger"]
    assert (books["issued"], books["trained"], books["buffered"]) == (12, 12, 0)
    assert not (save / "engines.json").exists()
    last = json.loads((save / "last_engines.json").read_text())["engines"]
    assert [row["state"] for row in last] == ["free", "serving"] and int(last[1]["version"]) > 3
    run.expect_no_processes()
