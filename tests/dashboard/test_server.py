"""Whoever has the key sees the runs; nobody else sees anything."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from slime.dashboard.server import Run, dashboard
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
    assert one["metrics"]["rollout/raw_reward"] == {"axis": "rollout", "last": 0.5}
    assert other["metrics"] == {} and other["problem"].endswith("/other.jsonl: not there yet")
    curves = client.get("/secret/api/curves", params={"metric": "rollout/raw_reward"}).json()
    assert curves == {"one": [[3, 0.5]], "not begun": []}
    assert client.get("/secret/api/seconds").json() == {"one": {"step": 2.0}, "not begun": {}}


def test_the_page_loads_only_what_is_served(client) -> None:
    page = client.get("/secret/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["Content-Security-Policy"]
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) == 5
    for name in named:
        if name != "data:,":
            assert client.get(f"/secret/{name}").status_code == 200, name
    assert "http" not in page.text and "http" not in (PAGE / "page.js").read_text()
    asked = set(re.findall(r'ask\([`"](\w+)', (PAGE / "page.js").read_text()))
    assert asked == {"runs", "curves", "seconds"}


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
