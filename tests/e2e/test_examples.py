"""Examples run as their scripts say: with a tiny model, from prompts to new weights."""

import os
import subprocess
import sys

import pytest
import torch

from examples.search_r1 import make_data
from examples.search_r1.bm25 import BM25Index
from examples.search_r1.server import create_app
from slime.utils.addresses import API_KEY
from slime.utils.types import Sample
from tests.e2e.conftest import ROOT
from tests.examples.test_run_scripts import flags_of
from tests.serving import served

pytestmark = pytest.mark.e2e


@pytest.fixture
def run_example(start, tmp_path):
    """The run, and the samples of its first rollout."""

    def run(name, *more, **variables):
        script = ROOT / f"examples/{name}/run.sh"
        flags = flags_of(script, tmp_path, SLIME_TEST_PYTHON=sys.executable, **variables)
        record = tmp_path / "recordings"
        run = start([*flags[:-2], "--save-debug-rollout-data", record / "{rollout_id}.pt", *more])
        run.expect_success(480).expect_no_processes()
        recorded = torch.load(record / "0.pt", weights_only=True)["samples"]
        return run, [Sample.from_dict(sample) for sample in recorded]

    return run


def test_a_team_of_two_models_is_trained(run_example) -> None:
    few = ("--rollout-batch-size", 2, "--rollout-max-response-len", 24)
    rewards = ("--custom-rm-path", "tests.e2e.test_examples.parities")
    run, samples = run_example("multi_agent", *rewards, *few, TWO_POLICIES="1")
    rows = run.rows("train")
    assert sorted(rows) == [0, 1] and rows[0]["train/author/grad_norm"] > 0
    for policy in ("author", "selector"):
        assert rows[1][f"train/{policy}/train_rollout_logprob_abs_diff"] < 1e-5
    roles = {(sample.metadata["role"], sample.policy) for sample in samples}
    assert roles == {("solver", "author"), ("rewriter", "author"), ("selector", "selector")}
    executions = {sample.rollout_id for sample in samples}
    assert len(samples) == 7 * 8 and len(executions) == 8
    # Equal questions to solvers side by side do not have equal answers.
    first = [sample for sample in samples if sample.rollout_id == min(executions)]
    assert len({sample.response for sample in first if sample.metadata["role"] == "solver"}) == 3


async def parities(args, samples, **kwargs) -> list[float]:
    """Rewards that a random model gets half of the time."""
    return [float(sum(sample.tokens) % 2) for sample in samples]


def test_a_model_that_may_search_is_trained(run_example, tmp_path) -> None:
    reward = ("--custom-rm-path", "tests.e2e.plugins.token_parity_reward")
    make_data.main(["--output", str(tmp_path / "facts"), "--countries", "20"])
    index = BM25Index.from_jsonl(tmp_path / "facts/corpus.jsonl")
    with served(create_app(index)) as port:
        where = {"SEARCH_URL": f"http://127.0.0.1:{port}", "QUESTIONS": str(tmp_path / "facts/train.jsonl")}
        run, samples = run_example("search_r1", *reward, **where)
    rows = run.rows("train")
    assert sorted(rows) == [0, 1] and rows[0]["train/grad_norm"] > 0
    assert rows[1]["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert {sample.metadata["round_number"] for sample in samples} == {1}


def test_trajectories_of_a_program_of_its_own_are_trained_on(run_example, buffer_url, tmp_path) -> None:
    command = [sys.executable, "-m", "examples.rollout_buffer.writer", "--buffer", buffer_url]
    with (tmp_path / "writer.log").open("w") as log:
        env = os.environ | {API_KEY: "k"}
        writer = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        rewards = ("--custom-reward-post-process-path", "tests.e2e.test_rollout_functions.parities")
        rewards += ("--sglang-api-key", "k")
        run, samples = run_example("rollout_buffer", *rewards, BUFFER_URL=buffer_url)
    finally:
        writer.kill()
        writer.wait()
    rows = run.rows("train")
    assert sorted(rows) == [0, 1] and rows[0]["train/grad_norm"] > 0, (tmp_path / "writer.log").read_text()
    assert len(samples) == 16 and all("Are you sure?" in sample.response for sample in samples)


def test_a_model_that_plays_an_environment_is_trained(run_example) -> None:
    """Its turns end at any letter, so that a random model takes many; environments have processes."""
    letters = ("--rollout-stop-token-ids", *range(64, 90))
    run, samples = run_example("environment", "--rollout-max-response-len", 24, *letters)
    rows = run.rows("train")
    assert sorted(rows) == [0, 1]
    assert rows[1]["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert max(sample.metadata["round_number"] for sample in samples) > 2
    heard = [sample for sample in samples if "That is no action (wanted: left," in sample.response]
    assert heard and all(0 in sample.loss_mask and 1 in sample.loss_mask for sample in heard)
    assert all(sample.reward == sum(sample.metadata.get("step_rewards", ())) for sample in samples)
