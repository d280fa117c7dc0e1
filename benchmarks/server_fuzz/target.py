"""A server that is asked, and what is wrong with an answer of it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.server_fuzz.messages import Answer, Ask, Loopback, Sent

KEY = "key-of-this-server-0f6d2c51"
SECRETS = {"SLIME_FUZZ_SECRET": "planted-in-the-environment-93ab"}
"""What the environment of the process that serves has."""
REFUSED = frozenset({401, 403})
FOREIGN = (b"origin", b"http://elsewhere.example")


async def nothing(sent: Sent | None = None) -> None:
    """Leaves a server as it is."""


@dataclass
class Target:
    """A server that runs.

    Attributes:
        document: its OpenAPI.
        ask: asks it; ``loopback`` if that is at a port.
        right: a request that it answers as ``wanted`` says, whatever came before ``restore``.
        key: that requests have to show; None for one without.
        showing: the same request with a key, which may be a wrong one; ``hiding`` without one.
        opened: whether a request needs no key.
        refusals: how it answers one without the key.
        holds: whether it does so without its body; else nothing of that is kept.
        foreign: how it answers one of another site's page.
        told: the statuses from 500 on that are no fault of the server, by what the product says of them.
        restore: brings it back to where it answers everything.
        rests: whether it may hold requests back until it is restored.
        skips: whether a request is left out.
        prepare: makes it possible that a request is not refused.
    """

    document: Mapping[str, Any]
    ask: Ask
    right: Sent
    wanted: Callable[[Answer], bool]
    key: str | None = None
    showing: Callable[[Sent, bytes], Sent] = lambda sent, key: sent.showing(
        b"authorization", b"Bearer " + key
    )
    hiding: Callable[[Sent], Sent] = lambda sent: sent
    opened: Callable[[Sent], bool] = lambda sent: False
    refusals: frozenset[int] = REFUSED
    holds: bool = True
    foreign: frozenset[int] = frozenset({403})
    told: Callable[[Sent, int], bool] = lambda sent, status: False
    restore: Callable[[], Awaitable[None]] = nothing
    rests: Callable[[], bool] = lambda: False
    skips: Callable[[Sent], bool] = lambda sent: False
    prepare: Callable[[Sent], Awaitable[None]] = nothing
    loopback: Loopback | None = None

    def keyed(self, sent: Sent) -> Sent:
        """The request with the right key, where there is one."""
        return sent if self.key is None else self.showing(sent, self.key.encode())

    async def answer(self, sent: Sent) -> Answer:
        """Asks; what is held back gets its answer once the server is restored."""
        if not self.rests():
            return await self.ask(sent)
        asked = asyncio.ensure_future(self.ask(sent))
        await asyncio.wait({asked}, timeout=0.02)
        if not asked.done():
            await self.restore()
        return await asked


def faults(target: Target, sent: Sent, answer: Answer) -> list[str]:
    """What is wrong with an answer, whatever was asked and by whom."""
    found = [answer.failure] if answer.failure else []
    if not found and answer.status >= 500 and not target.told(sent, answer.status):
        found.append(f"status {answer.status}")
    whole = b"".join((answer.body, *(part for pair in answer.headers for part in pair)))
    secrets = (*SECRETS.values(), *((target.key,) if target.key else ()))
    found += [f"tells a secret: {secret}" for secret in secrets if secret.encode() in whole]
    if b"Traceback (most recent call last)" in whole:
        found.append("tells a traceback")
    kind = next((value for name, value in answer.headers if name.lower() == b"content-type"), b"")
    if kind.startswith(b"application/json") and answer.body and not _is_json(answer.body):
        found.append("says it is JSON, and is none")
    return found


def faults_without_key(target: Target, sent: Sent, answer: Answer) -> list[str]:
    """What is wrong with the answer to a request that does not show the key, and whose body is held back."""
    found = faults(target, sent, answer)
    if not target.opened(sent):
        if answer.status not in target.refusals:
            found.append(f"status {answer.status} without the key (wanted: {sorted(target.refusals)})")
        if answer.read:
            found.append("the body was read without the key")
    return found


def faults_of_foreign(target: Target, sent: Sent, answer: Answer) -> list[str]:
    """What is wrong with the answer to a request that a page of another site has made a browser send."""
    found = faults(target, sent, answer)
    if answer.status not in target.foreign:
        found.append(f"status {answer.status} for another site (wanted: {sorted(target.foreign)})")
    return found


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True
