"""Refusals as gRPC says them: a status, and `<code>: <text>` as its message."""

from typing import Any, NoReturn

import grpc

from kmq import refusals
from kmq.gateway.core.refused import RequestRefused


def status_of(code: str) -> grpc.StatusCode:
    """Return the status of a refusal's code."""
    return grpc.StatusCode[refusals.find(code).grpc]


async def refuse(context: Any, refused: RequestRefused) -> NoReturn:
    """End a call with the status of its refusal."""
    await context.abort(status_of(refused.code), f"{refused.code}: {refused}")
    raise AssertionError("abort raises")
