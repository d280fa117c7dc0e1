"""Server-sent events of ``/generate``."""

from collections.abc import AsyncIterator
from typing import Any

import orjson

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.prompts import Generation
from slime.backends.embedded_engine.http.responses import ResponseBuilder, shown_ids, trim_stop
from slime.backends.embedded_engine.http.running import failure_of, run_streaming
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.sequence import Progress, Sequence
from slime.backends.embedded_engine.tokenizer import GrowingText

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def error_event(error: BadRequest) -> bytes:
    """How a stream of ``/generate`` tells of an error; its HTTP status is 200 all the same."""
    body = {"message": str(error), "type": "invalid_request_error", "code": error.status}
    return event({"error": {**body, "retryable": False}})


class TextStream:
    """The text of a sequence as it grows; holds back what may turn out to be a stop string."""

    def __init__(self, state: ServerState, sequence: Sequence) -> None:
        self._sequence = sequence
        self._growing = (
            GrowingText(state.tokenizer, sequence.params.skip_special_tokens) if state.tokenizer else None
        )
        self._sent = 0

    def text(self, progress: Progress) -> str | None:
        """Text up to there; None without a tokenizer."""
        sequence = self._sequence
        if self._growing is None:
            return None
        if progress.finished:
            return trim_stop(sequence, self._growing.update(shown_ids(sequence), final=True))
        text = self._growing.update(sequence.output_ids[: progress.end])
        return text[: len(text) - _possible_stop(text, sequence.params.stop)]

    def delta(self, progress: Progress) -> str | None:
        """The part of the text that was not returned before."""
        text = self.text(progress)
        if text is None:
            return None
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new


def _possible_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that begins a stop string."""
    longest = max(map(len, stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


async def stream_generation(
    state: ServerState, generation: Generation, builders: list[ResponseBuilder]
) -> AsyncIterator[bytes]:
    """Each event repeats everything so far, or under ``--incremental-streaming-output`` only the news."""
    sequences = generation.sequences
    texts = [TextStream(state, s) for s in sequences]
    sent = [0] * len(sequences)
    incremental = state.args.incremental_streaming_output
    async for index, progress in run_streaming(state, sequences):
        sequence = sequences[index]
        interval = sequence.params.stream_interval or state.args.stream_interval
        if not progress.finished and progress.end - sent[index] < interval:
            continue
        if progress.finished and (failure := failure_of(sequence)) is not None:
            yield error_event(failure)
            continue
        text = texts[index].delta(progress) if incremental else texts[index].text(progress)
        start = sent[index] if incremental else 0
        answer = builders[index].build(text, state.engine.scheduler.weight_version, start, progress)
        if not generation.single:
            answer["index"] = index
        sent[index] = progress.end
        yield event(answer)
    yield DONE
