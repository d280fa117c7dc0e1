"""Pages of metrics of other servers, in Prometheus's text format, as parts of one page.

page = MetricsPage("http://127.0.0.1:15000/metrics", {"model": "default", "engine": "0"})
(text,) = fetched([page], api_key)
merged("slime_step 3", [(page.labels, text)])
"""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

_TIMEOUT_S = 2.0  # for each, and all are asked at once
_LONGEST = 2**25  # bytes of one
_FORMAT = "text/plain;version=0.0.4"
_OF_PROCESSES = ("process_", "python_")

_NAME, _LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"'
_LABELS = r'(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*"(?:, *|(?=})))*'
_VALUE = r"[-+]?(?:[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?|Inf|NaN)"
_COMMENT = re.compile(rf"# (HELP|TYPE) ({_NAME})(?: (.*))?")
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABELS})\}})? +({_VALUE})(?: +-?[0-9]+)?\s*")
_PARTS = {
    **dict.fromkeys(("counter", "gauge", "untyped"), ("",)),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count", ""),
}
"""How samples of a family may be called, behind its name, by its type."""


@dataclass(frozen=True)
class MetricsPage:
    """Where a server shows its metrics, and by which labels they are told from those of others."""

    url: str
    labels: Mapping[str, str]


def fetched(pages: Sequence[MetricsPage], api_key: str | None = None) -> list[str | None]:
    """The text of each page; None for one that cannot be had within seconds.

    Args:
        api_key: that the servers ask for, if they do.
    """
    headers = {"Accept": _FORMAT} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    return asyncio.run(_fetched(pages, headers))


async def _fetched(pages: Sequence[MetricsPage], headers: Mapping[str, str]) -> list[str | None]:
    import aiohttp  # late: who says where pages are does without

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        found = (_text(session, page.url) for page in pages)
        texts = await asyncio.gather(*found, return_exceptions=True)
    for text in texts:
        if isinstance(text, BaseException) and not isinstance(
            text, aiohttp.ClientError | OSError | ValueError
        ):
            raise text
    return [text if isinstance(text, str) else None for text in texts]


async def _text(session: "aiohttp.ClientSession", url: str) -> str:
    """
    Raises:
        ValueError: it is no page, or too long for one.
        aiohttp.ClientError, OSError: it cannot be had.
    """
    async with session.get(url, allow_redirects=False) as answer:  # another place would get the key
        if answer.status != 200:
            raise ValueError(f"{url}: HTTP {answer.status}")
        body = bytearray()
        async for part in answer.content.iter_any():
            body += part
            if len(body) > _LONGEST:
                raise ValueError(f"{url}: over {_LONGEST} bytes")
        return body.decode()


def sample(name: str, labels: str, value: object) -> str:
    """A line of a page."""
    return f"{name}{{{labels}}} {value}\n" if labels else f"{name} {value}\n"


def written(labels: Mapping[str, str]) -> str:
    """Labels as they stand in a line."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def merged(own: str, others: Iterable[tuple[Mapping[str, str], str]]) -> str:
    """One page of several, in which each family has one type and one text about it.

    Left out are what is no sample, families that another page has with another type, and what the others
    say of their processes.

    Args:
        others: their labels, which their samples get, and their text. A label of theirs that has the name of
            one of these becomes ``exported_NAME``, as Prometheus has it.
    """
    families: dict[str, _Family] = {}
    _Reader(families, {}).read(own)
    for labels, text in others:
        _Reader(families, labels, _OF_PROCESSES).read(text)
    return "".join(family.text(name) for name, family in families.items())


@dataclass
class _Family:
    kind: str = ""
    about: str = ""
    samples: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        about = f"# HELP {name} {self.about}\n" if self.about else ""
        return f"{about}# TYPE {name} {self.kind or 'untyped'}\n{''.join(self.samples)}"


class _Reader:
    """Adds a page to families."""

    def __init__(
        self, families: dict[str, _Family], labels: Mapping[str, str], without: tuple[str, ...] = ()
    ) -> None:
        self._families, self._labels, self._without = families, labels, without
        self._added = written(labels)
        self._kinds: dict[str, str] = {}  # of this page

    def read(self, page: str) -> None:
        for line in page.split("\n"):
            if line.startswith(self._without):
                continue
            if (found := _COMMENT.fullmatch(line)) and not found[2].startswith(self._without):
                self._comment(found[1], found[2], (found[3] or "").strip())
            elif found := _SAMPLE.fullmatch(line):
                self._sample(found[1], found[2] or "", found[3])

    def _comment(self, what: str, name: str, text: str) -> None:
        family = self._families.setdefault(name, _Family())
        if what == "HELP":
            family.about = family.about or text
        elif text in _PARTS:
            self._kinds[name] = text
            if not family.samples:
                family.kind = family.kind or text

    def _sample(self, name: str, labels: str, value: str) -> None:
        of = next((base for base in _bases(name) if self._has_part(base, name)), name)
        family = self._families.setdefault(of, _Family())
        if self._kinds.get(of, "untyped") == (family.kind or "untyped") and self._has_part(of, name):
            family.samples.append(sample(name, self._with_added(labels), value))

    def _has_part(self, family: str, name: str) -> bool:
        return name.removeprefix(family) in _PARTS[self._kinds.get(family, "untyped")]

    def _with_added(self, labels: str) -> str:
        own = labels.rstrip(", ")
        if any(f"{name}=" in own for name in self._labels):
            pairs = re.findall(_LABEL, own)
            own = ",".join(f'{"exported_" * (name in self._labels)}{name}="{value}"' for name, value in pairs)
        return ",".join(part for part in (self._added, own) if part)


def _bases(name: str) -> list[str]:
    """Names of families of which a sample of this name may be a part, beside that of its own."""
    return [name.removesuffix(end) for end in ("_bucket", "_sum", "_count") if name.endswith(end)]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
