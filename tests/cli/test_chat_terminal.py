"""``slime chat`` in a terminal: keys that edit, stop and leave, and what a server refuses."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from slime.cli.main import main
from tests.cli.chat_stub import CONTEXT, ENDLESS, FULL, KEY, ChatStub, chat_stub
from tests.engines import free_port

UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"
PROMPT = "\nyou    "
_IN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a script would ignore it
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # whose Ctrl-C is a signal
from slime.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def stub() -> Iterator[ChatStub]:
    with chat_stub() as server:
        yield server


class Terminal:
    """``slime chat`` with the keys of a person, and what that person sees."""

    def __init__(self, *words: str) -> None:
        self._keys, theirs = pty.openpty()
        command = [sys.executable, "-c", _IN_TERMINAL, "chat", *words]
        env = {**os.environ, "TERM": "dumb", "SLIME_TEST_KEY": KEY}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)

    def press(self, keys: str) -> None:
        os.write(self._keys, keys.encode())

    def see(self, wanted: str, timeout: float = 60) -> str:
        """What comes up to ``wanted``, without that."""
        seen, deadline = "", time.monotonic() + timeout
        while not seen.endswith(wanted):
            ready = select.select([self._keys], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"no {wanted!r} in {seen!r}"
            seen += os.read(self._keys, 1).decode(errors="replace").replace("\r", "")
        return seen.removesuffix(wanted)

    def ask(self, line: str) -> str:
        """What is said to a line."""
        self.press(f"{line}\n")
        return self.see(f"\n{PROMPT}").partition("\n")[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keys)


@pytest.fixture(scope="module")
def terminal(stub: ChatStub) -> Iterator[Terminal]:
    terminal = Terminal(f"{stub.url}/v1", "--key-variable", "SLIME_TEST_KEY", "--system", "Be brief.")
    assert f"stub at {stub.url}; /help says what may be typed, Ctrl-D leaves." in terminal.see(PROMPT)
    yield terminal
    terminal.close()


SYSTEM = "model  system: 'Be brief.'"


def test_lines_come_back_by_the_arrow_and_are_edited(terminal) -> None:
    assert terminal.ask("one") == f"{SYSTEM} | user: 'one'"
    assert terminal.ask("/reset") == "What was said is forgotten."
    assert terminal.ask(f"{UP}{UP}, two\b\b\bten") == f"{SYSTEM} | user: 'one, ten'"


def test_what_the_model_is_told_first_can_be_changed_and_a_wrong_command_is_told(terminal) -> None:
    assert "/reset" in terminal.ask("/help") and "Ctrl-C" in terminal.ask("/help")
    assert terminal.ask("/rest") == "/rest is no command: /help has them."
    assert terminal.ask("/system Be long.") == "What was said is forgotten."
    assert terminal.ask("/etc/hosts") == "model  system: 'Be long.' | user: '/etc/hosts'"
    assert terminal.ask("/system") == "The model is told first: Be long."
    assert terminal.ask("/system Be brief.") == "What was said is forgotten."


def test_a_line_goes_on_after_a_backslash(terminal) -> None:
    terminal.ask("/reset")
    assert terminal.ask("a\\\nb").endswith("user: 'a\\nb'")


def test_ctrl_c_stops_an_answer_and_drops_a_line_and_the_conversation_goes_on(terminal, stub) -> None:
    terminal.ask("/reset")
    terminal.press(f"{ENDLESS}\n")
    terminal.see("counting..")
    terminal.press(CTRL_C)
    assert terminal.see(" (stopped)").strip(".") in ("", "^C")
    terminal.see("you    ")  # the kernel may show the ^C only now
    assert stub.left.wait(60)  # the server need not go on
    terminal.press(f"never{CTRL_C}")
    terminal.see("(Ctrl-D leaves)")
    terminal.see("you    ")
    heard = terminal.ask("again")
    assert heard.startswith(f"{SYSTEM} | user: '{ENDLESS}' | assistant: 'counting..")
    assert heard.endswith(" | user: 'again'") and "never" not in heard


def test_a_full_context_is_told_and_the_question_is_not_part_of_the_conversation(terminal) -> None:
    terminal.ask("/reset")
    told = terminal.ask(FULL)
    assert "error: the model's context is full: /reset forgets what was said" in told
    assert told.endswith("(answers 400: 900 prompt tokens exceed the context of 8 tokens)")
    # One answer does not fill a small context: by default it has a quarter of it.
    cut = f"(cut off: --max-tokens {CONTEXT // 4}, or the end of its context)"
    assert terminal.ask("cut").endswith(cut)
    assert FULL not in terminal.ask("and now")


def test_the_end_of_input_leaves(stub) -> None:
    terminal = Terminal(stub.url, "--key-variable", "SLIME_TEST_KEY")
    terminal.see(PROMPT)
    terminal.press(CTRL_D)
    assert terminal.process.wait(60) == 0
    terminal.close()


def test_a_server_that_wants_a_key_or_is_none_is_told(stub, monkeypatch, capsys) -> None:
    def told(*words: str) -> str:
        assert main(["chat", *words]) == 1
        return capsys.readouterr().err

    monkeypatch.setenv("WRONG", "x")
    assert "wants a key: --key-variable NAME takes it from the environment (answers 401" in told(stub.url)
    assert "wants another key" in told(stub.url, "--key-variable", "WRONG")
    assert "--key-variable NONE: not set (wanted: export NONE=KEY)" in told(
        stub.url, "--key-variable", "NONE"
    )
    url = f"http://127.0.0.1:{free_port()}"
    assert told(url).startswith(f"error: {url}: nobody answers there: ")
    assert "is no address" in told("http://")
