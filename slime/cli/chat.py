"""``slime chat``: talks to a model in the terminal, behind a URL or in a directory."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from slime.processes.child import ManagedProcess
from slime.utils.addresses import find_available_port

_FIRST_PORT = 31_000
_START_SECONDS, _CONNECT_SECONDS = 600.0, 30.0
_HELP = "/reset forgets what was said, /quit or the end of input leaves"
Message = dict[str, str]


class ChatFailed(RuntimeError):
    """The server cannot be reached, or refuses."""


def run(words: Sequence[str]) -> int:
    """Reads lines and prints answers, until the input ends."""
    parser = argparse.ArgumentParser("slime chat", description=f"{__doc__} {_HELP}.", allow_abbrev=False)
    parser.add_argument(
        "model", help="http://HOST:PORT of an engine or a router, or a checkpoint's directory"
    )
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer")
    parser.add_argument(
        "--key-variable", metavar="NAME", help="variable of the environment with the server's key"
    )
    args = parser.parse_args(words)
    try:
        with _served(args.model) as url:
            _talk(_Model(url, args))
    except (ChatFailed, httpx.HTTPError, OSError) as error:
        print(f"error: {args.model}: {harmless(str(error))}", file=sys.stderr)
        return 1
    return 0


def _talk(model: "_Model") -> None:
    print(f"{model.name} at {model.url}: {_HELP}.")
    while True:
        try:
            line = input("\nyou    ")
        except EOFError:
            print()
            return
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            model.reset()
        elif line.strip():
            print("model  ", end="", flush=True)
            for piece in model.answer(line):
                print(harmless(piece), end="", flush=True)
            print()


def harmless(text: str) -> str:
    """The text without what could control the terminal: such characters are shown by their codes."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text
    )


class _Model:
    """A conversation with a server that speaks OpenAI's protocol."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self.url, self._args = url.rstrip("/"), args
        key = os.environ.get(args.key_variable or "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False)
        self.name = self._first_model()
        self.reset()

    def reset(self) -> None:
        """Forgets what was said."""
        system = self._args.system
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def _first_model(self) -> str:
        answer = self._client.get(f"{self.url}/v1/models")
        if answer.status_code != 200:
            raise ChatFailed(f"/v1/models answers {answer.status_code}: {answer.text[:300]}")
        return str(answer.json()["data"][0]["id"])

    def answer(self, text: str) -> Iterator[str]:
        """Yields what the model says, as it comes."""
        self._messages.append({"role": "user", "content": text})
        body = {
            "model": self.name,
            "messages": self._messages,
            "temperature": self._args.temperature,
            "max_tokens": self._args.max_tokens,
            "stream": True,
        }
        said = ""
        with self._client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise ChatFailed(
                    f"answers {answer.status_code}: {answer.read().decode(errors='replace')[:300]}"
                )
            for piece in _pieces(answer.iter_lines()):
                said += piece
                yield piece
        self._messages.append({"role": "assistant", "content": said})


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text in the events of a stream."""
    for line in lines:
        if not line.startswith("data:") or line.removeprefix("data:").strip() == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(line.removeprefix("data:"))
        if "error" in event:
            raise ChatFailed(str(event["error"]))
        for choice in event.get("choices", ()):
            yield choice.get("delta", {}).get("content") or ""


@contextmanager
def _served(model: str) -> Iterator[str]:
    """The URL of a server; for a directory the embedded engine is started, and ended on exit."""
    if model.startswith(("http://", "https://")):
        yield model
        return
    if not (Path(model) / "config.json").is_file():
        raise ChatFailed("no config.json there (wanted: http://HOST:PORT, or a checkpoint's directory)")
    port = find_available_port(_FIRST_PORT)
    command = [
        sys.executable,
        "-m",
        "slime.backends.embedded_engine",
        "--model-path",
        model,
        "--port",
        str(port),
    ]
    with tempfile.TemporaryDirectory() as logs:
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "PASSIVE"}
        engine = ManagedProcess(command, name="engine", log_path=Path(logs) / "engine.log", env=env)
        try:
            url = f"http://127.0.0.1:{port}"
            _await(engine, url)
            yield url
        finally:
            engine.terminate()


def _await(engine: ManagedProcess, url: str) -> None:
    print("loading the model ...", file=sys.stderr)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if not engine.is_alive():
            raise ChatFailed(f"the engine has ended: {engine.log_tail(1).strip()}")
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:  # not listening yet
            pass
        if time.monotonic() > deadline:
            raise ChatFailed(
                f"the engine was not ready within {_START_SECONDS:g} s: {engine.log_tail(1).strip()}"
            )
        time.sleep(0.2)
