"""What the router believes that workers have cached, and whom it sends a prompt for that."""

import random
from collections import Counter

import orjson
import pytest

from slime.router.pool import Worker, WorkerKind, WorkerPool
from slime.router.prefixes import BLOCK_BYTES, CacheAware, Prompt, SentPrefixes, prompt_of
from slime.router.settings import CacheAwareSettings
from tests.router.conftest import served

BLOCK = BLOCK_BYTES // 4
URLS = [f"http://10.0.0.{number}:1" for number in range(3)]


def asked(**body) -> Prompt:
    prompt = prompt_of(orjson.dumps(body))
    assert prompt is not None
    return prompt


def of_tokens(ids: list[int]) -> Prompt:
    return asked(input_ids=ids)


def shared(first: Prompt, second: Prompt) -> int:
    """How many blocks two prompts begin with."""
    sent = SentPrefixes(10_000)
    sent.add(first.blocks)
    return sent.matched(second.blocks)


def settings(**changes) -> CacheAwareSettings:
    usual = dict(cache_threshold=0.5, balance_abs_threshold=4, balance_rel_threshold=1.5, max_tree_size=2**20)
    return CacheAwareSettings(**{**usual, **changes})


def pool_of(*urls: str, counts: Counter[str] | None = None, **changes) -> WorkerPool:
    pool = WorkerPool(3, CacheAware(settings(**changes), Counter() if counts is None else counts))
    for url in urls:
        pool.report(pool.add(url), None, 1)
    return pool


def related(rng: random.Random, known: list[list[int]]) -> list[int]:
    """A prompt that often begins as one of those that are known."""
    start = rng.choice(known) if known and rng.random() < 0.8 else []
    start = start[: rng.randrange(len(start) + 1)]
    return start + [rng.randrange(3) for _ in range(rng.randrange(1, 120))]


def common(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("seed", range(20))
def test_a_match_is_the_longest_common_prefix_in_whole_blocks(seed: int) -> None:
    rng, sent, known = random.Random(seed), SentPrefixes(10_000), []
    for _ in range(60):
        ids = related(rng, known)
        longest = max((common(ids, other) for other in known), default=0)
        prompt = of_tokens(ids)
        assert sent.matched(prompt.blocks) == longest // BLOCK
        sent.add(prompt.blocks)
        known.append(ids)


@pytest.mark.parametrize("seed", range(20))
def test_what_was_used_last_stays_with_all_that_is_before_it(seed: int) -> None:
    rng, most, sent, known, used = random.Random(seed), 30, SentPrefixes(30), [], {}
    for clock in range(150):
        ids = related(rng, known)
        known.append(ids)
        sent.add(of_tokens(ids).blocks)
        for end in range(BLOCK, min(len(ids), most * BLOCK) + 1, BLOCK):
            used[tuple(ids[:end])] = (clock, -end)
        kept = sorted(used, key=used.__getitem__)[-most:]
        assert len(sent) == len(kept) <= most
        for other in rng.sample(known, min(5, len(known))):
            expected = max((len(k) for k in kept if tuple(other[: len(k)]) == k), default=0)
            assert sent.matched(of_tokens(other).blocks) == expected // BLOCK


def test_what_engines_cache_apart_is_apart() -> None:
    ids, text = list(range(48)), "abcd" * 48
    assert shared(asked(input_ids=ids), asked(input_ids=ids, sampling_params={"n": 1})) == 3
    assert shared(asked(input_ids=ids), asked(input_ids=ids, lora_path="a")) == 0
    assert shared(asked(text=text), asked(text=text, extra_key="b")) == 0
    assert shared(asked(text=text), asked(prompt=text + "e")) == 3
    said = list(text.encode())
    assert shared(asked(text=text), asked(input_ids=said)) == 0


def test_a_conversation_begins_as_it_did_a_turn_before() -> None:
    first = [{"role": "user", "content": "What is it? " * 20}]
    more = [*first, {"role": "assistant", "content": "That."}, {"role": "user", "content": "And that?"}]
    before, after = asked(messages=first), asked(messages=more)
    assert shared(before, after) == len(before.blocks) > 3
    tools = [{"type": "function"}]
    assert shared(asked(messages=first, tools=tools), before) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"{}",
        b'{"input_ids": [[1, 2], [3]]}',
        b'{"input_ids": [1.5]}',
        b'{"input_ids": [-1]}',
        b'{"input_ids": [4294967296]}',
        b'{"input_ids": {"a": 1}}',
        b'{"text": ["a", "b"]}',
        b'{"text": 5}',
    ],
)
def test_of_anything_else_nothing_is_known(body: bytes) -> None:
    assert prompt_of(body) is None


def test_a_prompt_goes_where_it_is_cached_and_others_to_the_least_loaded() -> None:
    counts: Counter[str] = Counter()
    pool = pool_of(*URLS, counts=counts)
    prompts = [of_tokens([number] * 64) for number in range(7)]
    first = [pool.choose(None, prompt=prompt) for prompt in prompts]
    assert [worker.url for worker in first] == [*URLS, *URLS, URLS[0]]
    assert (counts["prompt_bytes"], counts["known_bytes"]) == (7 * 256, 0)
    assert [pool.choose(None, prompt=prompt) for prompt in prompts] == first
    assert (counts["prompt_bytes"], counts["known_bytes"]) == (14 * 256, 7 * 256)


@pytest.mark.parametrize(("length", "same"), [(63, True), (64, False), (65, False)])
def test_a_match_has_to_be_above_the_threshold(length: int, same: bool) -> None:
    pool = pool_of(*URLS[:2])
    first = pool.choose(None, prompt=of_tokens([1] * 32))
    again = pool.choose(None, prompt=of_tokens([1] * 32 + [2] * (length - 32)))
    assert (again is first) == same


@pytest.mark.parametrize(
    ("loads", "same"), [((9, 5), True), ((10, 5), False), ((14, 10), True), ((15, 10), True)]
)
def test_loads_are_balanced_first(loads: tuple[int, int], same: bool) -> None:
    pool, prompt = pool_of(*URLS[:2]), of_tokens([1] * 64)
    first, other = pool.choose(None, prompt=prompt), pool.get(URLS[1])
    first.in_flight, other.in_flight = loads
    assert pool.choose(None, prompt=prompt) is (first if same else other)


def test_of_several_that_have_it_the_least_loaded_gets_it() -> None:
    pool, prompt = pool_of(*URLS), of_tokens([1] * 64)
    first = pool.choose(None, prompt=prompt)
    second = pool.choose(None, [first], prompt=prompt)
    first.in_flight, second.in_flight = 2, 1
    assert pool.choose(None, prompt=prompt) is second


def test_a_session_stays_and_what_it_sends_is_cached_too() -> None:
    pool = pool_of(*URLS)
    at = {session: pool.choose(session).url for session in "abcdefgh"}
    assert len(set(at.values())) > 1
    one = of_tokens([1] * 64)
    assert {session: pool.choose(session, prompt=one).url for session in at} == at
    assert pool.choose("a", prompt=of_tokens([3] * 64)).url == at["a"]
    assert pool.choose(None, prompt=of_tokens([3] * 64)).url == at["a"]


def chosen_twice(pool: WorkerPool, prompt: Prompt) -> Worker:
    first = pool.choose(None, prompt=prompt)
    assert pool.choose(None, prompt=prompt) is first
    return first


def quarantine(pool: WorkerPool, worker: Worker) -> None:
    for _ in range(3):
        pool.report(worker, "no answer", None)


@pytest.mark.parametrize(
    "empties",
    [
        lambda pool, worker: pool.report(worker, None, 2),
        lambda pool, worker: pool.refused(worker),
        lambda pool, worker: pool.remove(worker.url),
        quarantine,
    ],
)
def test_what_a_worker_has_no_more_is_forgotten(empties) -> None:
    pool, prompt = pool_of(*URLS[:2]), of_tokens([1] * 64)
    worker = chosen_twice(pool, prompt)
    assert pool.report(worker, None, 1) is False and pool._prefixes._matched(worker.id, prompt)
    empties(pool, worker)
    assert not pool._prefixes._sent


def test_another_process_forgets_what_it_is_told_to() -> None:
    parent, child = WorkerPool(3), pool_of()
    for url in URLS[:2]:
        parent.report(parent.add(url), None, 1)
    prompt = of_tokens([1] * 64)

    def sent() -> set[str]:
        child.apply(parent.table())
        return set(child._prefixes._sent)

    sent()
    worker = chosen_twice(child, prompt)
    assert sent() == {worker.id}
    parent.report(parent.get(worker.url), None, 2)
    assert sent() == set()
    worker = chosen_twice(child, prompt)
    assert sent() == {worker.id}
    parent.remove(worker.url)
    assert sent() == set()


def test_of_halves_the_one_that_prefills_is_chosen_by_what_it_has() -> None:
    pool = pool_of()
    for url in URLS:
        pool.report(pool.add(url, kind=WorkerKind.PREFILL), None, 1)
    prompt = of_tokens([1] * 64)
    first = pool.choose(None, kind=WorkerKind.PREFILL, prompt=prompt)
    assert pool.choose(None, kind=WorkerKind.PREFILL, prompt=prompt) is first


async def test_a_router_sends_a_prompt_back_until_its_engine_is_gone_or_updated(start_engine) -> None:
    engines = [start_engine(), start_engine()]
    ids = list(range(100))

    def asked_of_each() -> list[int]:
        return [len(engine.seen("generate")) for engine in engines]

    async with served(router_policy="cache_aware") as router:
        await router.add(*engines)
        for _ in range(4):
            assert (await router.post("/generate", input_ids=ids, sampling_params={}))[0] == 200
        assert sorted(asked_of_each()) == [0, 4]
        async with router.client.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        assert "slime_router_prompt_bytes_total 1600" in lines
        assert "slime_router_known_bytes_total 1152" in lines, "three times six blocks"
        first = max(engines, key=lambda engine: len(engine.seen("generate")))
        first.stop()
        assert (await router.post("/generate", input_ids=ids, sampling_params={}))[0] == 200
        assert sorted(asked_of_each()) == [1, 4]
        (other,) = [engine for engine in engines if engine is not first]
        (known,) = router.router.pool._prefixes._sent
        assert router.router.pool.get(known).url == other.url
