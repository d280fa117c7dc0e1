"""What routes share: seeds of noise, when a grammar begins to hold, and what is done beside the loop."""

import threading
from dataclasses import fields
from types import SimpleNamespace

import pytest

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http import state as state_module
from slime.backends.embedded_engine.http.state import ServerState


def state_with(tokenizer=None, grammars=None, **flags):
    names = [field.name for field in fields(ServerState) if field.name not in ("started_at", "live_rids")]
    args = EmbeddedServerArgs(model_path="m", **flags)
    return ServerState(**{**dict.fromkeys(names), "args": args, "tokenizer": tokenizer, "grammars": grammars})


def test_a_response_has_the_seed_of_its_request_and_its_number():
    state = state_with()
    assert [state.noise_seed(5, sample) for sample in (0, 1, 2)] == [5, 6, 7]
    assert state.noise_seed(-1, 0) == 2**64 - 1 and state.noise_seed(2**64 - 1, 1) == 0
    fixed = state_with(enable_deterministic_inference=True)
    assert [fixed.noise_seed(None, sample) for sample in (0, 1)] == [42, 43] and fixed.noise_seed(7, 1) == 8


def test_without_a_seed_each_response_has_its_own_which_the_servers_seed_decides():
    def seeds(seed):
        state = state_with(random_seed=seed)
        return [state.noise_seed(None, 0) for _ in range(20)]

    assert seeds(3) == seeds(3) and not {*seeds(3)} & {*seeds(4)} and len({*seeds(3)}) == 20
    assert all(0 <= seed < 2**64 for seed in seeds(3)) and max(seeds(3)) >= 2**63


class Grammars:
    async def compiled(self, wanted):
        return f"compiled {wanted}"


@pytest.fixture
def constraints(monkeypatch):
    monkeypatch.setattr(state_module, "Constraint", lambda compiled, after: (compiled, after))


def response(grammar):
    return SimpleNamespace(params=SimpleNamespace(grammar=grammar), constraint=None)


class Words:
    """A tokenizer with the ids of the end of reasoning."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return {"</think>": [7, 8], "◁/think▷": [9]}[text]


@pytest.mark.parametrize(
    ("parser", "reasons", "after"),
    [("qwen3", True, (7, 8)), ("kimi", True, (9,)), ("qwen3", False, ()), (None, True, ())],
)
async def test_a_grammar_holds_from_the_start_or_once_reasoning_has_ended(
    constraints, parser, reasons, after
):
    responses = [response("json"), response(None), response("regex")]
    state = state_with(Words(), Grammars(), reasoning_parser=parser)
    await state.constrain(responses, reasons)
    assert [one.constraint for one in responses] == [
        ("compiled json", after),
        None,
        ("compiled regex", after),
    ]
    held = [response("json")]
    await state.constrain(held)
    assert held[0].constraint == ("compiled json", ())


async def test_without_a_tokenizer_there_are_no_grammars(constraints):
    state = state_with(reasoning_parser="qwen3")
    with pytest.raises(BadRequest, match="grammars: the server runs with --skip-tokenizer-init"):
        await state.constrain([response("json")])
    await state.constrain([response(None)])
    held = [response("json")]
    await state_with(None, Grammars(), reasoning_parser="qwen3").constrain(held, reasons=True)
    assert held[0].constraint == ("compiled json", ())


async def test_what_takes_long_is_done_beside_the_loop():
    state, here = state_with(), threading.current_thread()
    quick = ["x" * 10_000, [[0] * 9_999, [0]], None, ""]
    long = ["x" * 10_001, [[0] * 10_000, [0]]]
    assert [await state.beside(threading.current_thread, material) for material in quick] == [here] * 4
    threads = [await state.beside(threading.current_thread, material) for material in long]
    threads.append(await state.aside(threading.current_thread, 10_001))
    assert here not in threads and len(set(threads)) == 1 and threads[0].name.startswith("tokenizer")
    assert await state.aside(threading.current_thread, 10_000) is here
