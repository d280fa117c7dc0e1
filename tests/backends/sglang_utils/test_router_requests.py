"""What a run sends to a router, and when it takes what comes back for an end."""

import json
import re
import socket
from types import SimpleNamespace

import httpx
import pytest

from slime.backends.sglang_utils import router as router_module
from slime.backends.sglang_utils.router import RouterError, RouterProcess
from slime.backends.sglang_utils.router_commands import router_command
from slime.config.run import RunConfig
from slime.processes import silence
from tests.run_args import config_with

ENGINE = "http://engine:1"
LISTED = {"id": "a/b c", "url": ENGINE, "is_healthy": True}


class Process:
    """A process that runs until it is told why it ended."""

    ended: str | None = None
    terminated: float | None = None

    def is_alive(self):
        return self.ended is None

    def exit_reason(self):
        return self.ended

    failure_reason = exit_reason

    def log_tail(self):
        return "last line"

    def terminate(self, grace):
        self.terminated = grace


class Listed:
    """A router's answers: each list of workers in turn, the last one again and again."""

    def __init__(self, *lists):
        self.lists, self.sent = [*lists], []

    def __call__(self, request):
        body = json.loads(request.content) if request.content else None
        self.sent.append((request.method, request.url.raw_path.decode(), body))
        if request.method != "GET":
            return httpx.Response(202, json={})
        found = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        return httpx.Response(200, json={"workers": found})

    @property
    def orders(self):
        return [one for one in self.sent if one[0] != "GET"]


@pytest.fixture
def at(monkeypatch):
    """``at(seconds)`` sets the clock by which a router is silent."""
    clock = SimpleNamespace(now=1000.0)
    for module in (silence, router_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return lambda seconds: setattr(clock, "now", 1000.0 + seconds)


def router_of(answer, api_key=None, process=None, **options):
    router = RouterProcess(process or Process(), "http://router:1", api_key, **options)
    router._http = httpx.Client(base_url="http://router:1", transport=httpx.MockTransport(answer))
    return router


class Breaking(Listed):
    """Does what it is asked, and breaks the connection before it has answered, so many times."""

    def __init__(self, times, *lists):
        super().__init__(*lists)
        self.times = times

    def __call__(self, request):
        answer = super().__call__(request)
        if self.times:
            self.times -= 1
            raise httpx.ReadError("connection reset by peer")
        return answer


def test_an_engine_leaves_though_a_connection_breaks(monkeypatch):
    monkeypatch.setattr(router_module, "_ATTEMPT_PAUSE_S", 0.0)
    answers = Breaking(2, [LISTED])
    answers.lists = [[LISTED], [LISTED], [LISTED], []]
    router_of(answers).remove_worker(ENGINE)
    assert answers.orders == [("DELETE", "/workers/a%2Fb%20c", None)] and not answers.times


def test_an_engine_leaves_though_the_answer_to_its_leave_is_lost(monkeypatch):
    monkeypatch.setattr(router_module, "_ATTEMPT_PAUSE_S", 0.0)
    deleted = []

    def answer(request):
        if request.method == "GET":
            return httpx.Response(200, json={"workers": [] if deleted else [LISTED]})
        deleted.append(request)
        if len(deleted) == 1:
            raise httpx.ReadError("connection reset by peer")
        return httpx.Response(404, json={"error": "no such worker"})

    router_of(answer).remove_worker(ENGINE)
    assert len(deleted) == 2


def test_a_connection_that_breaks_again_and_again_is_told_and_none_is_registered_twice(monkeypatch):
    monkeypatch.setattr(router_module, "_ATTEMPT_PAUSE_S", 0.0)
    answers = Breaking(10, [LISTED])
    with pytest.raises(RouterError, match=r"GET /workers: ReadError: connection reset by peer"):
        router_of(answers).list_workers()
    assert len(answers.sent) == 3
    with pytest.raises(RouterError, match=r"POST /workers: ReadError"):
        router_of(answers).register_worker(ENGINE)
    assert len(answers.orders) == 1


@pytest.mark.parametrize(
    ("options", "api_key", "more"),
    [
        ({}, None, {"worker_type": "regular"}),
        ({"kind": "decode"}, "k", {"worker_type": "decode", "api_key": "k"}),
        ({"kind": "prefill", "bootstrap_port": 0}, None, {"worker_type": "prefill", "bootstrap_port": 0}),
    ],
)
def test_an_engine_is_added_and_gets_traffic_once_it_is_healthy(options, api_key, more):
    sick = {**LISTED, "is_healthy": False}
    other = {**LISTED, "url": "http://other:1"}
    listed = Listed([], [other], [sick], [other, LISTED])
    router_of(listed, api_key).register_worker(ENGINE, **options)
    assert listed.orders == [("POST", "/workers", {"url": ENGINE, **more})]
    assert [one[:2] for one in listed.sent[1:]] == [("GET", "/workers")] * 4


def test_an_engine_is_taken_out_by_its_number_and_is_gone_then():
    sick = {**LISTED, "is_healthy": False}
    listed = Listed([{**LISTED, "id": "x", "url": "http://other:1"}, LISTED], [LISTED], [sick], [])
    router_of(listed).remove_worker(ENGINE)
    assert listed.orders == [("DELETE", "/workers/a%2Fb%20c", None)]
    assert len(listed.sent) == 5
    unknown = Listed([])
    router_of(unknown).remove_worker(ENGINE)
    assert unknown.orders == []


def test_what_does_not_come_in_time_is_told_with_the_end_of_the_log():
    router = router_of(Listed([]))
    with pytest.raises(RouterError, match=r"(?s)waited 0.05 s for it to list http://engine:1 as .*last line"):
        router.register_worker(ENGINE, timeout=0.05)
    with pytest.raises(RouterError, match=r"waited 0.05 s for it to drop http://engine:1; its log"):
        router_of(Listed([LISTED])).remove_worker(ENGINE, timeout=0.05)


@pytest.mark.parametrize(("status", "fails"), [(399, False), (400, True)])
def test_an_answer_of_400_or_more_is_an_error_that_says_what_was_asked(status, fails):
    router = router_of(lambda request: httpx.Response(status, json={"workers": []}))
    if not fails:
        assert router.list_workers() == []
        return
    with pytest.raises(RouterError, match=r'^router http://router:1: GET /workers: HTTP 400: \{"workers"'):
        router.list_workers()


def test_a_router_that_ended_is_told_of_by_its_end():
    def gone(request):
        raise httpx.ConnectError("refused")

    process = Process()
    router = router_of(gone, process=process)
    with pytest.raises(RouterError, match="GET /workers: ConnectError: refused"):
        router.list_workers()
    assert router.is_alive() and router.failure_reason() is None
    process.ended = "ended with status 1"
    with pytest.raises(RouterError, match="GET /workers: ended with status 1"):
        router.list_workers()
    with pytest.raises(RouterError, match=r"^ended with status 1"):
        router.wait_ready(600)
    assert not router.is_alive() and router.failure_reason() == "ended with status 1"
    router.shutdown()
    assert process.terminated == 1.0 and router._http.is_closed


def test_a_router_that_runs_and_answers_nothing_has_failed_after_the_named_time():
    """One that is stopped is found by its process: this one only hangs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections come about, and that is all
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert RouterProcess(Process(), url).failure_reason() is None
        router = RouterProcess(Process(), url, hang_timeout=0.2)
        found = next(filter(None, (router.failure_reason() for _ in range(100))))
        told = r"hangs, \d+ s without an answer \(--rollout-router-hang-timeout\)"
        assert re.fullmatch(f"router {re.escape(url)} {told}", found)


def test_a_single_answer_clears_a_router(at):
    hung = True

    def answer(request):
        if hung:
            raise httpx.ReadTimeout("no answer")
        return httpx.Response(200)

    router = router_of(answer, hang_timeout=30.0)
    look = lambda seconds: at(seconds) or router.failure_reason()
    assert [look(seconds) for seconds in (0, 10, 20, 29)] == [None] * 4
    hung = False
    assert look(30) is None
    hung = True
    assert [look(seconds) for seconds in (40, 50, 59)] == [None] * 3
    assert "hangs, 30 s without" in look(60)


def test_nothing_is_held_against_a_router_for_the_time_in_which_nobody_asked_it(at):
    """As where the process that asks was stopped, between two looks at a bad moment of the router's."""

    def answer(request):
        raise httpx.ReadTimeout("no answer")

    router = router_of(answer, hang_timeout=30.0)
    look = lambda seconds: at(seconds) or router.failure_reason()
    assert [look(seconds) for seconds in (0, 600, 610, 620, 629)] == [None] * 5
    assert "hangs, 30 s without" in look(630)


def test_a_request_that_got_no_answer_counts_as_silence():
    """It may be the first to find that a router hangs, and takes as long as that is waited for."""

    def answer(request):
        raise httpx.ReadTimeout("no answer")

    router = router_of(answer, hang_timeout=1e-6)
    with pytest.raises(
        RouterError, match="GET /workers: router http://router:1 hangs, 0 s without an answer"
    ):
        router.list_workers()


def test_it_is_ready_once_it_says_that_it_lives():
    answers, asked = [httpx.ConnectError("not yet"), 503, 200], []

    def answer(request):
        asked.append(request.url.path)
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found)

    router_of(answer).wait_ready(600)
    assert asked == ["/liveness"] * 3


def options_of(**flags) -> dict[str, str | bool]:
    """The options of a router's command line."""
    config: RunConfig = config_with(**flags)
    command = router_command(config, host="h", port=1, prometheus_port=2, api_key=flags.pop("key", None))
    assert command[1:3] == ["-m", "sglang_router.launch_router"]
    pairs = (word.partition("=") for word in command[3:])
    return {name: value if mark else True for name, mark, value in pairs}


def test_a_run_leaves_out_what_would_take_its_engines_for_sick_unless_told():
    pytest.importorskip("sglang_router")
    ours = {"--host": "h", "--port": "1", "--prometheus-port": "2", "--prometheus-host": "h"}
    alone = options_of(sglang_router_request_timeout_secs=77)
    both = {"--disable-health-check": True, "--disable-circuit-breaker": True}
    balance = {"--balance-abs-threshold": "10", "--balance-rel-threshold": "1.2"}
    assert alone == {**ours, **both, **balance, "--request-timeout-secs": "77"}
    assert "--disable-health-check" not in options_of(router_health_check_interval_secs=7)
    assert "--disable-circuit-breaker" in options_of(router_health_check_interval_secs=7)
    assert "--disable-circuit-breaker" not in options_of(router_cb_failure_threshold=3)
    assert options_of(router_request_timeout_secs=5)["--request-timeout-secs"] == "5"


def test_plain_values_are_those_that_json_can_say():
    from slime.backends.sglang_utils.router_commands import _is_plain

    for value in (None, 1, 2.5, "a", True, [1, ("b", None)], {"a": {"b": [1]}}):
        assert _is_plain(value)
    for value in (SimpleNamespace(), [1, object()], {1: "a"}, {"a": [{"b": {2}}]}, b"a"):
        assert not _is_plain(value)
