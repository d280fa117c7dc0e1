"""The service: whoever makes trajectories writes them here, and the rollout function fetches whole groups.

    python -m slime_plugins.rollout_buffer.buffer --port 8889 --file buffer.sqlite

POST /start_rollout starts a generator of ``generator/`` in the background, POST /buffer/write takes a
trajectory, POST /get_rollout_data gives out the groups that are complete. It listens on this machine alone
unless told otherwise, and then wants a key; pages of other sites are refused.

An answer comes after what it says is on the disk. A service that was killed goes on with its file where it
was; only a generator that was at work has to be started again.
"""

import argparse
import asyncio
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from slime.utils.addresses import API_KEY, is_loopback
from slime.utils.request_gate import RequestGate
from slime_plugins.rollout_buffer.buffer_queue import GroupTooLarge
from slime_plugins.rollout_buffer.pool import Query
from slime_plugins.rollout_buffer.runs import STOPPED
from slime_plugins.rollout_buffer.schema import UnknownFile
from slime_plugins.rollout_buffer.service import MAX_WAITING
from slime_plugins.rollout_buffer.service import RolloutBuffer as RolloutBuffer
from slime_plugins.rollout_buffer.store import BufferFull, LeaseLost, UidTaken
from slime_plugins.rollout_buffer.trajectory import Acknowledgement, BufferResponse, Fetch, Start, Trajectory

BODY_BYTES = 64 * 2**20
"""The most bytes of a trajectory."""
SHUTDOWN_S = 60
"""How long requests under way may take once it is to end."""
RETRY_AFTER_S = 1
"""What whoever is refused for the moment is told to wait."""
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


def create_app(buffer: RolloutBuffer, host: str = "", api_key: str | None = None) -> FastAPI:
    """The service.

    Args:
        host: on which it will listen, where that is known.
        api_key: that requests have to bring as a bearer token, if there is one.
    """
    app = FastAPI()
    app.add_middleware(RequestGate, host=host, most_bytes=BODY_BYTES, api_key=api_key)

    @app.post("/buffer/write")
    async def write(item: Annotated[Trajectory, Depends(json_body(Trajectory))]) -> BufferResponse:
        new = await _done(buffer.write(item.item()))
        return BufferResponse(success=True, message="" if new else f"{item.uid} is here already")

    @app.post("/get_rollout_data")
    async def fetch(asked: Annotated[Fetch, Depends(json_body(Fetch, empty={}))]) -> Response:
        answer = await _done(buffer.fetch(asked))
        if answer is None:
            return _json(await _nothing(buffer))
        return Response(answer, media_type="application/json")

    @app.post("/buffer/acknowledge")
    async def acknowledge(
        asked: Annotated[Acknowledgement, Depends(json_body(Acknowledgement))],
    ) -> BufferResponse:
        await _done(buffer.acknowledge(asked.leases))
        return BufferResponse(success=True)

    @app.post("/buffer/query")
    async def query(asked: Annotated[Query, Depends(json_body(Query, empty={}))]) -> Response:
        rows = await run_in_threadpool(buffer.query, asked)
        return _json(BufferResponse(success=True, data={"rows": rows}))

    @app.get("/buffer/status")
    async def status() -> BufferResponse:
        run, counts = await _done(buffer.status())
        told = {"task_type": run.task_type, "group_size": run.group_size, "generator": run.generator}
        more = {"waiting": run.waiting, "groups": counts, "asked": buffer.asked}
        return BufferResponse(success=True, data=told | more)

    @app.post("/start_rollout")
    async def start(data: Annotated[Start, Depends(json_body(Start))]) -> BufferResponse:
        try:
            await run_in_threadpool(buffer.start, data)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except RuntimeError as error:
            return BufferResponse(success=False, message=str(error))
        return BufferResponse(success=True)

    return app


def json_body(model: type[M], empty: Mapping[str, Any] | None = None) -> Callable[[Request], Any]:
    """A dependency that reads the body of a request; no body at all is ``empty``.

    Stricter than the JSON of the standard library: neither NaN nor half a surrogate pair, which no answer
    could hold, gets in.
    """

    async def read(request: Request) -> M:
        body = await request.body()
        if not body and empty is not None:
            return _validated(model, empty)
        return await run_in_threadpool(_parsed, model, body)

    return read


def _parsed(model: type[M], body: bytes) -> M:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HTTPException(422, f"the body is no JSON: {error}") from error
    return _validated(model, found)


def _validated(model: type[M], found: Any) -> M:
    try:
        return model.model_validate(found)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)
        raise HTTPException(422, wrong[:10]) from error


async def _done(work: "Future[T]") -> T:
    """What the store answers, or the HTTP error that says why it does not."""
    try:
        return await asyncio.wrap_future(work)
    except (UidTaken, LeaseLost, GroupTooLarge) as error:
        raise HTTPException(409, str(error)) from error
    except BufferFull as error:
        raise HTTPException(429, str(error), {"Retry-After": str(RETRY_AFTER_S)}) from error
    except sqlite3.OperationalError as error:
        raise HTTPException(503, f"the file: {error}", {"Retry-After": str(RETRY_AFTER_S)}) from error


async def _nothing(buffer: RolloutBuffer) -> BufferResponse:
    """Why nothing is given out; ``stopped`` if a start that resumes makes it go on."""
    run, counts = await _done(buffer.status())
    waits = f" ({run.waiting} trajectories wait in {counts['open']} groups)" if counts["open"] else ""
    message = f"the generator failed: {run.failure}" if run.failure else f"no group is complete{waits}"
    data = {"failed": bool(run.failure), "stopped": run.generator == STOPPED}
    return BufferResponse(success=False, message=message, data=data)


def _json(answer: BufferResponse) -> Response:
    """Encodes an answer of many items without a look at each."""
    return Response(orjson.dumps(vars(answer)), media_type="application/json")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8889)
    parser.add_argument("--file", type=Path, default=Path("rollout_buffer.sqlite"), help="where all is kept")
    parser.add_argument(
        "--group-size", type=int, default=16, help="of a new file, until a generator is started"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY) or None,
        help=f"that requests bring as a bearer token; the run's --sglang-api-key. Default: {API_KEY}'s value",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=MAX_WAITING,
        help="trajectories that nobody has for good, before no more groups are begun",
    )
    parser.add_argument("--keep-groups", type=int, help="given out, whose trajectories stay; default all")
    args = parser.parse_args(argv)
    if args.api_key is None and not is_loopback(args.host):
        parser.error(
            f"--host {args.host}: an API key is required beyond loopback (wanted: --api-key, or {API_KEY})"
        )
    for flag, least in (("group_size", 1), ("max_waiting", 1), ("keep_groups", 0)):
        if getattr(args, flag) is not None and getattr(args, flag) < least:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)}: wanted at least {least}")
    try:
        buffer = RolloutBuffer(
            args.group_size,
            file=args.file,
            max_waiting=args.max_waiting,
            keep=args.keep_groups,
            api_key=args.api_key,
        )
    except (UnknownFile, OSError) as error:
        parser.error(f"--file {error}")
    app = create_app(buffer, args.host, args.api_key)
    uvicorn.run(
        app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_S
    )
    buffer.close()


if __name__ == "__main__":
    main()
