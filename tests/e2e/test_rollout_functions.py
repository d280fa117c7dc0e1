"""Rollout functions on real runs: an engine is lost, the books balance, staleness keeps its bound.

Every function with every way to lose an engine, without a cluster: tests/ray/test_lost_engines.py.
"""

import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.observability.metric_table import undescribed
from slime.rollout.data_state import read_state, state_path
from slime.utils.types import Sample
from tests.e2e.plugins import token_parity_reward
from tests.e2e.test_recovery import VICTIM, _engines

pytestmark = pytest.mark.e2e

LOSE_AT = 40  # a sample of the third rollout
BOUND = 2
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
BUFFER = "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout"


async def deadly_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Kills an engine in the middle of a rollout, once, and notes its process id."""
    note = Path(os.environ[VICTIM])
    if (sample.index or 0) >= LOSE_AT and not note.exists():
        pid = max(_engines())
        note.write_text(str(pid))
        os.kill(pid, signal.SIGKILL)
    return await token_parity_reward(args, sample, **kwargs)


def test_fully_async_with_evaluation_keeps_its_bound_and_its_books_though_an_engine_dies(
    start, rl_flags, data: Path, tmp_path: Path, monkeypatch
) -> None:
    note = tmp_path / "victim"
    monkeypatch.setenv(VICTIM, str(note))
    flags = [
        *("--use-fault-tolerance", "--rollout-num-gpus", 2, "--num-rollout", 6, "--use-rollout-logprobs"),
        *("--custom-rm-path", "tests.e2e.test_rollout_functions.deadly_reward"),
        *("--save", tmp_path / "save", "--save-interval", 6, "--no-save-optim"),
        *("--rollout-function-path", FULLY_ASYNC, "--max-staleness", BOUND),
        *("--eval-prompt-data", "arith", data / "eval.jsonl", "--eval-interval", 2),
    ]
    run = start([*rl_flags, *flags], script="train_async.py").expect_success()
    assert note.exists()
    rows = run.rows("rollout")
    assert len(run.rows("train")) == 6
    assert max(row["rollout/staleness/max"] for row in rows.values()) == BOUND
    assert max(row["rollout/fully_async/staleness/max"] for row in rows.values()) == BOUND
    assert sorted(run.rows("eval")) == [2, 4, 6]
    assert undescribed(run.names()) == set()
    state = read_state(state_path(str(tmp_path / "save"), 5))
    books = state["ledger"]
    assert books["trained"] == 24 == run.books()[5]["trained"]
    assert not books["dropped"] or set(books["dropped"]) == {"aborted"}
    fates = books["trained"] + books["filtered"] + sum(books["dropped"].values())
    assert books["issued"] == fates + books["buffered"] + books["leased"]
    run.expect_no_processes()


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_answers_go_on_over_updates_in_every_mode(mode: str, start, rl_flags) -> None:
    flags = [
        *("--pause-generation-mode", mode, "--max-staleness", BOUND + 1),
        *("--rollout-function-path", FULLY_ASYNC),
        *("--num-rollout", 6, "--rollout-max-response-len", 600),
    ]
    run = start([*rl_flags, *flags], script="train_async.py").expect_success()
    again = [row.get("rollout/recomputed_tokens", 0) for row in run.rows("rollout").values()]
    gaps = [row["train/train_rollout_logprob_abs_diff"] for row in run.rows("train").values()]
    assert len(gaps) == 6 and gaps[0] < 1e-5
    assert max(gaps) > 1e-4, "no update came between an answer and its step"
    assert (max(again) > 0) == (mode != "in_place")
    run.expect_no_processes()


def parities(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """In place of rewards that a random model never gets: raw ones, and those that are trained on."""
    rewards = [float(sum(sample.tokens) % 2) for sample in samples]
    return rewards, [reward - 0.5 for reward in rewards]


def test_what_a_generator_writes_to_the_rollout_buffer_is_trained_on(
    start, rl_flags, buffer_url: str, tmp_path: Path
) -> None:
    flags = [
        *("--rollout-function-path", BUFFER, "--rollout-buffer-url", buffer_url),
        *("--custom-reward-post-process-path", "tests.e2e.test_rollout_functions.parities"),
        *("--save", tmp_path / "save", "--save-interval", 2, "--no-save-optim"),
    ]
    run = start([*rl_flags, *flags]).expect_success()
    rows = run.rows("train")
    assert sorted(rows) == [0, 1] and all(row["train/grad_norm"] > 0 for row in rows.values())
    state = read_state(state_path(str(tmp_path / "save"), 1))
    done = state["metadata"]["finished_groups"]
    assert len(done) == len(set(done)) == 8
    run.expect_no_processes()
