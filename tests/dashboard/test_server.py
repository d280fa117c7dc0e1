"""Whoever has the key sees the runs; nobody else sees anything."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from slime.dashboard.run import Run
from slime.dashboard.server import dashboard
from slime.observability.jsonl import JsonlWriter

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "slime/dashboard/page"


@pytest.fixture
def client(tmp_path):
    JsonlWriter(tmp_path / "metrics.jsonl").write(
        "rollout", 3, {"rollout/raw_reward": 0.5, "perf/step_time": 2.0}
    )
    runs = [Run("one", tmp_path / "metrics.jsonl"), Run("not begun", tmp_path / "other.jsonl")]
    return TestClient(dashboard(runs, "secret", "127.0.0.1"), base_url="http://127.0.0.1:8899")


def test_runs_curves_and_seconds(client) -> None:
    one, other = client.get("/secret/api/runs").json()
    assert one["ends"] == {"rollout": 3} and one["problem"] is None
    assert one["alerts"] == other["alerts"] == []
    assert one["metrics"]["rollout/raw_reward"] == {"axis": "rollout", "last": 0.5}
    assert other["metrics"] == {} and other["problem"].endswith("/other.jsonl: not there yet")
    curves = client.get("/secret/api/curves", params={"metric": "rollout/raw_reward"}).json()
    assert curves == {"one": [[3, 0.5]], "not begun": []}
    assert client.get("/secret/api/seconds").json() == {"one": {"step": 2.0}, "not begun": {}}


def test_the_page_loads_only_what_is_served(client) -> None:
    page = client.get("/secret/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["Content-Security-Policy"]
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) == 12
    for name in named:
        if name != "data:,":
            assert client.get(f"/secret/{name}").status_code == 200, name
    scripts = {file.name: file.read_text() for file in PAGE.glob("*.js") if "uPlot" not in file.name}
    assert set(scripts) < set(named)
    assert all("http" not in text and "innerHTML" not in text for text in (page.text, *scripts.values()))
    asked = {name for text in scripts.values() for name in re.findall(r'ask\([`"](\w+)', text)}
    paths = [route.path for route in client.app.routes]
    assert asked == {path.rpartition("/")[2] for path in paths if "/api/" in path}


WRONG = {
    "samples?run=none&step=0": "run 'none': not shown (wanted: one of one, not begun)",
    "samples?run=one": "step: None (wanted: a number from 0 to 1000000000)",
    "samples?run=one&step=-1": "step: '-1' (wanted",
    "samples?run=one&step=9999999999999999999999": "step: '9999999999999999999999' (wanted",
    f"samples?run=one&step={'0' * 12}{'9' * 5000}": "step: '000000000000999",
    "samples?run=one&step=%D9%A3": "step: '\u0663' (wanted",
    "samples?run=one&step=0&start=x": "start: 'x' (wanted",
    "sample?run=one&step=0": "number: None (wanted",
    "trace?run=one&step=7": "step 7: not in the trace (wanted",
}


def test_wrong_questions_are_refused_by_name(client) -> None:
    for question, told in WRONG.items():
        answer = client.get(f"/secret/api/{question}")
        assert answer.status_code == 400 and answer.json()["error"].startswith(told), question


def test_what_is_not_recorded_is_said(client) -> None:
    answer = client.get("/secret/api/samples?run=one&step=4")
    assert (answer.status_code, answer.json()) == (422, {"error": "rollout 4: no recording of it"})
    nothing = {"count": 0, "steps": [], "trained": False}
    assert client.get("/secret/api/recordings").json() == {"one": nothing, "not begun": nothing}
    assert client.get("/secret/api/traces").json()["one"] == {"count": 0, "steps": [], "read": 1.0}


def test_engines_and_ledger_are_tables_of_the_last_steps(tmp_path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(30):
        writer.write("rollout", step, {"fleet/default/replaced": step // 20, "rollout/raw_reward": 1.0})
        if step % 10 == 0:
            writer.write("rollout", step, {"rollout/dropped/aborted": 2})
    run = Run("one", tmp_path / "metrics.jsonl")
    run.summary(60)
    tables = run.tables()
    assert tables["engines"]["names"] == ["fleet/default/replaced"]
    assert tables["engines"]["rows"] == [[step, float(step // 20)] for step in range(10, 30)]
    assert tables["ledger"]["names"] == ["rollout/dropped/aborted"]
    assert tables["ledger"]["totals"] == [6] and tables["ledger"]["rows"] == [
        [step, 2] for step in (0, 10, 20)
    ]


@pytest.mark.parametrize(
    "path", ["/", "/wrong/", "/wrong/api/runs", "/api/runs", "/page.js", "/secre/", "/%FF/"]
)
def test_without_the_key_there_is_nothing(client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and answer.text == "not found"


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
def test_pages_of_other_sites_are_refused(client, headers: dict[str, str]) -> None:
    assert client.get("/secret/api/runs", headers=headers).status_code == 403


@pytest.mark.parametrize(
    "path", ["/secret/../server.py", "/secret/%2e%2e/server.py", "/secret/uPlot.LICENSE"]
)
def test_no_other_file_is_served(client, path: str) -> None:
    assert client.get(path).status_code == 404
