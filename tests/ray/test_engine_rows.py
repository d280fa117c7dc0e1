"""What is told of each engine: by the fleet, by the engine itself, and in the run's directory after it."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slime.ray import engine, engine_record, engine_watch, membership
from slime.ray.engine_group import EngineGroup
from slime.ray.engine_loads import with_loads
from slime.ray.engine_record import recording
from slime.ray.engine_rows import EngineRow
from slime.ray.fleet import Fleet
from slime.ray.served_model import ServedModel
from tests.ray.stand_ins import Cluster, Router, Source, client_class, wait_until
from tests.run_args import config_with
from tests.serving import served


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def fleet(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Has two engines and a spare place; a dead one is replaced."""
    monkeypatch.setattr(engine, "EngineClient", client_class(cluster))
    monkeypatch.setattr(engine_watch, "LOOK_INTERVAL", 600)
    monkeypatch.setattr(membership, "_LOOK_AGAIN", 0.01)
    groups = [EngineGroup(Source(cluster, 2)), EngineGroup(Source(cluster, 1), first_rank=2, spare=True)]
    made = Fleet(
        config_with(use_fault_tolerance=True), [ServedModel("default", groups, lambda: Router(cluster))]
    )
    made.start()
    yield made
    made.stop()
    made._watch._pool.shutdown()


def test_rows_have_version_and_time_and_a_death_outlasts_the_engine(cluster: Cluster, fleet: Fleet) -> None:
    began = time.time()
    rows = fleet.membership.rows()
    assert [row.version for row in rows] == ["", "", ""] and all(row.since <= began for row in rows)
    cluster.versions = {"http://engine0": "1", "http://engine1": "1"}
    fleet.membership.begin_update()
    fleet.admit("1")
    assert [row.version for row in fleet.membership.rows()] == ["1", "1", ""]
    cluster.ended[1] = "killed by SIGKILL"
    fleet._watch.look()
    wait_until(lambda: fleet.membership.rows()[1].state == "dead")
    dead = fleet.membership.rows()[1]
    assert dead.failure == "killed by SIGKILL" and dead.since == dead.failed >= began
    fleet.recover()
    first, second, _ = fleet.membership.rows()
    assert (second.state, second.version, second.failure) == ("ready", "", "killed by SIGKILL")
    assert second.since >= second.failed == dead.failed and first.failure == ""


def test_one_that_dies_while_weights_are_admitted_does_not_serve_them(cluster: Cluster, fleet: Fleet) -> None:
    fleet.membership.begin_update()
    cluster.dead.add("http://engine1")
    fleet.admit("1")
    first, second, _ = fleet.membership.rows()
    assert (first.version, second.version, second.state) == ("1", "", "dead")
    assert second.failure


def test_a_place_says_since_when_it_is_free(cluster: Cluster, fleet: Fleet) -> None:
    serving = fleet.membership.rows()[1].since
    cluster.loads["http://engine1"] = 1
    fleet.membership.drain([1], seconds=600)
    draining = fleet.membership.rows()[1]
    assert draining.state == "draining" and draining.since > serving
    cluster.loads.clear()
    wait_until(lambda: fleet.membership.rows()[1].state == "free")
    free = fleet.membership.rows()[1]
    assert (free.url, free.kind, free.version) == ("", "", "") and free.since > draining.since
    assert free.failure == ""


def test_what_a_health_check_finds_wrong_is_told_until_it_finds_nothing(
    cluster: Cluster, fleet: Fleet
) -> None:
    one = fleet.models["default"].engines[0]
    fleet._watch._tolerant = False  # then it may be silent for a while
    for sick, told in ((False, "no healthy answer within"), (True, "")):
        cluster.sick["http://engine0"] = sick
        fleet._watch._check_health(fleet.models["default"], one, fleet._watch._resumes)
        assert fleet.membership.rows()[0].health.startswith(told) and bool(told) == bool(
            fleet.membership.rows()[0].health
        )


def row(rank: int, url: str, **more: Any) -> EngineRow:
    return EngineRow("default", rank, "regular", more.pop("state", "serving"), url, **more)


def test_engines_are_asked_for_their_requests_side_by_side_and_none_ends_the_others() -> None:
    keys: list[str | None] = []

    def loads(request: Request) -> Response:
        keys.append(request.headers.get("Authorization"))
        kind = request.path_params["kind"]
        if kind == "torn":
            return Response("{", media_type="application/json")
        ranks = [
            {
                "num_running_reqs": running,
                "num_waiting_reqs": 2,
                "gen_throughput": 30.04,
                "token_usage": running / 4,
            }
            for running in (1, 0)
        ]
        words = {"loads": [{"num_running_reqs": "none"}]}
        answers = {"well": {"loads": ranks}, "odd": {"loads": [{}]}, "list": [], "words": words}
        return JSONResponse(answers.get(kind, {}), {"old": 404, "broken": 500}.get(kind, 200))

    app = Starlette(routes=[Route("/{kind}/v1/loads", loads)])
    with served(app) as port, socket.create_server(("127.0.0.1", 0)) as silent:
        own = f"http://127.0.0.1:{port}"
        names = ("well", "odd", "list", "old", "broken")
        asked = [row(rank, f"{own}/{name}") for rank, name in enumerate(names)]
        asked += [row(5, "", state="starting"), row(6, f"{own}/well", state="dead")]
        asked += [row(7, f"{own}/well", health="timed out")]
        asked += [row(8, f"{own}/words"), row(9, f"{own}/torn")]
        found = with_loads(asked, "k", 60.0)
        (hung,) = with_loads([row(10, f"http://127.0.0.1:{silent.getsockname()[1]}")], "k", 0.1)
    assert [one.health for one in found] == [
        *("answers", "answers", "answers", "answers", "HTTP 500", "", "", "timed out"),
        *("answers", "answers"),
    ]
    assert (found[0].running, found[0].waiting, found[0].tokens_per_second, found[0].cache) == (
        1,
        4,
        30.0,
        0.25,
    )
    assert [one.running for one in found] == [1, *[None] * 6, 1, None, None]
    assert (hung.health, hung.running) == ("no answer", None)
    assert [one.rank for one in found] == list(range(10)) and set(keys) == {"Bearer k"}


def _trickle(server: socket.socket, gone: threading.Event) -> None:
    """Answers the first request byte by byte, until nobody reads it any more."""
    client, _ = server.accept()
    with client:
        try:
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not gone.wait(0.01):
                client.sendall(b" ")
        except OSError:
            gone.set()


def test_an_engine_that_answers_byte_by_byte_keeps_nobody_waiting() -> None:
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_trickle, args=(server, gone), daemon=True).start()
        asked = [row(0, f"http://127.0.0.1:{server.getsockname()[1]}"), row(1, "", state="starting")]
        found = with_loads(asked, "k", 0.3)
        assert [one.health for one in found] == ["no answer", ""]
        assert gone.wait(60), "it is still read"
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("engine-load")])


def test_the_last_rows_are_kept_and_a_side_that_is_lost_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_record, "EVERY_S", 0.01)
    monkeypatch.setattr(engine_record, "_LAST_S", 60)
    file, states, looks = tmp_path / "last.json", ["starting"], [0]

    def look(timeout: float) -> list[EngineRow]:
        looks[0] += 1
        if not states:
            raise RuntimeError("the rollout side is lost")
        return [row(0, "http://engine0", state=states[-1])]

    def told() -> str:
        return json.loads(file.read_text())["engines"][0]["state"]

    with recording(file, look):
        wait_until(file.exists)
        states.append("serving")
        wait_until(lambda: told() == "serving")
        states.clear()
        before = looks[0]
        wait_until(lambda: looks[0] > before + 2)
    assert told() == "serving" and file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(engine_record, "EVERY_S", 600)
    states.append("starting")
    with recording(file, look):
        wait_until(lambda: told() == "starting")
        states.append("dead")
    assert told() == "dead", "what there was at the end"


def test_a_directory_that_cannot_be_written_is_no_reason_to_end(tmp_path: Path) -> None:
    with recording(tmp_path / "none" / "last.json", lambda timeout: []):
        pass
