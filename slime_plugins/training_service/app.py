"""The routes of the service."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException

from slime.utils.http_utils import HttpStatusError
from slime.utils.request_gate import RequestGate
from slime_plugins.rollout_buffer.buffer import json_body
from slime_plugins.training_service.schema import AdamParams, ForwardBackward, Request, Sample, State
from slime_plugins.training_service.tenants import Busy, Refused, Tenants, UnknownTenant

BODY_BYTES = 64 * 2**20
DEADLINE_S = 3600.0
Sampler = Callable[[str, Sample], Awaitable[dict[str, Any]]]


def create_app(
    tenants: Tenants,
    sampler: Sampler,
    host: str = "",
    api_key: str | None = None,
    deadline_s: float = DEADLINE_S,
) -> FastAPI:
    """The service.

    Args:
        sampler: asks the engines.
        host: on which it will listen, where that is known.
        api_key: that requests have to bring as a bearer token, if there is one.
        deadline_s: of one request.
    """
    app = FastAPI()
    app.add_middleware(RequestGate, host=host, most_bytes=BODY_BYTES, api_key=api_key)

    @app.get("/tenants")
    async def names() -> dict[str, Any]:
        return {"tenants": tenants.names}

    @app.post("/tenants/{name}/sample")
    async def sample(name: str, asked: Annotated[Sample, Depends(json_body(Sample))]) -> Any:
        with _errors_told():
            tenants.require(name)
            tenants.require_tokens(asked.prompt)
            return await asyncio.wait_for(sampler(name, asked), deadline_s)

    for work, model in (
        (tenants.forward_backward, ForwardBackward),
        (tenants.optim_step, AdamParams),
        (tenants.save_weights_for_sampler, Request),
        (tenants.save_state, State),
        (tenants.load_state, State),
    ):
        _add_work(app, tenants, work, model, deadline_s)
    return app


def _add_work(
    app: FastAPI, tenants: Tenants, work: Callable[..., Any], model: type[Request], deadline_s: float
) -> None:
    """Adds the route of a method that the trainer works for, under the method's name."""

    @app.post(f"/tenants/{{name}}/{work.__name__}")
    async def route(name: str, asked: Annotated[Any, Depends(json_body(model, empty={}))]) -> Any:
        with _errors_told():
            return await _within(tenants.submit(name, work, asked), deadline_s)


@contextmanager
def _errors_told() -> Iterator[None]:
    """What went wrong, as the status that says whose fault it is."""
    try:
        yield
    except HTTPException:
        raise
    except UnknownTenant as error:
        raise HTTPException(404, str(error)) from error
    except Refused as error:
        raise HTTPException(409, str(error)) from error
    except Busy as error:
        raise HTTPException(429, str(error), {"Retry-After": "1"}) from error
    except TimeoutError as error:
        raise HTTPException(504, "no answer in time") from error
    except HttpStatusError as error:  # of an engine
        raise HTTPException(400 if error.status < 500 else 502, str(error)) from error
    except Exception as error:
        raise HTTPException(500, f"{type(error).__name__}: {error}") from error


async def _within(work: "Future[Any]", deadline_s: float) -> Any:
    """The outcome, or an error that says whether it was begun."""
    done, _ = await asyncio.wait({asyncio.wrap_future(work)}, timeout=deadline_s)
    for future in done:
        return future.result()
    if work.cancel():
        raise HTTPException(503, f"not begun within {deadline_s} s; nothing was done")
    raise HTTPException(504, f"not done within {deadline_s} s; it goes on")
