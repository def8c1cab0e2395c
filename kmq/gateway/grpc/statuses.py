"""Refusals as gRPC statuses, with `<code>: <text>` as the message.

The trailing metadata has the code as `kmq-code`, and the numbers and the field of the refusal under their names.
"""

from typing import Any, NoReturn

import grpc

from kmq.gateway.core.broker import RequestRefused
from kmq.wire import refusals

_MOST_TEXT = 2000  # bytes, which may be sent as three times as many: clients break a connection with more than 8 KiB
_SHOWN = ("field", "seq", "first", "end")


def status_of(code: str) -> grpc.StatusCode:
    """Return the gRPC status that belongs to the code of a refusal."""
    return grpc.StatusCode[refusals.find(code).grpc]


def trailers_of(refused: RequestRefused) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of a refusal."""
    shown = ((f"kmq-{name}", str(refused.fields[name])) for name in _SHOWN if name in refused.fields)
    return ("kmq-code", refused.code), *shown


async def refuse(context: Any, refused: RequestRefused) -> NoReturn:
    """End a call with the status of its refusal."""
    text = f"{refused.code}: {refused}".encode(errors="replace")[:_MOST_TEXT].decode(errors="ignore")
    await context.abort(status_of(refused.code), text, trailers_of(refused))
    raise AssertionError("abort raises")
