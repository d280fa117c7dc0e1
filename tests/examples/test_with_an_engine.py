"""Conversations with a real engine: what is trained has the log-probs of the model."""

import re
from urllib.parse import urlsplit

import pytest

from examples.multi_agent.rollout_with_multi_agents import generate_with_multi_agents
from examples.search_r1 import generate_with_search
from slime.environments import Step
from slime.rollout.episodes import Episodes
from slime.utils.types import Sample
from tests.engines.embedded import Server, make_checkpoint, token_logprobs

PARAMS = {"max_new_tokens": 60, "temperature": 1.0, "no_stop_trim": True, "sampling_seed": 3}
# A random model writes one of them soon.
STOPS = [chr(code) for code in range(97, 123)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model, and the engine that serves it."""
    path = tmp_path_factory.mktemp("served")
    model = make_checkpoint(path)
    server = Server(path).wait_ready()
    yield model, server
    server.stop()


@pytest.fixture
def served_args(served, make_args):
    args = make_args(apply_chat_template=False, custom_rm_path="tests.plugin_contracts.recorders.group_rm")
    args.sglang_router_port = urlsplit(served[1].url).port
    return args


def expect_own_log_probs(model, sample: Sample) -> None:
    """Each trained token has the log-prob that the model gives it after all that stands before."""
    start = len(sample.tokens) - sample.response_length
    wanted = token_logprobs(model, sample.tokens)[start - 1 :]
    trained = [i for i, mask in enumerate(sample.loss_mask) if mask]
    assert trained and len(sample.loss_mask) == sample.response_length
    found = [sample.rollout_log_probs[i] for i in trained]
    assert found == pytest.approx([wanted[i] for i in trained], abs=1e-4)


async def test_a_search_leaves_the_model_s_own_tokens_as_they_were(
    served, served_args, tmp_path, monkeypatch
):
    monkeypatch.setattr(generate_with_search, "_QUERY", re.compile(r"(?s)^(.*)$"))  # all it says is a query
    (tmp_path / "corpus.jsonl").write_text('{"contents": "nothing of use"}\n')
    vars(served_args).update({"search_corpus": str(tmp_path / "corpus.jsonl"), "search_max_turns": 2})
    sample = Sample(index=0, prompt="Who?")
    sample = await generate_with_search.generate(
        served_args, sample, PARAMS | {"max_new_tokens": 400, "stop": STOPS}
    )
    assert sample.metadata["round_number"] > 1 and 0 in sample.loss_mask
    expect_own_log_probs(served[0], sample)


async def test_each_of_a_team_has_tokens_of_its_own(served, served_args):
    origin = Sample(index=7, group_index=2, prompt=[{"role": "user", "content": "1+1?"}])
    team = await generate_with_multi_agents(served_args, origin, PARAMS)
    assert [sample.metadata["role"] for sample in team] == ["solver"] * 3 + ["rewriter"] * 3 + ["selector"]
    assert {(sample.rollout_id, sample.group_index) for sample in team} == {(7, 2)}
    assert len({tuple(sample.tokens) for sample in team}) == 7
    for sample in team:
        expect_own_log_probs(served[0], sample)
    assert origin.tokens == [] and origin.status == Sample.Status.PENDING


class Echoes:
    """Says again what it hears, which from a random model is anything."""

    def reset(self, task, seed):
        return task["prompt"]

    def step(self, answer):
        return Step(f"{answer.text}?", reward=0.25)


async def test_turns_of_an_episode_leave_the_model_s_own_tokens_as_they_were(served, served_args):
    sample = Sample(index=0, prompt="Who?")
    params = PARAMS | {"max_new_tokens": 400, "stop": STOPS}
    sample = await Episodes(Echoes, max_turns=3)(served_args, sample, params)
    assert sample.metadata["round_number"] == 3 and sample.reward == 0.75 and 0 in sample.loss_mask
    expect_own_log_probs(served[0], sample)
