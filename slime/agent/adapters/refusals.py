"""What the server of an adapter refuses before an API sees it, told as clients of that API read it."""

from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler

from slime.agent.aiohttp_threaded import LISTENS_ON
from slime.utils.same_site import FOREIGN, is_foreign

Refusal = Callable[[int, str], web.Response]
"""Makes an answer of an HTTP status and a reason."""
REFUSAL: web.AppKey[Refusal] = web.AppKey("refusal")
BODY_LIMIT = 64 * 2**20


@web.middleware
async def look_at_head(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets nothing through of a page of another site, no body announced as too long and no unknown path."""
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin", "")
    if is_foreign(host, origin, request.app.get(LISTENS_ON, "")):
        return web.json_response(FOREIGN, status=403)
    try:
        if (request.content_length or 0) > BODY_LIMIT:
            raise web.HTTPRequestEntityTooLarge(BODY_LIMIT, request.content_length or 0)
        return await handler(request)
    except web.HTTPException as error:
        return _told(request, error)


def _told(request: web.Request, error: web.HTTPException) -> web.Response:
    reason = f"{error.reason}: {error.text}" if error.status == 413 else error.reason
    told = request.app[REFUSAL](error.status, f"{request.method} {request.path}: {reason}")
    if "Allow" in error.headers:
        told.headers["Allow"] = error.headers["Allow"]
    return told
