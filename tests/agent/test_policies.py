"""Agents of a run that trains several models: requests or sessions say which one answers."""

from contextlib import asynccontextmanager

import httpx
import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.utils.types import Sample
from tests.engines.fake import TalkingEngine

USER = {"role": "user", "content": "q"}
ASKED = {
    "/v1/chat/completions": (OpenAIAdapter, {"messages": [USER]}),
    "/v1/responses": (OpenAIAdapter, {"input": "q"}),
    "/v1/messages": (AnthropicAdapter, {"messages": [USER], "max_tokens": 50}),
    "/v1/messages/count_tokens": (AnthropicAdapter, {"messages": [USER]}),
}
KEY = {"Authorization": "Bearer s", "x-api-key": "s"}


@pytest.fixture
def engines(engine, tokenizer):
    """One for each of two policies, which says the name of its own."""
    judge = TalkingEngine(tokenizer).start()
    engine.answer, judge.answer = lambda conversation: "solver", lambda conversation: "judge"
    yield {"solver": engine, "judge": judge}
    judge.stop()


@asynccontextmanager
async def asking(serve_to, kind, engines, **options):
    urls = {name: f"{engine.url}/generate" for name, engine in engines.items()}
    adapter, url = serve_to(kind, policies=urls, **options)
    async with httpx.AsyncClient(base_url=url, headers=KEY, timeout=300, trust_env=False) as client:
        yield adapter, client


async def test_a_turn_is_answered_and_trained_by_the_policy_that_its_request_names(serve_to, engines):
    """One conversation goes on with either; neither goes on with tokens that the other has made."""
    async with asking(serve_to, OpenAIAdapter, engines, max_turns_per_sid=4) as (adapter, client):
        messages = [USER]
        for name in ("solver", "judge", "solver", "judge"):
            body = {"model": name, "messages": messages}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"] == name
            messages = [*messages, answer["choices"][0]["message"], USER]
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 429
        known = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in known] == ["solver", "judge"]
        samples = await adapter.finish_session("s", base_sample=Sample(index=3), reward=1.0)
    assert {sample.policy for sample in samples} == {"solver", "judge"}
    for name, engine in engines.items():
        own = [sample for sample in samples if sample.policy == name]
        made = [sum(sample.loss_mask) for sample in own]
        assert len(engine.seen("generate")) == 2 and sum(made) == 2 * len(engine._encode(f"{name}<|im_end|>"))
    assert await adapter.finish_session("s", base_sample=Sample()) == []


@pytest.mark.parametrize("path", ASKED)
async def test_who_names_no_policy_is_told_which_there_are(serve_to, engines, path):
    kind, body = ASKED[path]
    async with asking(serve_to, kind, engines) as (_, client):
        unknown = await client.post(path, json={**body, "model": "gpt"})
        assert unknown.status_code == 404 and "model 'gpt' (wanted: solver or judge)" in unknown.text
        missing = await client.post(path, json=body)
        assert missing.status_code == 400 and "model missing" in missing.text
        assert (await client.post(path, json={**body, "model": "judge"})).status_code == 200
        assert not engines["solver"].seen("generate")


async def test_a_session_may_be_of_one_policy_whatever_its_agent_names(serve_to, engines):
    async with asking(serve_to, OpenAIAdapter, engines) as (adapter, client):
        adapter.drop_session("s")
        with pytest.raises(ValueError, match=r"policy 'x' \(wanted: solver or judge\)"):
            adapter.open_session("s", policy="x")
        adapter.open_session("s", policy="judge", sampling_defaults={"max_new_tokens": 50})
        for model in ("gpt", "solver"):
            answer = await client.post("/v1/chat/completions", json={"model": model, "messages": [USER]})
            assert answer.json()["choices"][0]["message"]["content"] == "judge"
        samples = await adapter.finish_session("s", base_sample=Sample(policy="solver"))
    assert {sample.policy for sample in samples} == {"judge"}


async def test_without_several_a_sample_keeps_the_policy_it_has(serve_to, engine):
    adapter, url = serve_to(OpenAIAdapter)
    with pytest.raises(ValueError, match=r"policy 'x' \(wanted: none, without policies\)"):
        adapter.open_session("t", policy="x")
    async with httpx.AsyncClient(base_url=url, headers=KEY, timeout=300, trust_env=False) as client:
        await client.post("/v1/chat/completions", json={"model": "any", "messages": [USER]})
    (sample,) = await adapter.finish_session("s", base_sample=Sample(policy="a"))
    assert sample.policy == "a"
