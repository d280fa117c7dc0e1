"""Runs sequences for a request: waits for them, streams them, aborts them if the client leaves."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from fastapi import Request

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.state import ServerState
from slime.backends.embedded_engine.sequence import Progress, Sequence


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


@contextmanager
def _registered(state: ServerState, sequences: list[Sequence]) -> Iterator[None]:
    rids = {s.rid for s in sequences}
    state.live_rids |= rids
    try:
        yield
    finally:
        state.live_rids -= rids


async def run_to_end(state: ServerState, request: Request, sequences: list[Sequence]) -> None:
    """Returns when all sequences have a finish reason.

    Raises:
        ClientGone: the client left; what was still running is aborted.
        BadRequest: a sequence was ended by an error, with the status of that error.
    """
    left = len(sequences)
    done = asyncio.get_running_loop().create_future()

    def finished() -> None:
        nonlocal left
        left -= 1
        if left == 0 and not done.done():
            done.set_result(None)

    for sequence in sequences:
        sequence.on_finish = finished
    with _registered(state, sequences):
        state.engine.submit(sequences)
        gone = asyncio.ensure_future(_disconnection(request))
        try:
            await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not done.done():
                await state.engine.run(lambda: state.engine.scheduler.abort(sequences))
    if not done.done():
        raise ClientGone
    for sequence in sequences:
        if (failure := failure_of(sequence)) is not None:
            raise failure


def failure_of(sequence: Sequence) -> BadRequest | None:
    """An abort by the client is an answer; one that carries a status is an error."""
    reason = sequence.finish_reason or {}
    if reason.get("type") == "abort" and reason.get("status_code"):
        return BadRequest(reason["message"], reason["status_code"], reason["err_type"] or BadRequest.VALUE)
    return None


async def run_streaming(state: ServerState, sequences: list[Sequence]) -> AsyncIterator[tuple[int, Progress]]:
    """Yields the index of a sequence and how far it is whenever it has moved on, until all have ended.

    Exactly one ``Progress`` of each sequence is finished. The engine goes on meanwhile, so only after
    that one has the sequence a finish reason to show. Closing the iterator aborts what still runs.
    """
    moved: set[int] = set()
    wakeup = asyncio.Event()

    def note(index: int) -> None:
        moved.add(index)
        wakeup.set()

    for index, sequence in enumerate(sequences):
        sequence.on_progress = sequence.on_finish = lambda index=index: note(index)
    ended: set[int] = set()
    with _registered(state, sequences):
        state.engine.submit(sequences)
        try:
            while len(ended) < len(sequences):
                await wakeup.wait()
                wakeup.clear()
                ready = sorted(moved)
                moved.clear()
                for index in ready:
                    if index not in ended:
                        progress = sequences[index].progress
                        if progress.finished:
                            ended.add(index)
                        yield index, progress
        finally:
            if len(ended) < len(sequences):
                state.engine.run(lambda: state.engine.scheduler.abort(sequences))


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
