"""``slime chat`` talks to a real engine, and lets no text control the terminal."""

import io
import sys
from contextlib import nullcontext

import pytest

from slime.cli import chat
from slime.cli.chat import harmless
from slime.cli.main import main
from tests.engines import free_port
from tests.engines.embedded import Server, make_checkpoint
from tests.page_runs import printed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("served")
    make_checkpoint(path)
    server = Server(path).wait_ready()
    yield server
    server.stop()


def test_each_line_gets_an_answer_until_the_input_ends(server, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n/reset\nagain\n/quit\nnever\n"))
    words = ["chat", server.url, "--max-tokens", "8", "--temperature", "1", "--system", "Be brief."]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.count("model  ") == 2 and out.count("you    ") == 5
    assert all(letter.isprintable() or letter == "\n" for letter in out)


def test_commands_of_pages_talk(server, monkeypatch, capsys) -> None:
    """A server at the address, or one that would be started for the directory."""

    def there(model: str) -> object:
        return nullcontext(server.url)

    monkeypatch.setattr(chat, "served", there)
    monkeypatch.setenv("SLIME_API_KEY", "k")  # of a run that is asked
    commands = printed("slime chat")
    assert len(commands) > 5
    for command in commands:
        monkeypatch.setattr(sys, "stdin", io.StringIO("/system\n"))
        assert main([*command.words[1:]]) == 0
        assert ("Answer in one word." in capsys.readouterr().out) is ("--system" in command.words)


@pytest.mark.nightly
def test_a_directory_is_served_and_talked_to(tmp_path, monkeypatch, capsys) -> None:
    make_checkpoint(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", str(tmp_path), "--max-tokens", "4"]) == 0
    out = capsys.readouterr()
    assert "loading the model ..." in out.err and f"{tmp_path} at http://127.0.0.1:" in out.out
    assert out.out.count("model  ") == 1


def test_a_server_that_refuses_is_told(server, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", server.url, "--max-tokens", "-3"]) == 1
    assert f"error: {server.url}: answers 400" in capsys.readouterr().err


def test_a_place_without_a_model_or_a_server_is_named(tmp_path, capsys) -> None:
    assert main(["chat", str(tmp_path)]) == 1
    assert "no config.json there (wanted: http://HOST:PORT" in capsys.readouterr().err
    assert main(["chat", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "refused" in capsys.readouterr().err


def test_what_controls_a_terminal_is_shown_by_its_code() -> None:
    assert harmless("a\x1b]0;title\x07\x9b2J\r\u202e\nz") == "a\\x1b]0;title\\x07\\x9b2J\\r\\u202e\nz"
