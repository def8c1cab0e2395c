"""Service grpc.health.v1.Health: tells gRPC clients whether a write can be made durable now.

gRPC's own servicer is not used, because it holds a lock while it writes to a watcher. A watcher that reads nothing
would block the task that reports a change of health, and with it the gateway's heartbeat.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

HEALTH: str = health.SERVICE_NAME
_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The service."""

    def __init__(self) -> None:
        self._status: dict[str, int] = {"": _Response.NOT_SERVING}
        self._changed = asyncio.Event()
        self._stopping = False

    def set(self, service: str, serving: bool) -> None:
        """Set the status of a service, and tell its watchers."""
        status = _Response.SERVING if serving else _Response.NOT_SERVING
        if not self._stopping and status != self._status.get(service):
            self._status[service] = status
            self._wake()

    def stop(self) -> None:
        """Report all services as NOT_SERVING from now on."""
        self._stopping = True
        self._status = dict.fromkeys(self._status, _Response.NOT_SERVING)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._status:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r}")
        return _Response(status=self._status[request.service])

    async def Watch(self, request: Any, _: Any) -> AsyncIterator[Any]:
        sent = None
        while True:
            changed, status = self._changed, self._status.get(request.service, _Response.SERVICE_UNKNOWN)
            if status != sent:
                yield _Response(status=status)
                sent = status
            else:
                await changed.wait()
