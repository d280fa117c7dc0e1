"""The helper that fetches weights answers who has its key, and fetches to one directory alone."""

import http.client
import json
import threading

import pytest

from slime.weight_sync.versions import puller
from slime.weight_sync.versions.manifest import directory_of
from slime.weight_sync.versions.puller import PullServer, asked
from tests.weight_sync.publisher import Publisher, require_equal

HERE = {"local_checkpoint_dir": "/local", "source_dir": "/source", "target_version": 0}


@pytest.fixture
def started(tmp_path):
    """A function that starts a helper with a key, and gives a way to ask it: status and content."""
    servers = []

    def start(key):
        server = PullServer("127.0.0.1", 0, tmp_path / "local", key)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))

        def ask(method, path, body=b"", **headers):
            connection = http.client.HTTPConnection(*server.server_address, timeout=60)
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            assert answer.headers["Content-Length"] == str(len(content))
            assert answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(content)

        return ask

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def pull_request(tmp_path, **changes):
    body = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(tmp_path / "shared")}
    return json.dumps(body | {"target_version": 1} | changes).encode()


def test_a_version_is_fetched_for_who_has_the_key(started, tmp_path, capsys):
    (tmp_path / "shared").mkdir()
    publisher = Publisher(tmp_path / "shared")
    publisher.publish(1)
    ask, body = started("k"), pull_request(tmp_path)
    assert ask("POST", "/pull_weights", body)[0] == 401
    status, refused = ask("POST", "/pull_weights", body, Authorization="Bearer wrong")
    assert (status, refused["success"]) == (401, False) and not (tmp_path / "local").exists()
    status, answer = ask("POST", "/pull_weights", body, Authorization="Bearer k")
    assert (status, answer["success"]) == (200, True)
    assert answer["path"] == str(directory_of(tmp_path / "local", 1))
    require_equal(answer["path"], publisher.kept[1])
    assert '"POST /pull_weights HTTP/1.1" 200' in capsys.readouterr().out


def test_without_a_key_everyone_on_this_machine_is_answered_and_no_page_of_the_web(started, tmp_path):
    ask = started(None)
    assert ask("GET", "/health") == (200, {"status": "ok"})
    assert ask("GET", "/elsewhere") == (404, {})
    status, answer = ask("POST", "/health", pull_request(tmp_path))
    assert (status, answer) == (404, {"success": False, "message": "/health: not here"})
    status, _ = ask("POST", "/pull_weights", pull_request(tmp_path), Origin="http://elsewhere.example")
    assert status == 403
    status, answer = ask("POST", "/pull_weights", pull_request(tmp_path))
    assert (status, answer["success"]) == (400, False)
    assert "weight_v000001: is no version of weights" in answer["message"]
    status, answer = ask("POST", "/pull_weights", pull_request(tmp_path, local_checkpoint_dir="/else"))
    assert (status, answer["success"]) == (400, False)
    assert answer["message"] == f"local_checkpoint_dir /else (wanted: {tmp_path / 'local'})"


def test_bodies_are_read_up_to_a_limit(started, tmp_path, monkeypatch):
    ask, body = started(None), pull_request(tmp_path)
    monkeypatch.setattr(puller, "_MAX_BYTES", len(body))
    assert "is no version" in ask("POST", "/pull_weights", body)[1]["message"]
    for wrong, said in (
        (body + b" ", f"body: {len(body) + 1} bytes (wanted: at most {len(body)})"),
        (b"", "body: 0 bytes"),
        (b"[]", "body: wanted a JSON object"),
        (b"{", "body: "),
    ):
        status, answer = ask("POST", "/pull_weights", wrong)
        assert (status, answer["success"]) == (400, False) and answer["message"].startswith(said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_version": -1}, "target_version -1"),
        ({"target_version": "1"}, "target_version '1'"),
        ({"target_version": None}, "target_version None"),
        ({"source_dir": "relative"}, "source_dir 'relative'"),
        ({"source_dir": "s3://k:secret@bucket/run7"}, "source_dir s3://...: has a user or a password in it"),
        ({"local_checkpoint_dir": 7}, "local_checkpoint_dir 7"),
        ({"local_checkpoint_dir": "s3://bucket/run7"}, "local_checkpoint_dir 's3://bucket/run7'"),
    ],
)
def test_what_is_asked_for_wrongly_is_named(changes, said):
    with pytest.raises(ValueError, match=rf"^{said} \(wanted: "):
        asked(HERE | changes)
    local, source, version = asked(HERE)
    assert (str(local), source, version) == ("/local", "/source", 0)
    assert asked(HERE | {"source_dir": "s3://bucket/run7"})[1] == "s3://bucket/run7"


def test_beyond_loopback_it_does_not_start_without_a_key(capsys):
    with pytest.raises(SystemExit):
        puller.main(["--port", "0", "--local-checkpoint-dir", "/local", "--host", "0.0.0.0"])
    assert "--host 0.0.0.0: an API key is required beyond loopback" in capsys.readouterr().err


def test_its_command_says_where_it_serves(monkeypatch):
    made = []

    class Noted(PullServer):
        def __init__(self, *arguments):
            made.append(arguments)

        def serve_forever(self):
            made.append("serves")

    monkeypatch.setattr(puller, "PullServer", Noted)
    puller.main(["--port", "7", "--local-checkpoint-dir", "/local"])
    puller.main(["--port", "7", "--local-checkpoint-dir", "/local", "--host", "0.0.0.0", "--api-key", "k"])
    (_, _, local, _), *_ = made
    assert made == [
        *(("127.0.0.1", 7, local, None), "serves"),
        *(("0.0.0.0", 7, local, "k"), "serves"),
    ]
    assert str(local) == "/local"


@pytest.mark.parametrize("name", ["--port", "--local-checkpoint-dir"])
def test_its_command_needs_a_port_and_a_place(name, capsys):
    words = {"--port": "7", "--local-checkpoint-dir": "/local"}
    del words[name]
    with pytest.raises(SystemExit):
        puller.main([word for pair in words.items() for word in pair])
    assert name in capsys.readouterr().err
