"""Sends a server what schemathesis makes of its document, and looks at each answer.

Each case is sent as it was generated; then damaged, or as a page of another site would; and where there is a
key, without it, with its body announced and held back. All but the first cost no generation, which is the
dearest part.
"""

import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psutil
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, reject, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core import NotSet
from schemathesis.core.errors import InvalidSchema

from benchmarks.server_fuzz.messages import FIELDS_OF_FRAMING, Answer, Sent
from benchmarks.server_fuzz.target import (
    FOREIGN,
    KEY,
    SECRETS,
    Target,
    faults,
    faults_of_foreign,
    faults_without_key,
)

BATCH = 250
"""Cases of one seed; hypothesis remembers all of a batch."""
BETWEEN_RESTORES = 20
MAX_FAULTS = 20
MAX_GROWTH_MIB = 150
"""How much the process that makes requests and answers them may grow from a tenth of a job to its end."""
WRONG_KEYS = (
    *(b"", b"wrong", KEY[:-1].encode(), KEY.encode() + b"x", KEY.upper().encode(), b"\xff\xfe"),
    *(b"\xc3\xa9", b" ", b"null", b"x" * 5000),
)
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW")
_TYPES = (b"text/plain", b"application/json; charset=utf-16", b"multipart/form-data; boundary=x", b"\xff")
_BODIES = (b"{", b"[" * 5000, b"null", b'"\\ud800"', b"{}" * 3, b'{"a":NaN}', b"1e999", b"\xff\xfe\x00", b"")
Serve = Callable[[Path, str | None], AbstractAsyncContextManager[Target]]


@dataclass
class Found:
    """What came of a job.

    Attributes:
        requests: that were sent; ``cases`` of them as schemathesis made them.
        grown_mib: from a tenth of the job on.
        faults: what was wrong, with the request.
    """

    requests: int = 0
    cases: int = 0
    seconds: float = 0.0
    grown_mib: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def hunt(serve: Serve, keyed: bool, number: int, requests: int) -> Found:
    """Asks a server so many times.

    Args:
        number: of the job: the seed of its cases.
    """
    os.environ |= SECRETS
    found, start = Found(), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as folder,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        asyncio.Runner() as runner,
    ):
        serving = serve(Path(folder), KEY if keyed else None)
        target = runner.run(serving.__aenter__())
        try:
            _Hunter(target, runner, random.Random(number), found).run(number, requests)
        finally:
            runner.run(serving.__aexit__(None, None, None))
    found.seconds = round(time.monotonic() - start, 1)
    return found


class _Hunter:
    """Sends cases, and notes what is wrong with their answers."""

    def __init__(self, target: Target, runner: asyncio.Runner, draw: random.Random, found: Found) -> None:
        self._target, self._runner, self._draw, self._found = target, runner, draw, found
        self._paths = [path for path in target.document["paths"] if "{" not in path]
        self._memory: float | None = None

    @property
    def ended(self) -> bool:
        return len(self._found.faults) >= MAX_FAULTS

    def run(self, number: int, requests: int) -> None:
        """Batch after batch, and at last a right request."""
        cases, found = _cases(self._target.document), self._found
        self._require_right()
        batch = 0
        while found.requests < requests and not self.ended:
            self._run_batch(cases, number * 1_000_003 + batch, requests)
            batch += 1
            if self._memory is None and found.requests >= requests // 10:
                self._memory = _resident_mib()
        self._require_right()
        if self._memory is not None:
            found.grown_mib = round(_resident_mib() - self._memory, 1)
            if found.grown_mib > MAX_GROWTH_MIB:
                found.faults.append(
                    f"memory grew by {found.grown_mib} MiB (wanted: {MAX_GROWTH_MIB} at most)"
                )

    def _run_batch(self, cases: st.SearchStrategy[Sent], number: int, requests: int) -> None:
        @seed(number)
        @settings(
            max_examples=BATCH,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(cases)
        def each(sent: Sent) -> None:
            if self._found.requests < requests and not self.ended:
                self._runner.run(self._send_all(sent))

        each()

    async def _send_all(self, sent: Sent) -> None:
        target, found = self._target, self._found
        if target.skips(sent):
            return
        found.cases += 1
        await target.prepare(sent)
        self._note(sent, faults, await self._asked(target.keyed(sent)))
        damaged = self._damaged(sent)
        if self._draw.random() < 0.1:
            foreign = replace(target.keyed(sent), headers=(*target.keyed(sent).headers, FOREIGN))
            self._note(foreign, faults_of_foreign, await self._asked(foreign))
        elif not target.skips(damaged):
            await self._send_damaged(target.keyed(damaged))
        if target.key is not None:
            wrong = self._draw.choice(WRONG_KEYS)
            bare = target.showing(sent, wrong) if self._draw.random() < 0.8 else target.hiding(sent)
            if target.holds and not target.opened(bare):
                bare = replace(bare, whole=not bare.body)
            self._note(bare, faults_without_key, await self._asked(bare))
        if found.cases % BETWEEN_RESTORES == 0:
            await target.restore()

    async def _send_damaged(self, sent: Sent) -> None:
        if self._target.loopback is not None and sent.body and self._draw.random() < 0.05:
            self._found.requests += 1
            await self._target.loopback.break_off(sent)
        else:
            self._note(sent, faults, await self._asked(sent))

    def _damaged(self, sent: Sent) -> Sent:
        """The request with one thing about it wrong."""
        draw, body = self._draw, sent.body
        place = draw.randrange(len(body) + 1)
        ways: tuple[Callable[[], Sent], ...] = (
            lambda: replace(sent, body=body[:place]),
            lambda: replace(sent, body=body[:place] + bytes([draw.randrange(256)]) + body[place + 1 :]),
            lambda: replace(sent, body=body[:place] + body[place // 2 :]),
            lambda: replace(sent, body=draw.choice(_BODIES)),
            lambda: replace(sent, method=draw.choice(_METHODS)),
            lambda: replace(sent, target=draw.choice(self._paths)),
            lambda: sent.showing(b"content-type", draw.choice(_TYPES)),
        )
        return draw.choice(ways)()

    async def _asked(self, sent: Sent) -> Answer:
        self._found.requests += 1
        answer = await self._target.answer(sent)
        self._found.statuses[answer.status] += 1
        return answer

    def _note(self, sent: Sent, wrong: Callable[[Target, Sent, Answer], list[str]], answer: Answer) -> None:
        for fault in wrong(self._target, sent, answer):
            self._found.faults.append(f"{fault}: {sent}: {answer.body!r:.300}")

    def _require_right(self) -> None:
        """Notes if a right request is not answered rightly."""
        sent = self._target.keyed(self._target.right)

        async def asked() -> Answer:
            await self._target.restore()
            return await self._asked(sent)

        answer = self._runner.run(asked())
        try:
            right = self._target.wanted(answer)
        except (ValueError, LookupError, TypeError):
            right = False
        if not right:
            self._found.faults.append(f"a right request is not answered: {sent}: {answer!r:.500}")


def _cases(document: Mapping[str, Any]) -> st.SearchStrategy[Sent]:
    """Requests for all operations, those that keep to the document and those that do not."""
    made = list(_strategies(document))

    @st.composite
    def case(draw: st.DrawFn) -> Sent:
        try:
            return draw(made[draw(st.integers(0, len(made) - 1))])
        except InvalidSchema:  # one of its ways to break a schema has led to what nothing fulfils
            reject()

    return case()


def _strategies(document: Mapping[str, Any]) -> Iterator[st.SearchStrategy[Sent]]:
    schema = schemathesis.openapi.from_dict(dict(document))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            asks = schema[path][method.upper()]
            yield asks.as_strategy(generation_mode=GenerationMode.POSITIVE).map(partial(sent_of, keeps=True))
            if operation["parameters"] or "requestBody" in operation:
                yield asks.as_strategy(generation_mode=GenerationMode.NEGATIVE).map(sent_of)


def sent_of(case: Case, keeps: bool = False) -> Sent:
    """The request that a case is.

    Args:
        keeps: to the document, in which 2.0 is an integer; servers that want one take it as 2 alone.
    """
    query = urlencode({name: _plain(value) for name, value in dict(case.query or {}).items()}, doseq=True)
    path = quote(case.formatted_path, safe="/%:@!$&'()*+,;=~-._")
    heads = [(_ascii(name).lower(), _ascii(value)) for name, value in dict(case.headers or {}).items()]
    kind = [(b"content-type", case.media_type.encode())] if case.media_type else []
    kept = tuple(pair for pair in (*kind, *heads) if pair[0] not in FIELDS_OF_FRAMING)
    body = case.body
    if isinstance(body, NotSet):
        raw = b""
    elif isinstance(body, bytes):
        raw = body
    else:
        raw = json.dumps(_with_integers(body) if keeps else body, default=str).encode()
    return Sent(str(case.method).upper(), f"{path}?{query}" if query else path, kept, raw)


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_integers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_integers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: Any) -> Any:
    return value if isinstance(value, list | tuple | str) else json.dumps(value, default=str)


def _ascii(value: Any) -> bytes:
    return bytes(byte for byte in str(value).encode("latin-1", "replace") if byte not in b"\r\n\0")


def _resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20
