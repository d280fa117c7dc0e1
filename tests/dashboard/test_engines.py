"""Rows of engines: of a run that goes on, of one that is over, and of files that anybody may have written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from slime.cli.dashboard import runs_of
from slime.config.engines import CONTROL_FILE, LAST_ENGINES
from slime.config.run import run_config
from slime.dashboard import engines
from slime.dashboard.engines import Engines
from slime.dashboard.server import dashboard
from slime.ray.engine_control import engine_control
from slime.ray.engine_rows import EngineRow
from tests.run_args import run_args


class Rollout:
    """A fleet of one engine that starts, and one that is dead."""

    def __init__(self) -> None:
        self.asked = 0

    def ask_fleet(self, method: str, timeout: float) -> list[EngineRow]:
        self.asked += 1
        dead = {"since": 5.0, "failure": "killed", "failed": 5.0, "version": "3"}
        return [
            EngineRow("default", 0, "regular", "starting", "", since=4.0),
            EngineRow("default", 1, "regular", "dead", "http://127.0.0.1:9", **dead),
        ]


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollout]:
    for name, seconds in (("_FRESH_S", 0.0), ("_TIMEOUT_S", 60.0), ("_AGAIN_S", 600.0)):
        monkeypatch.setattr(engines, name, seconds)
    yield Rollout()


def of(directory: Path) -> Engines:
    (run,) = runs_of([str(directory)])
    return run.engines


def test_a_run_that_goes_on_is_asked_and_one_that_is_over_has_left_its_last_rows(
    tmp_path: Path, rollout: Rollout
) -> None:
    shown = of(tmp_path)
    assert shown.now() == {"is_live": False, "time": None, "problem": None, "rows": []}
    with engine_control(run_config(run_args(save=str(tmp_path))), rollout):  # type: ignore[arg-type]
        live = shown.now()
        key = json.loads((tmp_path / CONTROL_FILE).read_text())["key"]
        app = dashboard(runs_of([str(tmp_path)]), "secret", "127.0.0.1")
        client = TestClient(app, base_url="http://127.0.0.1:8899")
        answer = client.get("/secret/api/engines")
        assert key not in answer.text and answer.json()[tmp_path.name]["rows"] == live["rows"]
    assert live["is_live"] and live["problem"] is None
    first, second = live["rows"]
    assert (first["state"], first["since"], first["running"], first["failure"]) == ("starting", 4.0, None, "")
    assert (second["state"], second["failed"], second["version"]) == ("dead", 5.0, "3")
    over = shown.now()
    assert not over["is_live"] and over["problem"] is None and over["rows"] == live["rows"]
    assert over["time"] <= live["time"] + 60


def test_the_files_may_lie_beside_the_checkpoints(tmp_path: Path, rollout: Rollout) -> None:
    (tmp_path / "resolved.yaml").write_text(f"save: {tmp_path}/checkpoints\n")
    (tmp_path / "checkpoints").mkdir()
    shown = of(tmp_path)
    with engine_control(run_config(run_args(save=f"{tmp_path}/checkpoints")), rollout):  # type: ignore[arg-type]
        assert shown.now()["is_live"]
    assert len(shown.now()["rows"]) == 2


def test_a_run_that_was_killed_is_not_asked_again_and_again(
    tmp_path: Path, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_control(run_config(run_args(save=str(tmp_path))), rollout):  # type: ignore[arg-type]
        left = (tmp_path / CONTROL_FILE).read_text()
    (tmp_path / CONTROL_FILE).write_text(left)
    shown, opened = of(tmp_path), []
    control = engines.RunControl
    monkeypatch.setattr(engines, "RunControl", lambda *words: opened.append(words) or control(*words))
    for _ in range(3):
        found = shown.now()
        assert not found["is_live"] and "does not answer at http://127.0.0.1:" in found["problem"]
        assert json.loads(left)["key"] not in found["problem"] and len(found["rows"]) == 2
    assert len(opened) == 1


def test_one_answer_is_for_all_pages_that_ask_at_once(tmp_path: Path) -> None:
    rollout, shown = Rollout(), of(tmp_path)
    with engine_control(run_config(run_args(save=str(tmp_path))), rollout):  # type: ignore[arg-type]
        shown._told = float("inf"), {"rows": "as told"}
        assert shown.now() == {"rows": "as told"}


ODD: list[Any] = ["", "[]", "{}", '{"engines": 1}', '{"engines": [1]}', "[" * 100_000, b"\xff"]


def test_what_is_no_record_is_said_and_of_rows_only_what_is_known_is_shown(tmp_path: Path) -> None:
    for text in ODD:
        (tmp_path / LAST_ENGINES).write_bytes(text if isinstance(text, bytes) else text.encode())
        found = of(tmp_path).now()
        assert found["rows"] == [] and found["problem"].startswith(f"{LAST_ENGINES}: "), text
    odd = (
        '{"time": NaN, "engines": [{"rank": 1e999, "since": true, "state": 5, "failure": "%s", "key": "k"}]}'
    )
    (tmp_path / LAST_ENGINES).write_text(odd % ("x" * 1000))
    app = dashboard(runs_of([str(tmp_path)]), "secret", "127.0.0.1")
    answer = TestClient(app, base_url="http://127.0.0.1:8899").get("/secret/api/engines")
    found = answer.json()[tmp_path.name]
    (row,) = found["rows"]
    assert found["time"] is None and row["rank"] is row["since"] is None and row["state"] == "5"
    assert len(row["failure"]) == 500 and "key" not in row
