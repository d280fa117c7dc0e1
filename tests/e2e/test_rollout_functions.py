"""Rollout functions on real runs: an engine is lost, the books balance, staleness keeps its bound."""

import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.utils.types import Sample
from tests.e2e.plugins import token_parity_reward
from tests.e2e.test_recovery import VICTIM, _engines

pytestmark = pytest.mark.e2e

LOSE_AT = 40  # a sample of the third rollout
SIGNAL = "SLIME_TEST_SIGNAL"
BOUND = 2
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"


async def deadly_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Sends an engine the signal in the middle of a rollout, once, and notes its process id."""
    note = Path(os.environ[VICTIM])
    if (sample.index or 0) >= LOSE_AT and not note.exists():
        pid = max(_engines())
        note.write_text(str(pid))
        os.kill(pid, int(os.environ[SIGNAL]))
    return await token_parity_reward(args, sample, **kwargs)


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("signum", "script", "flags"),
    [
        (
            signal.SIGKILL,
            "train_async.py",
            ["--rollout-function-path", FULLY_ASYNC, "--max-staleness", BOUND, "--eval-interval", 2],
        ),
        (
            signal.SIGSTOP,
            "train.py",
            ["--custom-generate-function-path", STREAMING, "--over-sampling-batch-size", 6],
        ),
    ],
    ids=["fully async, SIGKILL", "streaming, SIGSTOP"],
)
def test_an_engine_that_is_lost_costs_no_group(
    signum: int, script: str, flags: list[object], start, rl_flags, data: Path, tmp_path: Path, monkeypatch
) -> None:
    note = tmp_path / "victim"
    monkeypatch.setenv(VICTIM, str(note))
    monkeypatch.setenv(SIGNAL, str(int(signum)))
    common = [
        *("--use-fault-tolerance", "--rollout-num-gpus", 2, "--num-rollout", 6, "--use-rollout-logprobs"),
        *("--custom-rm-path", "tests.e2e.test_rollout_functions.deadly_reward"),
        *("--save", tmp_path / "save", "--save-interval", 6, "--no-save-optim"),
        *("--eval-prompt-data", "arith", data / "eval.jsonl"),
    ]
    run = start([*rl_flags, *common, *flags], script=script).expect_success()
    assert note.exists()
    rows = run.rows("rollout")
    assert len(run.rows("train")) == 6
    ages = [row["rollout/staleness/max"] for row in rows.values()]
    if script == "train.py":
        assert max(ages) <= 1  # what was finished beyond a batch is trained on in the next
    else:
        assert max(ages) == BOUND
        assert max(row["rollout/fully_async/staleness/max"] for row in rows.values()) == BOUND
        assert sorted(run.rows("eval")) == [2, 4, 6]
    state = torch.load(tmp_path / "save" / "rollout" / "global_dataset_state_dict_5.pt", weights_only=True)[
        "ledger"
    ]
    assert state["trained"] == 24
    assert not state["dropped"] or set(state["dropped"]) == {"aborted"}
    fates = state["trained"] + state["filtered"] + sum(state["dropped"].values())
    assert state["issued"] == fates + state["buffered"] + state["leased"]
    run.expect_no_processes()
