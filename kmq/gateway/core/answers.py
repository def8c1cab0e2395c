"""Every way in which the gateway says no: a short stable code, with its gRPC and its HTTP status."""

from typing import NamedTuple

import grpc

from kmq.errors import KmqError


class Status(NamedTuple):
    """What a code is over gRPC, and over HTTP."""

    grpc: grpc.StatusCode
    http: int


_BAD = Status(grpc.StatusCode.INVALID_ARGUMENT, 400)
_LONG = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 413)
_MANY = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429)
_UNKNOWN = Status(grpc.StatusCode.NOT_FOUND, 404)
_LATER = Status(grpc.StatusCode.UNAVAILABLE, 503)  # the same again may work
_NEVER = Status(grpc.StatusCode.FAILED_PRECONDITION, 409)  # not while the broker has these settings

STATUS = {
    # of ingress and the framer
    "disk_full": _LATER,
    "quota": _LATER,
    "stopping": _LATER,
    "busy": _LATER,
    "connections": _LATER,
    "unauthorized": Status(grpc.StatusCode.UNAUTHENTICATED, 401),
    "too_long": _LONG,
    "bad_id": _BAD,
    "id_reused": Status(grpc.StatusCode.ALREADY_EXISTS, 409),  # with other content: it is no retry
    "id_too_old": Status(grpc.StatusCode.FAILED_PRECONDITION, 409),
    "producers_full": _MANY,
    "too_many_topics": _MANY,
    "unknown_topic": _UNKNOWN,
    "drop_oldest": _NEVER,
    # of the gateway
    "empty_id": _BAD,
    "not_answered": _LATER,  # whether it is stored is not known; the same id again stores it once
    "too_many": _MANY,
    "not_found": _UNKNOWN,
    "not_routed": _LATER,
    "not_ready": _LATER,
    "bad_request": _BAD,
    "damaged": Status(grpc.StatusCode.DATA_LOSS, 500),
}
INTERNAL = Status(grpc.StatusCode.INTERNAL, 500)  # a code that is not here: nothing a client can do about it


class Answer(KmqError):
    """A request is answered with an error. `code` is a key of STATUS."""

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        super().__init__(text)

    @property
    def status(self) -> Status:
        return STATUS.get(self.code, INTERNAL)
