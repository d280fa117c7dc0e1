"""The adapters that agents talk to, before an engine that thinks, talks and calls tools."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.server_fuzz.at_ports import operations_of, served_at_port
from benchmarks.server_fuzz.documents import TEXT, document, named
from benchmarks.server_fuzz.in_process import is_ok, post
from benchmarks.server_fuzz.messages import Loopback, Sent
from benchmarks.server_fuzz.target import KEY, Target
from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.anthropic_shapes import MESSAGES
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.adapters.openai_shapes import COMPLETION, RESPONSE
from tests.engines.fake import TalkingEngine
from tools.make_tiny_model import make_tokenizer


@asynccontextmanager
async def _adapter(
    kind: Callable[..., Any], bodies: dict[str, Any], right: Sent, opened: Callable[[Sent], bool]
) -> AsyncIterator[Target]:
    """An adapter with a session whose id is the key, before an engine that thinks, talks and calls tools."""
    tokenizer = make_tokenizer()
    talker = TalkingEngine(tokenizer).start()
    said = ("ok", "<think>\nhm\n</think>\n\nok", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    talker.answer = lambda conversation: said[len(conversation) % len(said)]
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    adapter = kind(tokenizer=tokenizer, sglang_url=f"{talker.url}/generate", **parsers)
    async with served_at_port(adapter.app) as port:
        client = Loopback(port)

        async def restore() -> None:
            """Another session under the same id: what was said in one is kept until its end."""
            adapter.drop_session(KEY)
            adapter.open_session(KEY, sampling_defaults={"max_new_tokens": 8, "temperature": 1.0})
            talker.calls.clear()

        await restore()
        parameters = {"/v1/responses/{id}": [named("id", TEXT, "path")]}
        yield Target(
            document(operations_of(adapter.app), bodies, parameters),
            client.ask,
            right,
            is_ok,
            KEY,
            opened=opened,
            refusals=frozenset({401, 403, 404, 405}),
            restore=restore,
            loopback=client,
        )
        client.close()
    talker.stop()


_TALK = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def openai_adapter(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """Chat completions and responses. A body may name the session too, and is read where no key is shown."""
    bodies = {"/v1/chat/completions": COMPLETION, "/v1/responses": RESPONSE}

    def opened(sent: Sent) -> bool:
        _, _, shown = dict(sent.headers).get(b"authorization", b"").partition(b" ")
        return sent.path in ("/healthz", "/v1/models") or not shown.strip()

    async with _adapter(OpenAIAdapter, bodies, post("/v1/chat/completions", messages=_TALK), opened) as made:
        yield made


@asynccontextmanager
async def anthropic_adapter(folder: Path, key: str | None) -> AsyncIterator[Target]:
    """Messages, and how many tokens they have."""
    bodies = dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), MESSAGES)
    right = post("/v1/messages", messages=_TALK, max_tokens=8)
    opened = lambda sent: sent.path in ("/healthz", "/v1/models")
    async with _adapter(AnthropicAdapter, bodies, right, opened) as made:
        yield made
