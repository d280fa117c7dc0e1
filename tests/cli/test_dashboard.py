"""``slime dashboard`` as a person starts it."""

import socket
import subprocess
import sys
from pathlib import Path

import httpx

from slime.arguments.core.config_entries import RECORD
from slime.cli.dashboard import run, runs_of
from tests.page_runs import printed


def test_commands_of_pages_serve_until_they_are_interrupted(tmp_path) -> None:
    longest = max(printed("slime dashboard"), key=lambda command: len(command.words))
    for place in longest.words[2:]:
        (tmp_path / place).mkdir(parents=True)
        row = '{"axis": "rollout", "step": 0, "time": 1.0, "a": 2}'
        (tmp_path / place / "metrics.jsonl").write_text(f"{row}\n")
    command = [sys.executable, "-m", "slime.cli", *longest.words[1:], "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            url = process.stdout.readline().strip()
            runs = httpx.get(f"{url}api/runs", timeout=60).json()
            assert [run["name"] for run in runs] == ["run", "other-run"]
            assert runs[0]["metrics"]["a"]["last"] == 2
        finally:
            process.send_signal(2)
        assert process.wait(60) == 0


def test_the_page_is_there_before_anything_is_imported_that_only_samples_or_runs_need() -> None:
    heavy = ("numpy", "torch", "ray", "tokenizers", "slime.arguments.registry")
    code = f"import sys, slime.cli.dashboard; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_what_is_not_there_and_a_port_that_is_taken_are_named(tmp_path, capsys) -> None:
    assert run([str(tmp_path / "none")]) == 2
    assert (
        capsys.readouterr().err == f"error: {tmp_path / 'none'}: not there (wanted: the directory of a run)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run([str(tmp_path), "--port", str(port)]) == 2
        assert f"--host 127.0.0.1 --port {port}: " in capsys.readouterr().err
    for asked in (["--port", "70000"], ["--host", "no.such.host.invalid"]):
        assert run([str(tmp_path), *asked]) == 2
        assert " ".join(asked) in capsys.readouterr().err


def test_runs_have_names_that_tell_them_apart(tmp_path) -> None:
    places = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"]
    for place in places:
        place.mkdir(parents=True)
    names = [run.name for run in runs_of([str(place) for place in [*places, places[2]]])]
    assert names == [str(places[0]), str(places[1]), "other"]


def test_links_and_other_spellings_have_names_that_tell_them_apart(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("here/z", "q/z", "w/run"):
        Path(place).mkdir(parents=True)
    Path("run").symlink_to("here/z")
    assert [run.name for run in runs_of(["w/run", "w/run/", "./w/run"])] == ["run"]
    names = [run.name for run in runs_of(["run", "q/z", "w/run"])]
    assert names == [str(Path("here/z").resolve()), "q/z", "run"]


def test_the_metrics_are_where_the_record_of_the_run_says(tmp_path) -> None:
    (tmp_path / RECORD).write_text("metrics_file: elsewhere.jsonl\n")
    (shown,) = runs_of([str(tmp_path)])
    assert shown.path == Path("elsewhere.jsonl")
