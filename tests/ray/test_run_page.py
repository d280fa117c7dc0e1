"""``--dashboard``: the page is there while the run is, for whoever may read its address."""

from pathlib import Path

import httpx
import psutil
import pytest

from slime.config.run import run_config
from slime.observability.jsonl import JsonlWriter
from slime.observability.tracking import metrics_path
from slime.ray.run_page import ADDRESS, LOG, run_page
from tests.ray.stand_ins import wait_until
from tests.run_args import run_args


def command_lines() -> str:
    return " ".join(word for child in psutil.Process().children(recursive=True) for word in child.cmdline())


@pytest.mark.parametrize("place", ["save", "metrics_file"])
def test_the_page_of_a_run_is_there_as_long_as_the_run(tmp_path: Path, capsys, place: str) -> None:
    where = {"save": tmp_path, "metrics_file": tmp_path / "numbers.jsonl"}[place]
    config = run_config(run_args(dashboard=True, **{place: str(where)}))
    JsonlWriter(metrics_path(config)).write("rollout", 4, {"rollout/raw_reward": 0.5})
    (tmp_path / ADDRESS).write_text("http://of.a.run.that.was.killed/")
    with run_page(config):
        wait_until((tmp_path / ADDRESS).exists)
        url = (tmp_path / ADDRESS).read_text().strip()
        assert (tmp_path / ADDRESS).stat().st_mode & 0o777 == 0o600
        (shown,) = httpx.get(f"{url}api/runs", timeout=60).json()
        assert (shown["name"], shown["ends"]) == (where.name, {"rollout": 4})
        key = url.rstrip("/").rpartition("/")[2]
        assert "slime.cli" in command_lines() and key not in command_lines()
    assert not (tmp_path / ADDRESS).exists() and "slime.cli" not in command_lines()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    told = capsys.readouterr().out + (tmp_path / LOG).read_text()
    assert f"its address is in {tmp_path / ADDRESS}" in told and key not in told


def test_without_the_flag_there_is_no_page(tmp_path) -> None:
    with run_page(run_config(run_args(save=str(tmp_path)))):
        assert list(tmp_path.iterdir()) == []
