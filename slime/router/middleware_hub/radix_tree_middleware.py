"""Text in, exact tokens out: rollout code that knows texts only gets the tokens that were sampled.

    --use-slime-router
    --slime-router-middleware-paths slime.router.middleware_hub.radix_tree_middleware.RadixTreeMiddleware

A ``/generate`` with a ``text`` reaches the engine as ``input_ids``: the tokens that were sampled for the
known part of the text, and new ones for the rest. The answer goes to the client as it is, once what it
brought has been recorded. ``POST /retrieve_from_text`` gives all tokens of a text. Requests for several
answers, and those with images or embeddings, pass untouched.
"""

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slime.config.hf_checkpoint import HfCheckpointConfig
from slime.config.router import RouterConfig
from slime.config.run import filled
from slime.config.slime_router import SlimeRouterConfig
from slime.router.middleware_hub.radix_tree import StringRadixTrie
from slime.router.middleware_hub.token_runs import TokenRun, joined
from slime.utils.addresses import http_url
from slime.utils.engine_meta import version_number
from slime.utils.http_utils import post
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

RETRIEVE_RETRIES = 20
_NOT_TEXT = ("image_data", "video_data", "audio_data", "input_embeds")
_UNFINISHED = (b'"finish_reason":null', b'"finish_reason": null')
_END = b"[DONE]"


class RadixTreeMiddleware:
    """Records every trajectory that passes.

    Args:
        router: whose ``args`` name the tokenizer and the size of the tree; it gets ``radix_tree``.
    """

    def __init__(self, app: ASGIApp, *, router: Any) -> None:
        self.app, self.router = app, router
        model = filled(HfCheckpointConfig, router.args, thin=True)
        most_tokens = filled(SlimeRouterConfig, router.args, thin=True).slime_router_radix_tree_tokens
        self.tokenizer = load_tokenizer(model.hf_checkpoint, model.trust_remote_code)
        self.radix_tree = router.radix_tree = StringRadixTrie(
            most_tokens, tokenizer=self.tokenizer, verbose=router.verbose
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/generate" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        prompt, body = self._prompt(body)
        if prompt is not None:
            send = _Recording(send, AnswerReader(lambda answer: self._record(prompt, answer)))
        await self.app(scope, _replayed(body, receive), send)

    def _prompt(self, body: bytes) -> tuple[TokenRun | None, bytes]:
        """The tokens of the prompt, None if it is nothing to record; and the request for the engine."""
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError:
            return None, body  # the engine says what is wrong with it
        if not isinstance(request, dict) or any(request.get(name) for name in _NOT_TEXT):
            return None, body
        text, ids = request.get("text"), request.get("input_ids")
        if isinstance(text, str) and text and not ids:
            prompt = self.radix_tree.whole(text)
            del request["text"]
            return prompt, orjson.dumps({**request, "input_ids": prompt.ids, "return_logprob": True})
        if text or not ids or not isinstance(ids[0], int) or not request.get("return_logprob"):
            return None, body
        return self._given(ids), body

    def _given(self, ids: list[int]) -> TokenRun:
        """A prompt of tokens: they are what counts, the tree only knows which of them were generated."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        known = self.radix_tree.known(text)
        if known.ids != ids[: len(known)]:
            known = known.head(0)
        rest, count = text[len(known.text) :], len(ids) - len(known)
        if not count:
            return known
        unknown = TokenRun.of(rest, ids[len(known) :], [0.0] * count, [0] * count, self.tokenizer)
        return joined([known, unknown])

    def _record(self, prompt: TokenRun, answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        triples = meta.get("output_token_logprobs") or []
        if not triples:
            return  # aborted before its first token
        ids, logp = [triple[1] for triple in triples], [triple[0] for triple in triples]
        new = TokenRun.of(answer["text"], ids, logp, [1] * len(ids), self.tokenizer)
        version = version_number(str(meta.get("weight_version", "")))
        self.radix_tree.insert_run(joined([prompt, new]), version)


class AnswerReader:
    """Hands a finished answer over once; errors and lists of answers are none.

    Args:
        found: gets the answer as ``/generate`` gives it. Chunks of a stream are cumulative: it is the last.
    """

    def __init__(self, found: Callable[[dict[str, Any]], None]) -> None:
        self._found = found
        self._good = self._streamed = False
        self._waiting = bytearray()

    def begin(self, status: int, content_type: bytes) -> None:
        self._good = status == 200
        self._streamed = content_type.startswith(b"text/event-stream")

    def feed(self, data: bytes, last: bool) -> None:
        if not self._good:
            return
        self._waiting += data
        if self._streamed:
            *events, rest = bytes(self._waiting).split(b"\n\n")
            self._waiting = bytearray(rest)
            for event in events:
                self._event(event)
        elif last:
            self._answer(bytes(self._waiting))

    def _event(self, event: bytes) -> None:
        data = event.strip().removeprefix(b"data:").strip()
        if data and data != _END and not any(mark in data for mark in _UNFINISHED):
            self._answer(data)

    def _answer(self, data: bytes) -> None:
        answer = orjson.loads(data)
        if isinstance(answer, dict) and "text" in answer and answer.get("meta_info", {}).get("finish_reason"):
            self._found(answer)


class _Recording:
    """A ``send`` that has an answer read before the client gets its last part."""

    def __init__(self, send: Send, reader: AnswerReader) -> None:
        self._send, self._reader = send, reader

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._reader.begin(message["status"], dict(message["headers"]).get(b"content-type", b""))
        elif message["type"] == "http.response.body":
            self._reader.feed(message.get("body", b""), last=not message.get("more_body", False))
        await self._send(message)


def _replayed(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """A ``receive`` that gives the body once, and then what comes after it."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return next(messages, None) or await receive()

    return again


async def postprocess_sample_with_radix_tree(args: Any, sample: Sample, output: dict[str, Any]) -> Sample:
    """Adds to a sample an answer of ``/generate`` to the text ``sample.prompt + sample.response``.

    Text that was appended to ``sample.response`` since the last answer, a tool's for instance, gets mask 0.
    If another sample had the same text from other tokens meanwhile, this one gets those the engine saw.

    Raises:
        ValueError: the router does not know how this text was made.
    """
    if not isinstance(sample.prompt, str):
        raise ValueError(f"sample {sample.index}: its prompt is {type(sample.prompt).__name__} (wanted: str)")
    response = sample.response + output["text"]
    router = filled(RouterConfig, args, thin=True)
    place: tuple[Any, Any] = router.sglang_router_ip, router.sglang_router_port
    url = f"{http_url(*place)}/retrieve_from_text"
    request = {"text": sample.prompt + response, "prompt_characters": len(sample.prompt)}
    found = await post(url, request, RETRIEVE_RETRIES)
    begin, rows = found["prompt_tokens"], _rows(sample, found, output)
    if rows is None:
        most_tokens = filled(SlimeRouterConfig, args, thin=True).slime_router_radix_tree_tokens
        raise ValueError(
            f"sample {sample.index}: the router does not know the tokens of its response any more "
            f"(wanted: a larger --slime-router-radix-tree-tokens than {most_tokens})"
        )
    if sample.tokens != [row.token for row in rows[: begin + sample.response_length]]:
        sample.tokens = [row.token for row in rows[:begin]]
        sample.response_length, sample.loss_mask, sample.rollout_log_probs = 0, [], []
        sample.version_spans = []
        sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None
    sample.response = response
    _append(args, sample, rows[begin + sample.response_length :], output["meta_info"])
    return sample


class _Row(NamedTuple):
    token: int
    logp: float
    generated: bool


def _rows(sample: Sample, found: dict[str, Any], output: dict[str, Any]) -> list[_Row] | None:
    """Every token of prompt and response; None if those of the response are not known.

    The answer itself says what was sampled last, whatever the tree has of the same text by now.
    """
    known = zip(found["tokens"], found["rollout_logp"], map(bool, found["loss_mask"]), strict=True)
    rows = [_Row(*row) for row in known]
    triples = output["meta_info"].get("output_token_logprobs") or []
    sampled = [_Row(triple[1], triple[0], True) for triple in triples]
    cut, begin = len(rows) - len(sampled), found["prompt_tokens"]
    if not sample.response:
        return rows[:begin] + sampled
    if [row.token for row in rows[cut:]] == [row.token for row in sampled]:
        rows = rows[:cut] + sampled
    elif not rows[-1].generated:
        return None
    had_some = any(sample.loss_mask or ())
    return rows if any(row.generated for row in rows[begin:cut]) or not had_some else None


def _append(args: Any, sample: Sample, rows: list[_Row], meta_info: dict[str, Any]) -> None:
    """Appends tokens, the last of which come with ``meta_info``."""
    groups = [(made, list(group)) for made, group in itertools.groupby(rows, key=lambda row: row.generated)]
    if not groups or not groups[-1][0]:
        groups.append((True, []))  # aborted before its first token
    for number, (generated, group) in enumerate(groups, 1):
        sample.append_response_tokens(
            args,
            tokens=[row.token for row in group],
            log_probs=[row.logp for row in group] if generated else None,
            trainable=generated,
            meta_info=meta_info if number == len(groups) else None,
        )
