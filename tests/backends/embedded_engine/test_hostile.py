"""What no sane client sends: none of it may take the engine's time, memory or life."""

import asyncio
import socket
import time
from types import SimpleNamespace

import httpx
import pytest
import torch
import uvicorn
from pydantic import ValidationError

from slime.backends.embedded_engine import __main__ as entry_point
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http import prompts, weight_routes
from slime.backends.embedded_engine.http.app import create_app
from slime.backends.embedded_engine.http.bodies import Body, GenerateBody
from slime.backends.embedded_engine.http.streaming import _possible_stop
from slime.backends.embedded_engine.sampling_params import check_pattern
from slime.backends.embedded_engine.stopping import StopChecker
from slime.backends.embedded_engine.weight_groups import WeightGroups
from slime.utils.http_utils import HttpStatusError
from tests.backends.embedded_engine.test_scheduler import make_state, sequence


def within(seconds: float, function, *args, **kwargs):
    """Calls a function within so many seconds of processor time: others may keep the machine busy."""
    started = time.thread_time()
    result = function(*args, **kwargs)
    assert time.thread_time() - started < seconds
    return result


def asks(state) -> httpx.AsyncClient:
    """A client of the application itself, without a server around it."""
    transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{state.args.host}")


def test_a_list_of_wrong_entries_is_refused_at_its_first():
    for kind in Body.__subclasses__():
        for name, field in kind.model_fields.items():
            if "list" in str(field.annotation) and name != "messages":
                with pytest.raises(ValidationError) as caught:
                    kind.model_validate({name: [object()] * 1000})
                assert caught.value.error_count() < 10, (kind, name)


def test_too_many_prompts_are_refused_before_any_work(checkpoint, monkeypatch):
    state = make_state(checkpoint)
    monkeypatch.setattr(prompts, "parse_sampling_params", lambda *_: pytest.fail("too late"))
    with pytest.raises(BadRequest, match="responses in one request"):
        prompts.make_generation(state, GenerateBody(input_ids=[[1]] * (prompts.MAX_SEQUENCES + 1)))


def test_an_error_does_not_send_back_what_it_was_sent(shared_server):
    answer = shared_server.post("/generate", input_ids=[1], sampling_params={"stop": [1] * 100_000})
    assert answer.status_code == 400 and "stop" in answer.text and len(answer.content) < 3000


@pytest.mark.parametrize(
    "pattern", ["(?:a{1000}){1000}", "(((a{30}){30}){30}){30}", "(?:){9999}", "a{5000,}b"]
)
def test_a_pattern_that_compiles_to_something_huge_is_refused(pattern):
    with pytest.raises(BadRequest, match="written out"):
        within(1, check_pattern, pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        "[(){9999}]x",
        r"\({3}",
        "a{0,9999}",
        "(?:ab{20}){20}",
    ],
)
def test_ordinary_repeats_are_no_danger(pattern):
    check_pattern(pattern)


def test_a_long_stop_string_is_found_and_costs_no_more_than_the_text(checkpoint):
    class OneLetter:
        eos_token_id = None

        def decode(self, ids, skip_special_tokens=True):
            return "a" * len(ids)

    stops = StopChecker(frozenset(), OneLetter())
    response = sequence("x", [1], stop=("a" * 5000,), max_new_tokens=9999)
    response.output_ids = [1] * 5000
    assert stops.reason(response, 1) == {"type": "stop", "matched": "a" * 5000}
    assert within(0.5, _possible_stop, "xab", ("ab" * 5_000_000,)) == 2


@pytest.mark.parametrize("start", [63, 80])
def test_log_probs_of_a_part_that_was_cut_off_are_refused(checkpoint, start):
    state = make_state(checkpoint, context_length=64, allow_auto_truncate=True)
    body = {"input_ids": [1] * 100, "return_logprob": True, "sampling_params": {"max_new_tokens": 5}}
    generation = prompts.make_generation(state, GenerateBody(**body, logprob_start_len=62))
    assert generation.sequences[0].logprob_options.prompt_start == 62
    options = lambda: prompts.make_generation(state, GenerateBody(**body, logprob_start_len=start))
    if start == 63:  # all of the prompt, so none of its log-probs
        assert options().sequences[0].logprob_options.prompt_start is None
    else:
        with pytest.raises(BadRequest, match="logprob_start_len 80"):
            options()


async def test_nan_logits_are_no_error_to_try_again(checkpoint):
    state = make_state(checkpoint)
    state.parameters.named["model.norm.weight"].fill_(float("nan"))
    state.engine.start(asyncio.get_running_loop())
    async with asks(state) as client:
        answer = await client.post("/generate", json={"input_ids": [1, 2]})
    state.engine.stop()
    assert "NaN" in answer.json()["error"]["message"]
    assert not HttpStatusError("POST", "/generate", answer.status_code, answer.text).retryable


async def test_the_connection_ends_with_an_answer_after_which_the_server_closes_it(checkpoint, monkeypatch):
    state = make_state(checkpoint)
    monkeypatch.setattr(state.engine, "run", lambda *_: 1 // 0)
    async with asks(state) as client:
        answer = await client.get("/server_info")
    assert answer.status_code == 500 and answer.headers["connection"] == "close"


async def test_any_failure_to_join_a_group_is_told():
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(weight_routes._in_daemon_thread("test", lambda: 1 // 0), 60)


def test_the_name_of_a_group_is_taken_once():
    groups = WeightGroups(torch.device("cpu"))
    groups._groups["weights"] = object()
    with pytest.raises(BadRequest, match="group 'weights' exists already"):
        groups.join("127.0.0.1", 9, 1, 2, "weights", "gloo")


async def test_termination_does_not_wait_for_an_engine_that_waits_for_a_dead_trainer(monkeypatch):
    async def shutdown(*_):
        pass

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    monkeypatch.setattr(entry_point, "_DRAIN_SECONDS", 0.1)
    never = asyncio.get_running_loop().create_future()
    engine = SimpleNamespace(
        paused=None, released=set(), updating=True, abort_to_shut_down=None, run=lambda _: never
    )
    server = entry_point._DrainingServer(uvicorn.Config(lambda: None), engine)
    await asyncio.wait_for(server.shutdown(), 60)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(shared_server):
    url = httpx.URL(shared_server.url)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"text"')
        time.sleep(0.2)
    assert shared_server.client.get("/server_info").status_code == 200
    assert "ClientDisconnect" not in shared_server.report()


def test_all_of_several_stop_strings_are_looked_for_in_as_much_text_as_they_need():
    class Letters:
        eos_token_id = None

        def decode(self, ids, skip_special_tokens=True):
            return "".join(map(chr, ids))

    stops, long = StopChecker(frozenset(), Letters()), "b" + "a" * 4999
    response = sequence("x", [1], stop=("z", long), max_new_tokens=9999)
    response.output_ids = [*map(ord, long)]
    assert stops.reason(response, 1) == {"type": "stop", "matched": long}
