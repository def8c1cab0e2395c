"""Refusals as gRPC statuses, with `<code>: <text>` as the message."""

from typing import Any, NoReturn

import grpc

from kmq import refusals
from kmq.gateway.core.refused import RequestRefused


def status_of(code: str) -> grpc.StatusCode:
    """Return the gRPC status that belongs to the code of a refusal."""
    return grpc.StatusCode[refusals.find(code).grpc]


async def refuse(context: Any, refused: RequestRefused) -> NoReturn:
    """End a call with the status of its refusal."""
    await context.abort(status_of(refused.code), f"{refused.code}: {refused}")
    raise AssertionError("abort raises")
