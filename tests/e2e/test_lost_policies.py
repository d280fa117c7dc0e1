"""With ``--use-fault-tolerance`` a run of two policies goes on after the loss of engines and of a rank."""

import asyncio
import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.two_policies import game
from examples.two_policies.make_data import main as make_tasks
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import get
from slime.utils.types import Sample
from tests.e2e.plugins import GATE
from tests.e2e.test_resume import numbers

pytestmark = pytest.mark.e2e

ROLLOUTS, GAMES = 6, 8  # of a rollout
VICTIM = "SLIME_TEST_VICTIM"
LOST = {1: game.WRITER, 2: game.EDITOR}  # of which policy an engine is killed, in which rollout


async def deadly_play(
    args: Namespace, sample: Sample, params: dict[str, Any], evaluation: bool = False
) -> Any:
    """A game; within a rollout an engine is killed, the only one of its policy in the second case."""
    rollout_id = (sample.index or 0) // GAMES
    note = Path(f"{os.environ[VICTIM]}.{rollout_id}")
    if (policy := LOST.get(rollout_id)) and not note.exists():
        note.touch()
        (url, *others) = [w["url"] for w in (await get(get_model_url(args, policy, "/workers")))["workers"]]
        os.kill(_server(int(url.rpartition(":")[2])), signal.SIGKILL)
        await asyncio.sleep(0 if others else 600)  # else the rollout could end before it is found dead
    while rollout_id == ROLLOUTS - 1 and not os.path.exists(os.environ[GATE].partition(":")[2]):
        await asyncio.sleep(0.05)
    return await game.play(args, sample, params)


def _server(port: int) -> int:
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return next(one.pid for one in listening if one.laddr.port == port and one.pid)


@pytest.fixture
def flags(model: Path, tmp_path: Path) -> list[object]:
    make_tasks(["--output", str(tmp_path / "tasks.jsonl")])
    (tmp_path / "policies.yaml").write_text(
        f"policies:\n- {{name: {game.WRITER}, rollout_num_gpus: 2}}\n- name: {game.EDITOR}\n"
    )
    return [
        *("--hf-checkpoint", model, "--fp32", "--num-gpus-per-node", 8, "--seed", 7),
        *("--policies", tmp_path / "policies.yaml"),
        *("--prompt-data", tmp_path / "tasks.jsonl", "--input-key", "prompt", "--label-key", "label"),
        *("--rollout-max-response-len", 8, "--num-rollout", ROLLOUTS, "--rollout-batch-size", 2),
        *("--n-samples-per-prompt", GAMES // 2, "--num-steps-per-rollout", 1, "--lr", 1e-3),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--advantage-estimator", "grpo"),
        *("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--save-interval", 2),
    ]


def test_what_is_lost_of_two_policies_changes_no_number(
    start, flags, gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VICTIM, str(tmp_path / "victim"))
    last_rollout = gate(0)
    deadly = ["--custom-generate-function-path", f"{__name__}.deadly_play", "--use-fault-tolerance"]
    run = start([*flags, *deadly, "--save", tmp_path / "run"])
    run.wait_for(lambda: "train/editor/loss" in run.rows("train").get(4, {}), "training after the deaths")
    os.kill(run.pid_of("ray::TrainRayActor"), signal.SIGKILL)
    last_rollout.touch()
    run.expect_success()
    assert len(list(tmp_path.glob("victim.*"))) == len(LOST)
    assert run.output.count("the rollout side is started again: ") == 1
    assert run.output.count("the trainer is started again from iteration 3 of ") == 1
    calm = ["--custom-generate-function-path", "examples.two_policies.game.play"]
    twin = start([*flags, *calm, "--save", tmp_path / "twin"]).expect_success()
    assert numbers(run.rows("train")) == numbers(twin.rows("train"))
    for name in (game.WRITER, game.EDITOR):
        key = f"rollout/{name}/raw_reward"
        rewards = [[row[key] for row in one.rows("rollout").values()] for one in (run, twin)]
        assert len(rewards[0]) == ROLLOUTS and rewards[0] == rewards[1]
    run.expect_no_processes()
