"""The server by which ``slime engines`` reaches a run, and the command."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime.cli.main import main
from slime.config.engines import CONTROL_FILE
from slime.config.run import run_config
from slime.ray import engine_control as engine_control_module
from slime.ray.engine import MembershipError
from slime.ray.engine_control import engine_control
from slime.ray.engine_rows import EngineRow
from slime.ray.losses import RolloutSideLost
from tests.each import hold_each
from tests.page_runs import printed
from tests.run_args import run_args

MEASURED: dict[str, Any] = {
    **{"since": 1000.0, "version": "7", "health": "answers", "running": 2, "waiting": 0},
    "tokens_per_second": 31.5,
}


class Rollout:
    """A fleet of two that says no to the last."""

    def __init__(self) -> None:
        self.rows = [
            EngineRow("default", rank, "regular", "serving", f"http://engine{rank}", **MEASURED)
            for rank in (0, 1)
        ]
        self.asked: list[tuple[object, ...]] = []
        self.looks_until_gone = 2
        self.lost = False
        self.starts: list[str] = []  # states of what was added, at each look

    def ask_fleet(self, method: str, *arguments: Any, timeout: float = 0) -> Any:
        if self.lost:
            raise RolloutSideLost("the process of rank 0 ended")
        self.asked.append((method, *arguments))
        if method == "rows":
            self.looks_until_gone -= 1
            if self.looks_until_gone <= 0 and ("drain", [1], 5.0, 0.0) in self.asked:
                self.rows[1] = EngineRow("default", 1, "", "free", "", 1e9, failure="killed", failed=1e9)
            if self.starts:
                self.rows[2:] = [replace(row, state=self.starts.pop(0)) for row in self.rows[2:]]
            return self.rows
        if method == "add":
            if arguments[0] > 2:
                raise MembershipError("3 more of model default: 2 of its places are free")
            self.rows += [EngineRow("default", 2 + n, "regular", "starting", "") for n in range(arguments[0])]
            return [2 + n for n in range(arguments[0])]
        if arguments[0] == [0]:
            raise MembershipError("engine 0 is the last of model default that serves")
        return None


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Rollout:
    monkeypatch.setattr(engine_control_module, "with_loads", lambda rows, api_key, timeout: rows)
    monkeypatch.setattr(engine_control_module, "recording", lambda path, look: nullcontext())
    return Rollout()


@pytest.fixture
def run_dir(tmp_path: Path, rollout: Rollout) -> Iterator[Path]:
    with engine_control(run_config(run_args(save=str(tmp_path))), rollout):  # type: ignore[arg-type]
        yield tmp_path


def test_the_file_is_there_as_long_as_the_run_and_for_its_owner_alone(
    tmp_path: Path, rollout: Rollout
) -> None:
    config = run_config(run_args(save=str(tmp_path)))
    with engine_control(config, rollout):  # type: ignore[arg-type]
        file = tmp_path / CONTROL_FILE
        assert file.stat().st_mode & 0o777 == 0o600
        url = json.loads(file.read_text())["url"]
        assert httpx.get(f"{url}/engines").status_code == 401
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.parametrize("flags", [{}, {"debug_train_only": True, "save": "d"}])
def test_a_run_without_a_directory_or_engines_has_none(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: Rollout
) -> None:
    monkeypatch.chdir(tmp_path)
    with engine_control(run_config(run_args(**flags)), rollout):  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []


def test_engines_of_somebody_else_are_listed(tmp_path: Path, rollout: Rollout, capsys) -> None:
    config = run_config(run_args(save=str(tmp_path), rollout_external=True))
    with engine_control(config, rollout):  # type: ignore[arg-type]
        assert main(["engines", "list", str(tmp_path)]) == 0
    assert "http://engine0" in capsys.readouterr().out


def test_only_who_has_the_key_is_answered_and_only_what_was_meant(run_dir: Path, rollout: Rollout) -> None:
    told = json.loads((run_dir / CONTROL_FILE).read_text())
    key = {"Authorization": f"Bearer {told['key']}"}

    def answered(status: int, method: str, path: str, headers: dict[str, str], body: str = "") -> None:
        answer = httpx.request(method, told["url"] + path, headers=headers, content=body or None)
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]

    listing, drain, add = ("GET", "/engines"), ("POST", "/engines/drain"), ("POST", "/engines/add")
    rows: list[tuple[Any, ...]] = [
        (401, *listing, {}),
        (401, *listing, {"Authorization": "Bearer x"}),
        (401, *drain, {}, "{}"),
        (403, *listing, key | {"Origin": "http://else.where"}),
        (403, *listing, key | {"Host": "else.where"}),
        (413, *drain, key, "x" * 70000),
        (404, "GET", "/", key),
        (400, *drain, key, "{"),
        (400, *drain, key, "[]"),
        (400, *drain, key, "[" * 50_000),
        (400, *drain, key, '{"engines": [], "seconds": 1}'),
        (400, *drain, key, '{"engines": [true], "seconds": 1}'),
        (400, *drain, key, '{"engines": [1]}'),
        (400, *drain, key, '{"engines": [1], "seconds": true}'),
        (400, *drain, key, '{"engines": [1], "seconds": -1}'),
        (400, *drain, key, '{"engines": [1], "seconds": NaN}'),
        (400, *drain, key, '{"engines": [1], "seconds": 1, "notice": -1}'),
        (401, *add, {}, '{"count": 1}'),
        (400, *add, key, "{}"),
        (400, *add, key, '{"count": 0}'),
        (400, *add, key, '{"count": true}'),
        (400, *add, key, '{"count": 1e9}'),
        (400, *add, key, '{"count": 1, "model": 1}'),
    ]
    hold_each(rows, lambda row: answered(*row))
    assert rollout.asked == []
    answered(200, *listing, key)


def test_a_rollout_side_that_is_lost_is_told(run_dir: Path, rollout: Rollout, capsys) -> None:
    rollout.lost = True
    assert main(["engines", "list", str(run_dir)]) == 1
    error = "error: the rollout side does not answer: the process of rank 0 ended\n"
    assert capsys.readouterr().err == error


def test_the_command_lists_and_drains_as_printed(run_dir: Path, rollout: Rollout, capsys) -> None:
    for command in printed("slime engines"):
        here = {"outputs/run": str(run_dir), "RUN_DIR": str(run_dir), "10.0.0.5": "engine1"}
        words = [here.get(word, word) for word in command.words]
        assert main(words[1:]) == 0, command
    assert ("drain", [1], 60.0, 0.0) in rollout.asked and ("drain", [1], 60.0, 120.0) in rollout.asked
    assert ("add", 2, "") in rollout.asked
    rollout.rows[2:] = []
    assert main(["engines", "drain", str(run_dir), "1", "--seconds", "5", "--wait", "60"]) == 0
    capsys.readouterr()
    assert main(["engines", "list", str(run_dir)]) == 0
    head, first, second, failure = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[:6] == ["engine", "model", "state", "since", "health", "weights"]
    assert head[6:] == ["running", "waiting", "tokens/s", "address"]
    assert first[:3] == ["0", "default", "serving"] and first[3] in ("1970-01-01", "1969-12-31")
    assert first[5:] == ["answers", "7", "2", "0", "31.5", "http://engine0"]
    assert second[:3] == ["1", "default", "free"] and len(second) == 5
    assert failure[:4] == ["engine", "1", "failed", "at"] and failure[-1] == "killed"
    assert main(["engines", "list", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["url"] == "http://engine0"


def test_what_an_engine_said_cannot_control_the_terminal(run_dir: Path, rollout: Rollout, capsys) -> None:
    said = "\x1b]0;title\x07\x9b2J\nengine 9 serves"
    texts = dict.fromkeys(("model", "kind", "state", "url", "version", "health", "failure"), said)
    rollout.rows = [EngineRow(rank=0, failed=1e9, **texts)]
    assert main(["engines", "list", str(run_dir)]) == 0
    told = capsys.readouterr().out
    assert told.count("\\x1b]0;title\\x07\\x9b2J\\nengine 9 serves") == 7
    assert told.replace("\n", "").isprintable() and len(told.splitlines()) == 3
    assert main(["engines", "list", str(run_dir), "--json"]) == 0
    assert json.loads(told := capsys.readouterr().out)["failure"] == said and told.count("\n") == 1


def test_the_command_adds_and_waits_until_they_serve(run_dir: Path, rollout: Rollout, capsys) -> None:
    rollout.starts = ["starting", "ready, joins with the next update", "serving"]
    assert main(["engines", "add", str(run_dir), "1", "--model", "default", "--wait", "60"]) == 0
    assert capsys.readouterr().out == "starting: 2\nserving: 2\n"
    assert ("add", 1, "default") in rollout.asked
    assert main(["engines", "add", str(run_dir), "3"]) == 1
    assert capsys.readouterr().err == "error: 3 more of model default: 2 of its places are free\n"


def test_one_that_ends_while_it_starts_is_told(run_dir: Path, rollout: Rollout, capsys) -> None:
    rollout.starts = ["starting", "free"]
    assert main(["engines", "add", str(run_dir), "--wait", "60"]) == 1
    assert "error: ended while they started: 2" in capsys.readouterr().err
    rollout.rows[2:] = []
    assert main(["engines", "add", str(run_dir), "--wait", "0"]) == 1
    assert capsys.readouterr().err == "error: not serving after 0 s: 2\n"


def test_a_refusal_and_a_wait_that_ends_are_told(run_dir: Path, rollout: Rollout, capsys) -> None:
    assert main(["engines", "drain", str(run_dir), "0"]) == 1
    assert capsys.readouterr().err == "error: engine 0 is the last of model default that serves\n"
    assert main(["engines", "drain", str(run_dir), "--host", "10.0.0.7"]) == 1
    told = "error: --host 10.0.0.7: no engine is there (wanted: one of engine0, engine1)\n"
    assert capsys.readouterr().err == told
    for words in ([], ["1", "--host", "engine1"]):
        assert main(["engines", "drain", str(run_dir), *words]) == 1
        assert capsys.readouterr().err == "error: wanted: numbers of engines, or --host\n"
    assert main(["engines", "drain", str(run_dir), "1", "--wait", "0"]) == 1
    assert capsys.readouterr().err == "error: not gone after 0 s: 1\n"


def test_without_a_run_that_goes_on_the_command_says_so(tmp_path: Path, rollout: Rollout, capsys) -> None:
    assert main(["engines", "list", str(tmp_path)]) == 1
    assert f"{tmp_path}: has no engines.json" in capsys.readouterr().err
    (tmp_path / "resolved.yaml").write_text(f"save: {tmp_path}/checkpoints\n")
    (tmp_path / "checkpoints").mkdir()
    with engine_control(run_config(run_args(save=f"{tmp_path}/checkpoints")), rollout):  # type: ignore[arg-type]
        left = (tmp_path / "checkpoints" / CONTROL_FILE).read_text()
        assert main(["engines", "list", str(tmp_path)]) == 0
    (tmp_path / CONTROL_FILE).write_text(left)  # of a run that was killed
    assert main(["engines", "list", str(tmp_path)]) == 1
    assert "the run does not answer at http://127.0.0.1:" in capsys.readouterr().err
    elsewhere = (
        "http://10.0.0.1:80",
        "http://127.0.0.1@10.0.0.1:80",
        "https://127.0.0.1:1",
        "http://127.0.0.1",
    )
    texts = ["{}", "[]", "[" * 50_000, *(json.dumps({"url": url, "key": "hidden"}) for url in elsewhere)]
    for text in texts:
        (tmp_path / CONTROL_FILE).write_text(text)
        assert main(["engines", "list", str(tmp_path)]) == 1
        told = capsys.readouterr().err
        assert "engines.json is not one of a run" in told and "hidden" not in told
