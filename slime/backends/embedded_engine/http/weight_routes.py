"""Weight updates, versions and checks."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import (
    MAX_WEIGHTS_BYTES,
    CheckerBody,
    JoinGroupBody,
    LeaveGroupBody,
    MessageBody,
    PlanFromRanksBody,
    PullWeightsBody,
    SelectorBody,
    TakeWeightsBody,
    UpdateFromChangesBody,
    UpdateFromDiskBody,
    UpdateFromDistributedBody,
    UpdateFromRanksBody,
    UpdateFromSessionBody,
    UpdateFromTensorBody,
    UpdateVersionBody,
    WeightByNameBody,
    read_body,
    read_json,
    validated,
)
from slime.backends.embedded_engine.http.generate_routes import json_response
from slime.backends.embedded_engine.http.state import ServerState, state_of
from slime.models.blocks import Area
from slime.weight_sync.shards.pieces import Message, Piece
from slime.weight_sync.versions.live import ChangedBucket, SentTensor
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.puller import asked

T = TypeVar("T")
router = APIRouter()


def success(message: str, **more: Any) -> Response:
    return json_response({"success": True, "message": message, **more})


def failure(error: BadRequest, **more: Any) -> Response:
    return json_response({"success": False, "message": str(error), **more}, error.status)


async def update(state: ServerState, abort_all: bool, function: Callable[[], None], **more: Any) -> Response:
    """Runs an update once nothing is running, or at once if the engine is paused.

    Beside what SGLang answers it tells the seconds that the update itself took.
    """
    try:
        if abort_all:
            await state.engine.run(lambda: state.engine.abort("", True))
        took = await state.engine.run(lambda: _timed(function), exclusive=True)
    except BadRequest as error:
        return failure(error, **more)
    return success("Succeeded to update model weights.", **more, commit_time=took)


def _timed(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@router.post("/take_weights")
async def take_weights(request: Request) -> Response:
    """From now on this trainer alone changes the weights, until another one does; SGLang knows no trainers.

    It tells whether an update was open, which is closed; nothing is computed until the next one has ended.
    """
    body = await read_body(request, TakeWeightsBody)
    state = state_of(request)
    try:
        interrupted = await state.engine.run(lambda: state.updater.take(body.writer))
    except BadRequest as error:
        return failure(error)
    return success("The weights are taken.", interrupted=interrupted)


@router.post("/begin_weight_update")
async def begin_weight_update(request: Request) -> Response:
    """Waits for running requests unless the engine is paused; others then wait for the end of the update."""
    body = await read_body(request, SelectorBody)
    state = state_of(request)
    try:
        await state.engine.run(lambda: state.updater.begin(body.selector), exclusive=True)
    except BadRequest as error:
        return failure(error)
    return success("Weight update begun.")


@router.post("/end_weight_update")
async def end_weight_update(request: Request) -> Response:
    state = state_of(request)
    try:
        await state.engine.run(state.updater.end)
    except BadRequest as error:
        return failure(error)
    return success("Weight update ended.")


@router.post("/update_weights_from_tensor")
async def update_weights_from_tensor(request: Request) -> Response:
    body = await read_body(request, UpdateFromTensorBody, MAX_WEIGHTS_BYTES)
    state = state_of(request)
    return await update(
        state,
        body.abort_all_requests,
        lambda: state.updater.from_tensors(
            body.serialized_named_tensors, body.load_format, body.weight_version, body.flush_cache
        ),
    )


@router.post("/update_weights_from_distributed")
async def update_weights_from_distributed(request: Request) -> Response:
    body = await read_body(request, UpdateFromDistributedBody)
    state = state_of(request)
    specs = specs_of(body)
    return await update(
        state,
        body.abort_all_requests,
        lambda: state.updater.from_group(
            body.group_name, specs, body.load_format, body.weight_version, body.flush_cache
        ),
    )


@router.post("/update_weights_from_changes")
async def update_weights_from_changes(request: Request) -> Response:
    """Receives changes over a process group; SGLang has nothing like it."""
    body = await read_body(request, UpdateFromChangesBody)
    state = state_of(request)
    tensors = [SentTensor(**{**dict(one), "shape": tuple(one.shape)}) for one in body.tensors]
    bucket = ChangedBucket(tensors, body.checksum, body.number, body.base, body.state)
    return await update(
        state,
        False,
        lambda: state.updater.from_changes(body.group_name, bucket, body.weight_version, body.flush_cache),
    )


@router.post("/plan_weights_from_ranks")
async def plan_weights_from_ranks(request: Request) -> Response:
    """Takes note of what trainer ranks will send each rank over a group; SGLang has nothing like it."""
    body = await read_body(request, PlanFromRanksBody, MAX_WEIGHTS_BYTES)
    state = state_of(request)
    try:
        ranks = [[[message_of(one) for one in bucket] for bucket in buckets] for buckets in body.ranks]
        await state.engine.run(lambda: state.updater.plan_from_ranks(body.group_name, ranks))
    except BadRequest as error:
        return failure(error)
    return success("The messages are known.")


@router.post("/update_weights_from_ranks")
async def update_weights_from_ranks(request: Request) -> Response:
    """Receives them."""
    body = await read_body(request, UpdateFromRanksBody)
    state = state_of(request)
    return await update(
        state,
        False,
        lambda: state.updater.from_ranks(body.group_name, body.weight_version, body.flush_cache),
    )


@router.get("/weights_base")
async def weights_base(request: Request) -> Response:
    """What changes may be changes of: the state that the last complete update over them led to."""
    return json_response({"state": state_of(request).updater.base.state})


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(request: Request) -> Response:
    """Loads weights from a directory, and renames the served model as SGLang does."""
    body = await read_body(request, UpdateFromDiskBody)
    state = state_of(request)

    def load() -> None:
        state.updater.from_disk(body.model_path, body.weight_version, body.flush_cache)
        state.model_path = state.served_model_name = body.model_path

    paused = 0 if state.engine.paused is None else len(state.engine.scheduler.live)
    return await update(state, body.abort_all_requests, load, num_paused_requests=paused)


@router.post("/pull_weights")
async def pull_weights(request: Request) -> Response:
    """Fetches a published version to this machine while generation goes on, as the original's SGLang does."""
    body = await read_body(request, PullWeightsBody)
    try:
        local, source, version = asked(body.model_dump())
        path = await _in_daemon_thread("pull-weights", lambda: pull(source, local, version))
    except (ValueError, OSError) as error:
        return failure(BadRequest(str(error)))
    return success(f"Version {version} is there.", path=str(path))


@router.post("/update_weight_version")
async def update_weight_version(request: Request) -> Response:
    body = await read_body(request, UpdateVersionBody)
    state = state_of(request)
    if body.abort_all_requests:
        await state.engine.run(lambda: state.engine.abort("", True))
    await state.engine.run(lambda: state.updater.set_version(body.new_version))
    return success(f"Weight version updated to {body.new_version}.", new_version=body.new_version)


@router.post("/init_weights_update_group")
async def init_weights_update_group(request: Request) -> Response:
    """Joins off the engine thread: the trainer may take its time, and others want to be served."""
    body = await read_body(request, JoinGroupBody)
    state = state_of(request)
    try:
        await _in_daemon_thread(
            "join-group",
            lambda: state.updater.groups.join(
                body.master_address,
                body.master_port,
                body.rank_offset,
                body.world_size,
                body.group_name,
                body.backend,
            ),
        )
    except BadRequest as error:
        return failure(error)
    return success("Succeeded to initialize the weights update group.")


@router.post("/destroy_weights_update_group")
async def destroy_weights_update_group(request: Request) -> Response:
    body = await read_body(request, LeaveGroupBody)
    state = state_of(request)
    try:
        await state.engine.run(lambda: state.updater.groups.leave(body.group_name))
    except BadRequest as error:
        return failure(error)
    return success("Succeeded to destroy the weights update group.")


@router.api_route("/get_weights_by_name", methods=["GET", "POST"])
async def get_weights_by_name(request: Request) -> Response:
    body = await read_body(request, WeightByNameBody)
    state = state_of(request)
    return json_response(await state.engine.run(lambda: state.checker.values(body.name, body.truncate_size)))


@router.api_route("/weights_checker", methods=["GET", "POST"])
async def weights_checker(request: Request) -> Response:
    data = {**request.query_params, **await read_json(request)}
    body = validated(CheckerBody, data)
    state = state_of(request)
    skipped, group = body.skip_tensor_list or [], body.pieces_of

    def run() -> dict[str, Any]:
        if group is not None:
            return state.updater.messages.checksums(group)
        return state.checker.run(body.action, skipped, body.per_rank)

    try:
        found = await state.engine.run(run)
    except BadRequest as error:
        return failure(error)
    return success(f"weights_checker {body.action}: done", **found)


async def _in_daemon_thread(name: str, function: Callable[[], T]) -> T:
    """Runs a function like ``asyncio.to_thread``, but the server can end while the function still blocks."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except Exception as error:  # handed to whoever awaits it
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def message_of(body: MessageBody) -> Message:
    pieces = (
        Piece(one.tensor, _dtype(one.dtype), Area(range(*one.rows), range(*one.columns)))
        for one in body.pieces
    )
    return Message(body.source, tuple(pieces))


def specs_of(
    body: UpdateFromDistributedBody | UpdateFromSessionBody,
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise BadRequest(
            f"{len(body.names)} names, {len(body.dtypes)} dtypes, {len(body.shapes)} shapes "
            "(wanted: as many of each)"
        )
    if any(size < 0 or size > 2**40 for shape in body.shapes for size in shape):
        raise BadRequest("shapes: wanted sizes of at least 0")
    dtypes = [_dtype(name) for name in body.dtypes]
    return list(zip(body.names, dtypes, map(tuple, body.shapes), strict=True))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise BadRequest(f"dtypes: {name!r} is not a dtype (wanted: e.g. 'float32')")
    return dtype
