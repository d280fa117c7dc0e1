"""Which worker has most of a prompt in its prefix cache, going by what each of them was sent.

A prompt is cut into blocks of 16 tokens, or of 64 bytes of text, each named by a hash of it and of all
before it. What a worker was sent is a set of such names: a tree of prefixes, without the nodes. What follows
the last whole block is left out.
"""

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slime.router.settings import CacheAwareSettings

BLOCK_BYTES = 64
TOKEN_BYTES = array("I").itemsize
_PROMPTS = ("input_ids", "text", "prompt", "messages")
_APART = ("lora_path", "extra_key")
"""Engines share no cache between requests that differ in these."""


@dataclass(frozen=True)
class Prompt:
    """What routing needs of a prompt.

    Attributes:
        blocks: the name of each whole block, from the first.
        size: bytes, those after the last whole block included.
    """

    blocks: Sequence[int]
    size: int


def prompt_of(body: bytes) -> Prompt | None:
    """The prompt of a request; None where it has several, or something is wrong with it."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(asked, dict):
        return None
    name = next((name for name in _PROMPTS if asked.get(name)), None)
    data = None if name is None else _bytes_of(asked, name)
    if data is None:
        return None
    before = hash((type(asked[name]), *(repr(asked.get(apart)) for apart in _APART)))
    blocks = []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        before = hash((before, data[start : start + BLOCK_BYTES]))
        blocks.append(before)
    return Prompt(blocks, len(data))


def _bytes_of(asked: Mapping[str, Any], name: str) -> bytes | None:
    """Bytes of which two prompts share as many as they share tokens, messages or text."""
    found = asked[name]
    if isinstance(found, str):
        return found.encode(errors="replace")
    if not isinstance(found, list):
        return None
    if name == "messages":
        return orjson.dumps(asked.get("tools")) + orjson.dumps(found).removesuffix(b"]")
    try:
        return array("I", found).tobytes()
    except (TypeError, OverflowError):
        return None


class SentPrefixes:
    """The prefixes that one worker was sent, those that were used last.

    With a block, all before it are in here: each has been used since the one after it, which leaves first. So
    the longest prefix of n blocks is found in O(log n), and one is added in O(n).

    Args:
        most: blocks; each takes some 150 bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()  # the latest used last

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's blocks are in here."""
        return bisect_left(blocks, True, key=lambda block: block not in self._blocks)

    def add(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks[: self._most]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


class CacheAware:
    """Chooses by what is cached while loads are balanced. Workers go by their ids.

    Args:
        counts: gets ``prompt_bytes``, and ``known_bytes`` that the worker of a prompt was sent before.
    """

    def __init__(self, settings: CacheAwareSettings, counts: Counter[str]) -> None:
        self._settings, self._counts = settings, counts
        self._sent: dict[str, SentPrefixes] = {}

    def choose(self, prompt: Prompt, loads: Mapping[str, int]) -> str | None:
        """The worker with the longest prefix; None where the one with the fewest requests should have it.

        Args:
            loads: requests in flight of each worker to choose from; of several with the same prefix the one
                with the fewest is taken, and of those the first.
        """
        settings, fewest, most = self._settings, min(loads.values()), max(loads.values())
        if most - fewest > settings.balance_abs_threshold and most > fewest * settings.balance_rel_threshold:
            return None
        matches = {worker: self._matched(worker, prompt) for worker in loads}
        best = max(loads, key=lambda worker: (matches[worker], -loads[worker]))
        return best if matches[best] * BLOCK_BYTES > settings.cache_threshold * prompt.size else None

    def sent(self, worker: str, prompt: Prompt) -> None:
        """A worker is being sent a prompt."""
        self._counts["prompt_bytes"] += prompt.size
        self._counts["known_bytes"] += self._matched(worker, prompt) * BLOCK_BYTES
        if worker not in self._sent:
            self._sent[worker] = SentPrefixes(self._settings.max_tree_size // BLOCK_BYTES)
        self._sent[worker].add(prompt.blocks)

    def forget(self, worker: str) -> None:
        """A worker's cache is empty now, or the worker is gone."""
        self._sent.pop(worker, None)

    def _matched(self, worker: str, prompt: Prompt) -> int:
        sent = self._sent.get(worker)
        return 0 if sent is None else sent.matched(prompt.blocks)
