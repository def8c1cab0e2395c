"""Errors over HTTP: {"code", "message"} and the status of the code; `field` names a wrong field of the request.

Old readers  A Spark source of an older release reads `error`, so errors of /v1 say the same text there too.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from kmq.gateway.core.broker import RequestRefused
from kmq.log.damage import DamageError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RETRY_AFTER_S = 1  # a broker that refuses for lack of room looks again several times a second


def body_of(refused: RequestRefused) -> dict[str, Any]:
    """Return an error as a value for JSON."""
    return {"code": refused.code, "message": str(refused), **refused.fields}


def response_of(request: web.Request, refused: RequestRefused, **headers: str) -> web.Response:
    """Return the response that refuses a request."""
    body, row = body_of(refused), refused.refusal
    if request.path.startswith("/v1/"):
        body["error"] = body["message"]
    if row.is_retryable:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    return web.json_response(body, status=row.http, headers=headers)


def answering(handler: Handler) -> Handler:
    """Return `handler` with its refusals turned into responses."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestRefused as refused:
            return response_of(request, refused)
        except DamageError as err:
            return response_of(request, damaged(err))

    return answer


def damaged(err: DamageError) -> RequestRefused:
    """Return the refusal of a request that needs damaged bytes."""
    fields = ("path", "byte", "end", "first_offset", "next_offset", "what")
    return RequestRefused("damaged", str(err), **{name: getattr(err, name) for name in fields})


@web.middleware
async def refuse_unknown_paths(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer for paths and methods that no route has in the shape of every other error."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as err:
        allowed = ", ".join(sorted(err.allowed_methods))
        refused = RequestRefused("method_not_allowed", f"{request.method}: expected {allowed}")
        return response_of(request, refused, Allow=allowed)
    except web.HTTPNotFound:
        return response_of(request, RequestRefused("not_found", f"{request.path}: unknown path; see /docs"))
    except web.HTTPRequestEntityTooLarge as err:
        return response_of(request, RequestRefused("too_large", str(err.text)))
    except web.HTTPException:
        raise
    except Exception:
        logging.getLogger(__name__).exception("%s %s", request.method, request.path)
        return response_of(request, RequestRefused("internal"))
