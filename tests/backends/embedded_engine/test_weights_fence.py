"""A trainer in whose place another one has come is refused, and none but a trainer ends a trainer's pause."""

import threading

import httpx
import pytest

from slime.weight_sync.writer import HEADER
from tests.engines.embedded import make_checkpoint
from tests.engines.in_process import InProcessEngine

OLD, NEW = "here:1:old", "here:2:new"
WEIGHTS = {"serialized_named_tensors": [], "load_format": None}
CHANGING = {
    "pause_generation": {},
    "flush_cache": {},
    "begin_weight_update": {},
    "update_weights_from_tensor": WEIGHTS,
    "update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "update_weights_from_disk": {"model_path": "/nowhere"},
    "update_weights_from_changes": {"tensors": [], "checksum": "xxh3-128", "number": 0},
    "plan_weights_from_ranks": {"ranks": []},
    "update_weights_from_ranks": {},
    "load_lora_adapter_from_tensors": {
        "lora_name": "a",
        "config_dict": {},
        "serialized_named_tensors": [],
    },
    "unload_lora_adapter": {"lora_name": "a"},
    "update_weight_version": {"new_version": "9"},
    "init_weights_update_group": {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
    },
    "destroy_weights_update_group": {},
    "pull_weights": {"local_checkpoint_dir": "/a", "source_dir": "/b", "target_version": 1},
    "end_weight_update": {},
    "continue_generation": {},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    make_checkpoint(path)
    return path


@pytest.fixture
def engine(checkpoint):
    engine = InProcessEngine(checkpoint, dtype="float32")
    with httpx.Client(base_url=engine.endpoint.url, timeout=120) as http:
        engine.http = http
        yield engine
    engine.stop()


def post(engine, path, writer=None, **body):
    headers = {HEADER: writer} if writer else {}
    return engine.http.post(f"/{path}", json=body, headers=headers)


def taken(engine, writer):
    answer = engine.http.post("/take_weights", json={"writer": writer}, headers={HEADER: writer})
    assert answer.status_code == 200, answer.text
    return answer.json()["interrupted"]


def computes(engine):
    """Whether the engine would start on a request now, as its own thread sees it."""
    return engine.http.get("/ready").status_code == 200 and not engine.state.engine._resting


def test_what_a_replaced_trainer_sends_is_refused_by_both_names(engine):
    assert taken(engine, OLD) is False and taken(engine, OLD) is False
    assert post(engine, "pause_generation", OLD).status_code == 200
    assert taken(engine, NEW) is False
    before = engine.state.engine.scheduler.weight_version
    for path, body in CHANGING.items():
        answer = post(engine, path, OLD, **body)
        assert answer.status_code == 409, path
        assert f"{OLD} sends weights no more: {NEW} has taken its place" in answer.text, path
    again = engine.http.post("/take_weights", json={"writer": OLD}, headers={HEADER: OLD})
    assert again.status_code == 409 and NEW in again.text
    assert engine.state.engine.scheduler.weight_version == before and not computes(engine)
    assert post(engine, "continue_generation", NEW).status_code == 200 and computes(engine)


def test_a_trainer_takes_an_engine_before_it_changes_it(engine):
    """An engine may have been started anew at an address that a trainer knows."""
    answer = post(engine, "begin_weight_update", OLD)
    assert answer.status_code == 409 and "wanted: /take_weights before" in answer.text
    assert engine.state.updater.session is None


def test_what_waited_in_the_engine_when_another_trainer_came_is_refused_too(engine):
    """An update waits for a request that is running."""
    taken(engine, OLD)
    ids = list(range(3, 11))
    sampling = {"max_new_tokens": 16000, "ignore_eos": True}
    running = threading.Thread(
        target=engine.http.post,
        args=("/generate",),
        kwargs={"json": {"rid": "long", "input_ids": ids, "sampling_params": sampling}},
    )
    running.start()
    inner = engine.state.engine
    wait_for(lambda: inner.scheduler.computing)
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(post(engine, "begin_weight_update", OLD)), name="old"
    )
    waiting.start()
    wait_for(lambda: inner._held)
    taken(engine, NEW)
    post(engine, "abort_request", rid="long")
    waiting.join(120)
    running.join(120)
    assert answers[0].status_code == 409 and NEW in answers[0].text
    assert engine.state.updater.session is None and not inner.updating


def wait_for(condition):
    for _ in range(12_000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise TimeoutError("it has not come within 120 s")


def test_nobody_but_a_trainer_lets_an_engine_go_on_that_a_trainer_has_paused(engine):
    taken(engine, OLD)
    post(engine, "pause_generation", OLD)
    answer = post(engine, "continue_generation")
    assert answer.status_code == 409 and f"{OLD} has not ended its update" in answer.text
    post(engine, "pause_generation")  # somebody else pauses it once more
    assert post(engine, "continue_generation").status_code == 409 and not computes(engine)
    taken(engine, NEW)
    assert post(engine, "continue_generation").status_code == 409 and not computes(engine)
    assert post(engine, "continue_generation", NEW).status_code == 200 and computes(engine)
    post(engine, "pause_generation")  # by its owner, who ends it as well
    assert post(engine, "continue_generation").status_code == 200 and computes(engine)


def test_nothing_is_computed_with_an_update_that_was_left_open_until_one_has_ended(engine):
    """Also where nobody had paused the engine, or somebody says that it may go on."""
    post(engine, "begin_weight_update")
    assert taken(engine, NEW) is True
    assert engine.state.updater.session is None and not computes(engine)
    post(engine, "continue_generation", NEW)
    assert not computes(engine)
    post(engine, "begin_weight_update", NEW)
    post(engine, "end_weight_update", NEW)
    assert computes(engine)


def test_versions_of_a_trainer_never_fall(engine):
    taken(engine, OLD)
    for version, status in (("2", 200), ("2", 200), ("1", 400), ("3", 200), ("mine", 200), ("2", 400)):
        answer = post(engine, "update_weight_version", OLD, new_version=version)
        assert answer.status_code == status, version
    assert "wanted: at least 3" in answer.text and engine.client.weight_version() == "mine"
    assert post(engine, "update_weight_version", new_version="1").status_code == 200  # by its owner
    assert post(engine, "update_weight_version", OLD, new_version="2").status_code == 400
    taken(engine, NEW)  # another run, with numbers of its own
    assert post(engine, "update_weight_version", NEW, new_version="1").status_code == 200


def test_the_connections_of_a_replaced_trainer_are_given_up(engine):
    taken(engine, OLD)
    groups = engine.state.updater.groups
    left = []
    groups._groups["old"] = [object()]
    groups.leave = lambda name: left.append(name) or groups._groups.pop(name)
    engine.state.updater.sessions.leave = lambda: left.append("what it exposed")
    taken(engine, OLD)
    assert not left
    taken(engine, NEW)
    assert left == ["old", "what it exposed"]


def test_who_says_nothing_passes_as_on_sglang(engine):
    for path in ("pause_generation", "begin_weight_update", "end_weight_update", "continue_generation"):
        assert post(engine, path).status_code == 200, path
    assert computes(engine)
