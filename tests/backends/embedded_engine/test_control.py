"""Pausing, aborting, flushing, releasing: what happens to requests meanwhile."""

import threading
import time

import pytest

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.sglang_utils.client import EngineClient
from slime.utils.types import EngineEndpoint
from tests.backends.embedded_engine.test_scheduler import make_state
from tests.engines.embedded import ENDLESS, LONG, Server

pytestmark = pytest.mark.slow

AN_ENDLESS = {"max_new_tokens": ENDLESS, "ignore_eos": True, "temperature": 0}
A_LONG = {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 0}
PROMPT = [1, 2, 3, 4]


class Background:
    """A request in flight."""

    def __init__(self, server: Server, sampling: dict, **body) -> None:
        self.answer = None
        self._thread = threading.Thread(target=self._run, args=(server, sampling, body))
        self._thread.start()

    def _run(self, server: Server, sampling: dict, body: dict) -> None:
        self.answer = server.generate(body.pop("input_ids", PROMPT), sampling, **body)

    def result(self):
        self._thread.join(120)
        assert self.answer is not None
        return self.answer


def load(server: Server) -> dict:
    return server.client.get("/v1/loads").json()["loads"][0]


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def server(shared_server):
    yield shared_server
    shared_server.post("/continue_generation")
    wait_until(lambda: load(shared_server)["num_total_reqs"] == 0)


@pytest.fixture(scope="module")
def undisturbed(shared_server) -> list[int]:
    """The response to the prompt that nothing interrupts."""
    return shared_server.generate(PROMPT, A_LONG)["output_ids"]


def started(server: Server, sampling: dict) -> Background:
    request = Background(server, sampling)
    wait_until(lambda: load(server)["num_used_tokens"] > 10 or request.answer is not None)
    return request


def goes_on_as(server: Server, request: Background, undisturbed: list[int]) -> dict:
    """Its answer, once it has more tokens than now."""
    wait_until(lambda: load(server)["num_used_tokens"] > 0)
    used = load(server)["num_used_tokens"]
    wait_until(lambda: load(server)["num_used_tokens"] > used + 20)
    server.post("/abort_request", abort_all=True)
    ids = request.result()["output_ids"]
    both = min(len(ids), len(undisturbed))
    assert both > 20 and ids[:both] == undisturbed[:both]
    return request.result()


def test_pause_abort_ends_running_requests_with_what_they_have(server):
    request = started(server, AN_ENDLESS)
    assert server.post("/pause_generation").json()["status"] == "ok"
    answer = request.result()
    reason = answer["meta_info"]["finish_reason"]
    assert reason["type"] == "abort" and reason["status_code"] is None
    assert 0 < len(answer["output_ids"]) < ENDLESS
    assert server.client.get("/flush_cache").status_code == 200


def test_pause_in_place_freezes_and_continues_as_if_nothing_was(server, undisturbed):
    request = started(server, AN_ENDLESS)
    server.post("/pause_generation", mode="in_place")
    frozen = load(server)["num_used_tokens"]
    flush = server.post("/flush_cache")
    assert flush.status_code == 400 and flush.text.startswith("Flush cache failed.")
    time.sleep(0.1)
    assert load(server)["num_used_tokens"] == frozen and request.answer is None
    server.post("/continue_generation")
    goes_on_as(server, request, undisturbed)


def test_pause_retract_gives_up_the_cache_and_recomputes(server, undisturbed):
    request = started(server, AN_ENDLESS)
    server.post("/pause_generation", mode="retract")
    assert load(server)["num_running_reqs"] == 0 and load(server)["num_waiting_reqs"] == 1
    assert server.client.get("/flush_cache").status_code == 200
    server.post("/continue_generation")
    assert goes_on_as(server, request, undisturbed)["meta_info"]["num_retractions"] == 1


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_new_requests_wait_out_a_pause_and_count_only_then(server, mode):
    server.post("/pause_generation", mode=mode)
    request = Background(server, {"max_new_tokens": 2})
    time.sleep(0.1)
    assert load(server)["num_total_reqs"] == 0 and request.answer is None
    assert server.client.get("/flush_cache").status_code == 200
    server.post("/continue_generation")
    assert request.result()["meta_info"]["completion_tokens"] == 2


def test_a_request_behind_a_pause_can_be_aborted(server):
    server.post("/pause_generation")
    request = Background(server, A_LONG, rid="behind")

    def is_aborted() -> bool:
        """An abort that comes before the request does nothing."""
        server.post("/abort_request", rid="behind")
        return request.answer is not None

    wait_until(is_aborted)
    assert request.result()["meta_info"]["finish_reason"]["type"] == "abort"
    server.post("/continue_generation")
    assert load(server)["num_total_reqs"] == 0


@pytest.fixture
def impatient(checkpoint):
    """A server that gives a health check up after a second."""
    server = Server(checkpoint[0], env={"SGLANG_HEALTH_CHECK_TIMEOUT": "1"})
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def test_a_pause_is_no_health_but_no_death_either(impatient):
    server = impatient
    client = EngineClient(EngineEndpoint(server.url, None, 1, None))
    wait_until(lambda: client.serves() and client.health())
    server.post("/pause_generation", mode="in_place")
    assert server.client.get("/ready").status_code == 503
    for path in ("/health", "/health_generate"):
        assert server.client.get(path).status_code == 503
    assert not client.serves() and client.health()
    server.post("/continue_generation")
    assert server.client.get("/ready").status_code == 200
    wait_until(lambda: client.serves() and client.health())
    client.close()


def test_an_unknown_pause_mode_is_refused(server):
    answer = server.post("/pause_generation", mode="nap")
    assert answer.status_code == 400 and "nap" in answer.json()["message"]


def test_abort_takes_a_known_id_and_all_that_begin_so(server):
    requests = {rid: Background(server, AN_ENDLESS, rid=rid) for rid in ("r1", "r10")}
    batch = Background(server, AN_ENDLESS, rid="s", input_ids=[[1, 2], [3, 4]])
    wait_until(lambda: load(server)["num_running_reqs"] == 4)
    for rid in ("unknown", "r", "s", ""):
        assert server.post("/abort_request", rid=rid).content == b""
    assert load(server)["num_running_reqs"] == 4
    server.post("/abort_request", rid="r1")
    for rid in ("r1", "r10"):
        assert requests[rid].result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert load(server)["num_running_reqs"] == 2
    for rid in ("s_0", "s_1"):
        server.post("/abort_request", rid=rid)
    assert [a["meta_info"]["finish_reason"]["type"] for a in batch.result()] == ["abort"] * 2


def test_abort_all_reaches_the_queue(server):
    requests = [Background(server, AN_ENDLESS) for _ in range(20)]
    wait_until(lambda: load(server)["num_total_reqs"] == 20)
    assert load(server)["num_waiting_reqs"] == 4
    server.post("/abort_request", abort_all=True)
    assert {r.result()["meta_info"]["finish_reason"]["type"] for r in requests} == {"abort"}


def test_an_id_in_use_is_refused(server):
    request = Background(server, AN_ENDLESS, rid="mine")
    wait_until(lambda: load(server)["num_running_reqs"] == 1)
    assert server.post("/generate", input_ids=PROMPT, rid="mine").status_code == 400
    server.post("/abort_request", rid="mine")
    request.result()
    server.generate(PROMPT, {"max_new_tokens": 1}, rid="mine")


def test_an_update_waits_for_running_requests_unless_paused(server):
    request = started(server, A_LONG)
    answer = server.post("/update_weights_from_disk", model_path="/nowhere")
    assert answer.status_code == 400 and load(server)["num_total_reqs"] == 0
    assert request.result()["meta_info"]["finish_reason"]["type"] == "length"


def test_requests_wait_while_memory_is_released(server):
    before = server.generate(PROMPT, {"max_new_tokens": 3, "temperature": 0})
    assert server.post("/release_memory_occupation", tags=["kv_cache"]).json() is None
    request = Background(server, {"max_new_tokens": 3, "temperature": 0})
    wait_until(lambda: load(server)["num_waiting_reqs"] == 1)
    assert server.post("/resume_memory_occupation", tags=["kv_cache"]).json() is None
    assert request.result()["output_ids"] == before["output_ids"]


@pytest.mark.parametrize("tags", [None, []])
def test_no_tags_are_all_tags(checkpoint, tags):
    state = make_state(checkpoint)
    state.memory.release(tags)
    assert state.engine.released == {"kv_cache", "weights", "cuda_graph"}
    state.memory.resume(["weights"])
    state.memory.resume(tags)
    assert not state.engine.released
    with pytest.raises(BadRequest, match="nothing to resume"):
        state.memory.resume(tags)


def test_release_is_refused_while_requests_run_and_resume_without_release(server):
    request = started(server, AN_ENDLESS)
    assert server.post("/release_memory_occupation").status_code == 400
    assert server.post("/resume_memory_occupation", tags=["weights"]).status_code == 400
    assert server.post("/release_memory_occupation", tags=["disk"]).status_code == 400
    server.post("/abort_request", abort_all=True)
    request.result()
