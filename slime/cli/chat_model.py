"""What ``slime chat`` talks to: a server of OpenAI's protocol."""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

MAX_TOKENS = 512
_SHARE = 4  # answers that a small context has room for
_CONNECT_SECONDS = 30.0
_SHOWN = 300  # characters of what a server says
_KEY_WANTED, _TOO_MUCH = (401, 403), (400, 413, 422)
Message = dict[str, str]


class ChatFailed(RuntimeError):
    """The server cannot be reached, or refuses."""


class ChatModel:
    """A conversation with a server.

    Args:
        options: of each request, as ``temperature`` and ``max_tokens``; the latter's default leaves room for
            further questions in a small context, if the server names it.

    Raises:
        ChatFailed: the server is not there, wants a key, or is something else.
    """

    def __init__(self, url: str, key: str | None, system: str | None, options: Mapping[str, Any]) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.system, self._has_key = system, key is not None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._client = httpx.Client(headers=headers, timeout=timeout, trust_env=False)
        card = self._first_model()
        self.name = str(card["id"])
        context = card.get("max_model_len")
        room = context // _SHARE if isinstance(context, int) else MAX_TOKENS
        self._options = {"max_tokens": max(1, min(MAX_TOKENS, room)), **options}
        self.reset()

    def reset(self) -> None:
        """Forgets what was said."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        self._messages: list[Message] = first

    def answer(self, text: str) -> Generator[str, None, str]:
        """Yields what the model says, as it comes. Of an answer that is closed early, that much was said.

        Returns:
            What is to be known of the answer's end, in brackets; often nothing.

        Raises:
            ChatFailed: this has not been said, and may be tried again.
        """
        asked = {"role": "user", "content": text}
        said, why = "", ""
        try:
            for piece, end in self._pieces([*self._messages, asked]):
                said, why = said + piece, end or why
                yield piece
        except ChatFailed:
            said = ""
            raise
        finally:
            if said:
                self._messages += [asked, {"role": "assistant", "content": said}]
        if why == "length":
            return f" (cut off: --max-tokens {self._options['max_tokens']}, or the end of its context)"
        return "" if said else "(an empty answer)"

    def _first_model(self) -> dict[str, Any]:
        with self._told():
            answer = self._client.get(f"{self.url}/v1/models", timeout=_CONNECT_SECONDS)
            self._expect_ok(answer)
            try:
                card: dict[str, Any] = answer.json()["data"][0]
                return {**card, "id": card["id"]}
            except (ValueError, LookupError, TypeError) as error:
                raise ChatFailed(f"/v1/models does not name a model, but says {answer.text:.80}") from error

    def _pieces(self, messages: list[Message]) -> Iterator[tuple[str, str]]:
        """Text as it comes, and the reason for which it ended once it has."""
        body = {"model": self.name, "messages": messages, "stream": True, **self._options}
        request = self._client.stream("POST", f"{self.url}/v1/chat/completions", json=body)
        with self._told(), request as answer:
            self._expect_ok(answer)
            yield from _events(answer.iter_lines())

    def _expect_ok(self, answer: httpx.Response) -> None:
        if answer.status_code == httpx.codes.OK:
            return
        said = f"answers {answer.status_code}: {_message(answer.read()):.{_SHOWN}}"
        if answer.status_code in _KEY_WANTED:
            wanted = "another key" if self._has_key else "a key"
            raise ChatFailed(f"wants {wanted}: --key-variable NAME takes it from the environment ({said})")
        if answer.status_code in _TOO_MUCH and "context" in said:
            raise ChatFailed(
                "the model's context is full: /reset forgets what was said, and a smaller --max-tokens than "
                f"{self._options['max_tokens']} leaves more of it to questions ({said})"
            )
        raise ChatFailed(said)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Says plainly what is wrong with the connection."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ChatFailed(f"nobody answers there: {error}") from error
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ChatFailed(f"is no address: {error} (wanted: http://HOST:PORT)") from error
        except httpx.HTTPError as error:
            raise ChatFailed(f"the connection was lost: {error or type(error).__name__}") from error


def _message(body: bytes) -> str:
    """What a server says of an error: of its JSON the message alone."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        return str(found.get("error", found)["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return text


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Text of each event of a stream, and the reason of its end, which is empty before that."""
    for line in lines:
        if not line.startswith("data:") or line.removeprefix("data:").strip() == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(line.removeprefix("data:"))
        if "error" in event:
            raise ChatFailed(f"stopped its answer: {event['error']}")
        for choice in event.get("choices", ()):
            yield choice.get("delta", {}).get("content") or "", choice.get("finish_reason") or ""
