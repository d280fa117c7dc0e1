"""Middleware in front of the engines: a user's own, and the one that remembers tokens."""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware

from slime.rollout import text_generation
from slime.rollout.base_types import RolloutError
from slime.rollout.generate_state import GenerateState
from slime.router.middleware_hub import radix_tree_middleware
from slime.router.middleware_hub.radix_tree_middleware import postprocess_sample_with_radix_tree
from slime.router.router import SlimeRouter
from slime.utils.types import Sample
from tests.router.bpe import byte_level
from tests.router.conftest import exchanged, router_args, served
from tests.run_args import with_groups

RADIX = "slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
ORDER: list[str] = []


class Stamping(BaseHTTPMiddleware):
    """Middleware as users of the original write it."""

    def __init__(self, app: Any, *, router: Any) -> None:
        super().__init__(app)
        self.router = router

    async def dispatch(self, request: Any, call_next: Any) -> Any:
        ORDER.append(type(self).__name__)
        response = await call_next(request)
        response.headers["X-Model"] = self.router.args.hf_checkpoint
        return response


class Outer(Stamping):
    pass


@asynccontextmanager
async def behind(*paths: str, **changes: Any) -> AsyncIterator[tuple[SlimeRouter, httpx.AsyncClient]]:
    router = SlimeRouter(router_args(slime_router_middleware_paths=list(paths), **changes))
    transport = httpx.ASGITransport(router.app)
    async with router.running(), httpx.AsyncClient(transport=transport, base_url="http://[::1]") as client:
        yield router, client


@asynccontextmanager
async def sampling(
    sampler: "Sampler", start_engine: Callable[[], Any], checkpoint: Path, through: Callable[..., None]
) -> AsyncIterator[SlimeRouter]:
    """A router with the radix tree before an engine that answers as the sampler says; rollouts ask it."""
    async with behind(RADIX, hf_checkpoint=str(checkpoint)) as (router, client):
        engine = start_engine()
        engine.answers["generate"] = sampler
        await register(client, engine)
        through(client)
        yield router


def letter_by_letter(text: str) -> list[int]:
    """Tokens that no tokenizer would give for the text."""
    tokenizer = byte_level()
    return [token for letter in text for token in tokenizer(letter)["input_ids"]]


class Sampler:
    """An engine that answers one text after the other, letter by letter, with log-probs of their own."""

    def __init__(self, *texts: str, reason: str = "stop", version: str = "3") -> None:
        self.texts, self.reason, self.version = list(texts), reason, version
        self.prompts: list[list[int]] = []
        self.ids: list[list[int]] = []
        self.logp: list[list[float]] = []

    def __call__(self, body: dict[str, Any]) -> Any:
        assert "text" not in body and body["return_logprob"]
        self.prompts.append(body["input_ids"])
        text = self.texts.pop(0)
        ids = letter_by_letter(text)
        logp = [float(np.float32(-0.1 * (len(self.ids) + 1) - 0.01 * index)) for index in range(len(ids))]
        self.ids.append(ids)
        self.logp.append(logp)
        answer = self.answer(text, ids, logp)
        return self.stream(answer) if body.get("stream") else answer

    def answer(self, text: str, ids: list[int], logp: list[float]) -> dict[str, Any]:
        triples = [[number, token, None] for number, token in zip(logp, ids, strict=True)]
        meta = {"finish_reason": {"type": self.reason}, "weight_version": self.version}
        return {"text": text, "output_ids": ids, "meta_info": {**meta, "output_token_logprobs": triples}}

    def stream(self, answer: dict[str, Any]) -> StreamingResponse:
        part = {"text": answer["text"][:1], "meta_info": {"finish_reason": None}}

        async def events() -> AsyncIterator[str]:
            for event in (part, answer):
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


async def register(client: httpx.AsyncClient, engine: Any) -> None:
    assert (await client.post("/workers", json={"url": engine.url})).status_code == 202


async def test_a_users_middleware_works_unchanged_and_the_last_is_outermost(start_engine) -> None:
    ORDER.clear()
    paths = [f"{__name__}.Stamping", f"{__name__}.Outer"]
    async with behind(*paths, hf_checkpoint="the model") as (_, client):
        engine = start_engine()
        await register(client, engine)
        ORDER.clear()
        answer = await client.post("/generate", json={"input_ids": [1, 2]})
        assert answer.json()["output_ids"] == [2, 1]
        assert answer.headers["X-Model"] == "the model"
        assert ORDER == ["Outer", "Stamping"]


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_another_protocol_may_be_wished_for_in_vain(start_engine, protocol) -> None:
    """RFC 9110, section 7.8: the body is part of the request, and what follows it is the next one."""
    engine = start_engine()
    async with served(slime_router_middleware_paths=[f"{__name__}.Stamping"], hf_checkpoint="m") as router:
        await router.add(engine)
        wish = b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\n"
        body = b'{"input_ids": [1, 2]}'
        head = (
            b"POST /generate HTTP/1.1\r\nHost: [::1]\r\n" + wish + b"Content-Length: %d\r\n\r\n" % len(body)
        )
        after = b"GET /health HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n"
        received = await exchanged(router, head + body + after)
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 2 and received.count(b"x-model: m\r\n") == 2
    (call,) = (call for call in engine.calls if call.path == "generate")
    assert call.body == {"input_ids": [1, 2]} and "upgrade" not in call.headers


class Careless:
    """Middleware that goes wrong in the way that the request's path says."""

    def __init__(self, app: Any, *, router: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        fault = scope["path"].removeprefix("/")
        if fault not in ("silent", "late", "short", "long", "lines", "half"):
            scope["path"] = scope["path"].replace("/renamed", "/generate")
            await self._app(scope, receive, send)
        elif fault != "silent":
            length = {"short": b"9", "long": b"1"}.get(fault, b"2")
            headers = [(b"content-length", length), (b"x", b"a\r\nb" if fault == "lines" else b"a")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"o", "more_body": True})
            if fault != "half":
                await send({"type": "http.response.body", "body": b"k", "more_body": False})
            if fault == "late":
                raise RuntimeError("after the answer")


@pytest.mark.parametrize(
    ("path", "begins", "ends"),
    [
        (b"silent", b"HTTP/1.1 500", b"\r\n\r\n"),
        (b"lines", b"HTTP/1.1 500", b""),
        (b"late", b"HTTP/1.1 200", b"\r\n\r\nok"),
        *((path, b"", b"o") for path in (b"half", b"short", b"long")),
    ],
)
async def test_middleware_that_goes_wrong_gives_no_answer_that_looks_whole(path, begins, ends) -> None:
    async with served(slime_router_middleware_paths=[f"{__name__}.Careless"]) as router:
        request = b"GET /" + path + b" HTTP/1.1\r\nConnection: close\r\n\r\n"
        try:
            answer = await exchanged(router, request)
        except ConnectionResetError:
            answer = b""
        assert answer.startswith(begins)
        if begins == b"":
            assert not answer.endswith(b"ok") or b"content-length: 9" in answer.lower()
        else:
            assert answer.endswith(ends)


async def test_middleware_may_send_a_request_to_another_path(start_engine) -> None:
    engine = start_engine()
    async with served(slime_router_middleware_paths=[f"{__name__}.Careless"]) as router:
        await router.add(engine)
        assert (await router.post("/renamed", input_ids=[1, 2]))[1]["output_ids"] == [2, 1]


async def test_nobody_without_the_key_gets_to_the_middleware(start_engine) -> None:
    ORDER.clear()
    async with behind(f"{__name__}.Stamping", hf_checkpoint="m", sglang_api_key="K") as (_, client):
        assert (await client.post("/generate", json={})).status_code == 401
        assert ORDER == []
        assert (await client.get("/health")).status_code == 200
        answer = await client.post("/generate", json={}, headers={"Authorization": "Bearer K"})
        assert answer.status_code == 503


async def test_text_goes_in_and_the_sampled_tokens_come_out_turn_by_turn(start_engine, checkpoint) -> None:
    sampler, tokenizer = Sampler("lower", "wide"), byte_level()
    async with behind(RADIX, hf_checkpoint=str(checkpoint)) as (router, client):
        engine = start_engine()
        engine.answers["generate"] = sampler
        await register(client, engine)
        prompt, tool = "the low then ", " newer "
        first = (await client.post("/generate", json={"text": prompt})).json()
        assert first["text"] == "lower"
        second = (await client.post("/generate", json={"text": prompt + "lower" + tool})).json()
        whole = prompt + "lower" + tool + second["text"]
        found = (await client.post("/retrieve_from_text", json={"text": whole})).json()
        ids, between = tokenizer(prompt)["input_ids"], tokenizer(tool)["input_ids"]
        assert sampler.prompts == [ids, ids + sampler.ids[0] + between]
        assert found["tokens"] == ids + sampler.ids[0] + between + sampler.ids[1]
        mask = [0] * len(ids) + [1] * len(sampler.ids[0]) + [0] * len(between) + [1] * len(sampler.ids[1])
        assert found["loss_mask"] == mask
        logp = [0.0] * len(ids) + sampler.logp[0] + [0.0] * len(between) + sampler.logp[1]
        assert found["rollout_logp"] == logp
        assert found["response"] == whole
        assert found["token_length"] == found["loss_mask_length"] == len(mask)
        assert router.radix_tree.get_stats()["total_entries"] >= 2


async def test_a_stream_is_recorded_before_its_end_reaches_the_client(start_engine, checkpoint) -> None:
    sampler = Sampler("lower")
    async with behind(RADIX, hf_checkpoint=str(checkpoint)) as (router, client):
        engine = start_engine()
        engine.answers["generate"] = sampler
        await register(client, engine)
        answer = await client.post("/generate", json={"text": "the ", "stream": True})
        assert answer.text.startswith("data: ") and answer.text.endswith("data: [DONE]\n\n")
        assert router.radix_tree.known("the lower").ids[-5:] == sampler.ids[0]


async def test_tokens_that_are_given_are_sent_as_they_are(start_engine, checkpoint) -> None:
    """They may be others than those that the tree has for the same text."""
    sampler = Sampler("wide", "low")
    async with behind(RADIX, hf_checkpoint=str(checkpoint)) as (router, client):
        engine = start_engine()
        engine.answers["generate"] = sampler
        await register(client, engine)
        await client.post("/generate", json={"text": "lower "})
        odd = letter_by_letter("lower wide")
        await client.post("/generate", json={"input_ids": odd, "return_logprob": True})
        assert sampler.prompts[1] == odd
        assert router.radix_tree.known("lower widelow").ids == odd + sampler.ids[1]


@pytest.mark.parametrize(
    "body",
    [
        {"text": ["a", "b"]},
        {"text": "a", "image_data": ["b"]},
        {"input_ids": [[1], [2]]},
        {"input_ids": [1]},
        {"no": "prompt"},
        [1, 2],
    ],
)
async def test_what_is_not_one_text_passes_untouched(body: Any, start_engine, checkpoint) -> None:
    async with behind(RADIX, hf_checkpoint=str(checkpoint)) as (router, client):
        engine, seen = start_engine(), []
        engine.answers["generate"] = lambda got: seen.append(got) or [{"text": "x"}]
        await register(client, engine)
        answer = await client.post("/generate", json=body)
        assert answer.json() == [{"text": "x"}] and seen == [body]
        assert router.radix_tree.get_stats()["total_entries"] == 0


async def test_a_request_that_is_no_json_is_the_engines_to_refuse(start_engine, checkpoint) -> None:
    async with behind(RADIX, hf_checkpoint=str(checkpoint)) as (_, client):
        assert (await client.post("/generate", content=b"{")).status_code == 503
        answer = await client.post("/retrieve_from_text", content=b"{")
        assert answer.status_code == 400 and "wanted: {text" in answer.json()["error"]["message"]
        assert (await client.post("/retrieve_from_text", json={"text": ""})).status_code == 400


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch):
    """Has the functions of the rollout side speak to a router of the test."""

    def connect(client: httpx.AsyncClient) -> None:
        async def post(url: str, payload: Any, retries: int = 0, headers: Any = None) -> Any:
            answer = await client.post(httpx.URL(url).path, json=payload, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.json()

        monkeypatch.setattr(radix_tree_middleware, "post", post)
        monkeypatch.setattr(text_generation, "post", post)

    return connect


def rollout_args(router: SlimeRouter) -> Namespace:
    return with_groups(vars(router.args))


async def test_a_sample_made_of_texts_has_the_tokens_that_were_sampled(
    start_engine, checkpoint, through
) -> None:
    sampler, tokenizer = Sampler("lower", "wide"), byte_level()
    async with sampling(sampler, start_engine, checkpoint, through) as router:
        args = rollout_args(router)
        sample = Sample(index=1, prompt="the low then ", session_id="s")
        sampler.reason = "abort"
        sample = await text_generation.generate(args, sample, {"max_new_tokens": 50})
        assert sample.status is Sample.Status.ABORTED and sample.response == "lower"
        sample.response += " newer "  # a tool's
        sampler.reason, sampler.version = "length", "4"
        sample = await text_generation.generate(args, sample, {"max_new_tokens": 50})
        prompt, tool = tokenizer(sample.prompt)["input_ids"], tokenizer(" newer ")["input_ids"]
        assert sample.tokens == prompt + sampler.ids[0] + tool + sampler.ids[1]
        assert sample.response == "lower newer wide"
        assert sample.loss_mask == [1] * len(sampler.ids[0]) + [0] * len(tool) + [1] * len(sampler.ids[1])
        assert sample.rollout_log_probs == sampler.logp[0] + [0.0] * len(tool) + sampler.logp[1]
        assert sample.response_length == len(sample.loss_mask)
        assert sample.status is Sample.Status.TRUNCATED and sample.weight_versions == ["3", "4"]
        assert sample.token_versions[0] == "3" and sample.token_versions[-1] == "4"


async def test_a_prompt_that_holds_an_earlier_answer_is_no_response(
    start_engine, checkpoint, through
) -> None:
    """Its tokens were generated, yet not for this sample."""
    sampler = Sampler("lower", "wide")
    async with sampling(sampler, start_engine, checkpoint, through) as router:
        args = rollout_args(router)
        await text_generation.generate(args, Sample(index=0, prompt="the "), {"max_new_tokens": 50})
        sample = await text_generation.generate(
            args, Sample(index=1, prompt="the lower"), {"max_new_tokens": 50}
        )
        assert sample.tokens[-sample.response_length :] == sampler.ids[1]
        assert sample.response_length == len(sampler.ids[1])


async def test_an_answer_that_was_aborted_before_its_first_token(start_engine, checkpoint, through) -> None:
    sampler = Sampler("", "low", reason="abort")
    async with sampling(sampler, start_engine, checkpoint, through) as router:
        sample = Sample(index=0, prompt="the ")
        sample = await text_generation.generate(rollout_args(router), sample, {"max_new_tokens": 50})
        assert sample.status is Sample.Status.ABORTED and sample.response_length == 0
        sample = await text_generation.generate(rollout_args(router), sample, {"max_new_tokens": 50})
        assert sample.tokens[-sample.response_length :] == sampler.ids[1]


@pytest.mark.parametrize("between", ["", " a tool's"])
async def test_a_stop_string_that_an_abort_has_parted_ends_an_answer(
    start_engine, checkpoint, through, between
) -> None:
    """The engine sees only what it makes. Where a tool has spoken, nothing has begun before."""
    sampler = Sampler("slower st", "op and more", reason="abort")
    async with sampling(sampler, start_engine, checkpoint, through) as router:
        args = rollout_args(router)
        params = {"max_new_tokens": 50, "stop": ["stop"]}
        GenerateState.clear()  # whose tokenizer may be that of others
        sample = await text_generation.generate(args, Sample(index=0, prompt="the "), params)
        sample.response += between
        sampler.reason = "length"
        sample = await text_generation.generate(args, sample, params)
        if between:
            assert sample.response == "slower st a tool'sop and more"
            assert sample.status is Sample.Status.TRUNCATED and sample.tokens[-11:] == sampler.ids[1]
            return
        assert sample.response == "slower stop" and sample.status is Sample.Status.COMPLETED
        assert sample.tokens == byte_level()("the ")["input_ids"] + sampler.ids[0] + sampler.ids[1][:2]
        assert sample.rollout_log_probs == sampler.logp[0] + sampler.logp[1][:2]
        assert sample.loss_mask == [1] * 11 and sample.version_spans == [("3", 11)]


async def test_tokens_that_were_forgotten_are_an_error_and_not_guessed(
    start_engine, checkpoint, through
) -> None:
    async with behind(RADIX, hf_checkpoint=str(checkpoint)) as (router, client):
        engine = start_engine()
        engine.answers["generate"] = Sampler("lower", "wide", reason="abort")
        await register(client, engine)
        through(client)
        args, sample = rollout_args(router), Sample(index=7, prompt="the ")
        sample = await text_generation.generate(args, sample, {"max_new_tokens": 50})
        router.radix_tree.clear()
        with pytest.raises(ValueError, match=r"sample 7: .*--slime-router-radix-tree-tokens than 100000"):
            await text_generation.generate(args, sample, {"max_new_tokens": 50})


async def test_two_samples_with_one_text_have_their_own_tokens(start_engine, checkpoint, through) -> None:
    """The tree keeps the latest of them."""
    async with behind(RADIX, hf_checkpoint=str(checkpoint)) as (router, client):
        engine, sampler = start_engine(), Sampler("lower", "wide")
        await register(client, engine)
        through(client)
        args, sample = rollout_args(router), Sample(index=0, prompt="the ")
        engine.answers["generate"] = sampler
        output = (await client.post("/generate", json={"text": "the "})).json()
        other = byte_level()("lower")["input_ids"]
        prompt = byte_level()("the ")["input_ids"]
        router.radix_tree.insert("the lower", prompt + other, None, [0] * len(prompt) + [1] * len(other))
        sample = await postprocess_sample_with_radix_tree(args, sample, output)
        assert sample.tokens == prompt + sampler.ids[0] != prompt + other
        assert sample.rollout_log_probs == sampler.logp[0]
        sample.status = Sample.Status.ABORTED
        sample = await text_generation.generate(args, sample, {"max_new_tokens": 50})
        assert sampler.prompts[1] == prompt + other
        assert sample.tokens == prompt + other + sampler.ids[1], "what the engine saw"
        assert sample.response == "lowerwide" and sample.response_length == len(other) + len(sampler.ids[1])


async def test_without_the_middleware_text_is_refused() -> None:
    for flags in ({}, {"use_slime_router": False, "slime_router_middleware_paths": [RADIX]}):
        with pytest.raises(RolloutError, match="wanted: --use-slime-router and --slime-router-middleware"):
            await text_generation.generate(router_args(**flags), Sample(prompt="a"), {"max_new_tokens": 5})


async def test_the_work_ends_when_the_client_goes_away() -> None:
    from slime.router.asgi import _unless_disconnected

    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async with asyncio.timeout(60):
        await _unless_disconnected(work(), receive)  # type: ignore[arg-type]
    assert ended.is_set()
