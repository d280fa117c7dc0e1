import asyncio
import json
import pickle

import httpcore
import httpx
import pytest
from fastapi.responses import JSONResponse, StreamingResponse

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.utils.http_utils import http_url
from slime.utils.types import EngineEndpoint
from tests.each import hold_each
from tests.engines import free_port


def endpoint(url: str, api_key: str | None = None) -> EngineEndpoint:
    return EngineEndpoint(url=url, api_key=api_key, num_gpus=1, gpu_offset=None)


@pytest.fixture
def client(fake_engine):
    client = EngineClient(endpoint(fake_engine.url))
    yield client
    client.close()


def test_version_and_health_are_read(client):
    assert client.health()
    assert client.weight_version() == "default"


def test_an_engine_that_is_paused_is_not_dead_as_long_as_its_scheduler_answers(client, fake_engine):
    """SGLang's /health_generate is a 503 behind a pause, whenever the pause begins."""
    fails = JSONResponse({}, status_code=503)
    fake_engine.answers |= {"ready": fails, "health_generate": fails}
    assert client.health() and not client.serves()
    fake_engine.answers |= {"ready": {}, "health_generate": lambda body: pause()}

    def pause() -> JSONResponse:
        fake_engine.answers["ready"] = fails
        return fails

    assert client.health()
    assert fake_engine.answers["ready"] is fails
    fake_engine.answers["server_info"] = fails
    assert not client.health()
    fake_engine.answers |= {"ready": {}, "health_generate": fails, "server_info": {}}
    assert not client.health()


def test_nobody_at_the_address_is_unhealthy_and_an_error_that_names_it():
    client = EngineClient(endpoint(http_url("127.0.0.1", free_port())))
    assert not client.health()
    with pytest.raises(EngineError) as caught:
        client.model_info()
    assert caught.value.status is None
    assert client.endpoint.url in str(caught.value) and "/model_info: no answer" in str(caught.value)


def test_an_answer_that_breaks_off_or_does_not_come_is_none(client, fake_engine):
    async def broken_off():
        raise ConnectionError("the engine is gone")
        yield b""

    async def late(body):
        await asyncio.sleep(1)

    fake_engine.answers |= {"server_info": lambda body: StreamingResponse(broken_off()), "late": late}
    with pytest.raises(EngineError, match="/server_info: no answer: RemoteProtocolError"):
        client.server_info()
    with pytest.raises(EngineError, match="/late: no answer: ReadTimeout"):
        client.request("GET", "/late", timeout=0.01)
    assert client.weight_version() == "default"


def test_a_refused_request_names_engine_endpoint_status_and_body(client):
    with pytest.raises(EngineError) as caught:
        client.pause_generation()
    assert (
        str(caught.value)
        == f'engine {client.endpoint.url}: /pause_generation: HTTP 404: {{"detail":"Not Found"}}'
    )


def test_success_false_is_an_error(client):
    with pytest.raises(EngineError, match="/weights_checker: HTTP 200: weights differ"):
        client.weights_checker("compare")


@pytest.mark.parametrize("told", [{}, "a page of a proxy", [1]])
def test_a_version_that_is_not_told_is_an_error_of_the_engine(client, fake_engine, told):
    fake_engine.answers["model_info"] = told
    with pytest.raises(EngineError, match=r"/model_info: HTTP 200: found .* \(wanted: a weight_version\)"):
        client.weight_version()


def test_errors_survive_pickling(client):
    with pytest.raises(EngineError) as caught:
        client.pause_generation()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301


def test_a_server_without_update_sessions_is_asked_once(client, fake_engine):
    with client.weight_update():
        client.update_weights_from_tensor(["cGF5bG9hZA=="], "flattened_bucket", "3")
    client.begin_weight_update()
    assert not client.has_update_session
    assert fake_engine.seen("update_weights_from_tensor") == [
        {
            "serialized_named_tensors": ["cGF5bG9hZA=="],
            "load_format": "flattened_bucket",
            "weight_version": "3",
            "flush_cache": False,
        }
    ]
    assert client.weight_version() == "3"


def test_dtypes_and_shapes_are_sent_as_sglang_reads_them(client, fake_engine):
    client.update_weights_from_distributed(
        ["w"], ["torch.bfloat16"], [(2, 3)], "slime-pp_0", weight_version="4"
    )
    (body,) = fake_engine.seen("update_weights_from_distributed")
    assert body["dtypes"] == ["bfloat16"]
    assert body["shapes"] == [[2, 3]]
    assert body["group_name"] == "slime-pp_0"


def test_flush_waits_for_an_engine_that_is_still_busy(client, fake_engine):
    fake_engine.flush_refusals = 3
    client.flush_cache(timeout=300)


def test_flush_gives_up_on_an_engine_that_stays_busy(client, fake_engine):
    fake_engine.flush_refusals = 10_000
    with pytest.raises(EngineError, match=r"/flush_cache: .*still running or queued after 0\.2 s"):
        client.flush_cache(timeout=0.2)


def test_destroying_a_group_of_a_dead_engine_is_no_error(caplog):
    client = EngineClient(endpoint(http_url("127.0.0.1", free_port())))
    client.destroy_weights_update_group("slime")
    assert "process group slime" in caplog.text


def test_abort_of_one_and_of_all(client, fake_engine):
    client.abort("r1")
    client.abort()
    assert fake_engine.seen("abort_request") == [{"rid": "r1", "abort_all": False}, {"abort_all": True}]


def test_the_key_is_sent(start_fake_engine):
    url = start_fake_engine(api_key="sekret").url
    assert EngineClient(endpoint(url, "sekret")).weight_version() == "default"
    with pytest.raises(EngineError, match="HTTP 401"):
        EngineClient(endpoint(url)).weight_version()


def test_a_pickled_client_still_speaks(client):
    assert pickle.loads(pickle.dumps(client)).weight_version() == "default"  # noqa: S301


_GROUP = {"group_name": "weight_update_group"}
_DEFAULTS = {"load_format": None, "weight_version": None, "flush_cache": False}
_GIVEN = {"load_format": "f", "weight_version": "3", "flush_cache": True}
SENT = [
    (lambda c: c.serves(), [("GET", "/health_generate", None)]),
    (lambda c: c.health(), [("GET", "/ready", None), ("GET", "/health_generate", None)]),
    (lambda c: c.model_info(), [("GET", "/model_info", None)]),
    (lambda c: c.server_info(), [("GET", "/server_info", None)]),
    (lambda c: c.loads(), [("GET", "/v1/loads?include=core", None)]),
    (lambda c: c.abort(), [("POST", "/abort_request", {"abort_all": True})]),
    (lambda c: c.abort("r"), [("POST", "/abort_request", {"rid": "r", "abort_all": False})]),
    (lambda c: c.pause_generation(), [("POST", "/pause_generation", {"mode": "abort"})]),
    (lambda c: c.pause_generation("retract"), [("POST", "/pause_generation", {"mode": "retract"})]),
    (lambda c: c.continue_generation(), [("POST", "/continue_generation", {})]),
    (lambda c: c.flush_cache(), [("GET", "/flush_cache", None)]),
    (lambda c: c.begin_weight_update(), [("POST", "/begin_weight_update", {})]),
    (
        lambda c: (setattr(c, "selector", "draft"), c.begin_weight_update(), c.weights_checker("compare")),
        [
            ("POST", "/begin_weight_update", {"selector": "draft"}),
            ("POST", "/weights_checker", {"action": "compare", "selector": "draft"}),
        ],
    ),
    (lambda c: c.end_weight_update(), [("POST", "/end_weight_update", {})]),
    (
        lambda c: c.init_weights_update_group("10.0.0.1", 9, 2, 5),
        [
            (
                "POST",
                "/init_weights_update_group",
                {
                    **{"master_address": "10.0.0.1", "master_port": 9, "rank_offset": 2, "world_size": 5},
                    **{"backend": "nccl"},
                    **_GROUP,
                },
            )
        ],
    ),
    (lambda c: c.destroy_weights_update_group(), [("POST", "/destroy_weights_update_group", _GROUP)]),
    (
        lambda c: c.update_weights_from_tensor(("x",)),
        [("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["x"], **_DEFAULTS})],
    ),
    (
        lambda c: c.update_weights_from_tensor(("x",), "f", "3", True),
        [("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["x"], **_GIVEN})],
    ),
    (
        lambda c: c.update_weights_from_distributed(("w",), ("float32",), ((2,),)),
        [
            (
                "POST",
                "/update_weights_from_distributed",
                {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]], **_GROUP, **_DEFAULTS},
            )
        ],
    ),
    (
        lambda c: c.update_weights_from_distributed(("w",), ("torch.int8",), ((2,),), "g", "f", "3", True),
        [
            (
                "POST",
                "/update_weights_from_distributed",
                {"names": ["w"], "dtypes": ["int8"], "shapes": [[2]], "group_name": "g", **_GIVEN},
            )
        ],
    ),
    (
        lambda c: c.update_weights_from_disk("/m"),
        [("POST", "/update_weights_from_disk", {"model_path": "/m", **_DEFAULTS})],
    ),
    (
        lambda c: c.update_weights_from_disk("/m", "f", "3", True),
        [("POST", "/update_weights_from_disk", {"model_path": "/m", **_GIVEN})],
    ),
    (
        lambda c: c.update_weight_version("4"),
        [("POST", "/update_weight_version", {"new_version": "4", "abort_all_requests": False})],
    ),
    (
        lambda c: c.weights_checker("reset_tensors"),
        [("POST", "/weights_checker", {"action": "reset_tensors"})],
    ),
    (
        lambda c: c.release_memory_occupation(("kv_cache",)),
        [("GET", "/flush_cache", None), ("POST", "/release_memory_occupation", {"tags": ["kv_cache"]})],
    ),
    (
        lambda c: c.release_memory_occupation(),
        [("GET", "/flush_cache", None), ("POST", "/release_memory_occupation", {"tags": None})],
    ),
    (lambda c: c.resume_memory_occupation(), [("POST", "/resume_memory_occupation", {"tags": None})]),
    (
        lambda c: c.resume_memory_occupation(("weights",)),
        [("POST", "/resume_memory_occupation", {"tags": ["weights"]})],
    ),
    (
        lambda c: c.update("/of_ours", {"number": 1}, "3"),
        [("POST", "/of_ours", {"number": 1, "weight_version": "3", "flush_cache": False})],
    ),
]


class Answers:
    """In place of the connections of a client."""

    def __init__(self, answer):
        self._answer, self.connections = answer, ["one"]

    def request(self, method, url, headers, content, extensions):
        sent = {name.decode(): value.decode() for name, value in headers}
        given = self._answer(httpx.Request(method, url, headers=sent, content=content, extensions=extensions))
        answer = httpcore.Response(given.status_code, headers=given.headers.raw, content=given.content)
        answer.read()
        return answer

    def close(self):
        self.connections.clear()


def client_of(answer, **options):
    """A client of an engine that ``answer`` stands for."""
    client = EngineClient(endpoint("http://engine:1"), **options)
    client._http = Answers(answer)
    return client


def test_each_method_sends_what_sglang_reads():
    def check(case):
        call, wanted = case
        found = []

        def answer(request):
            body = json.loads(request.content) if request.content else None
            found.append((request.method, request.url.raw_path.decode(), body))
            return httpx.Response(200, json={"weight_version": "1"})

        call(client_of(answer))
        assert found == wanted

    methods = {name for name in vars(EngineClient) if not name.startswith("_")}
    untested = methods - {name for call, _ in SENT for name in call.__code__.co_names}
    assert untested == {*("request", "close", "weight_update", "weight_version", "flush_idle_cache")}
    hold_each(SENT, check, name=lambda case: str(case[1]), least=len(SENT))


def test_answers_below_400_are_answers_and_long_errors_are_cut():
    client = client_of(lambda request: httpx.Response(int(request.url.path[1:]), text="x" * 2001))
    assert client.request("GET", "/399") == "x" * 2001
    with pytest.raises(EngineError) as caught:
        client.request("GET", "/400")
    assert (caught.value.status, caught.value.body) == (400, "x" * 2000)


def test_each_request_has_its_own_time_or_that_of_the_client():
    found = []

    def answer(request):
        found.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json={})

    client = client_of(answer, timeout=7.0)
    client.server_info()
    client.serves()
    client.request("GET", "/x", timeout=0.5)
    client_of(answer).server_info()
    client_of(answer).model_info()  # others wait for it, with deadlines of their own
    assert found == [7.0, 5.0, 0.5, 600.0, 60.0]


def test_a_client_that_is_closed_has_no_connections():
    client = client_of(lambda request: httpx.Response(200, json={}))
    client.close()
    assert client._http.connections == []
