"""The services of the gRPC server: refusals become statuses, every call is counted; and grpc.health.v1.Health."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kmq.broker.stats import Incidents
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.metrics import Requests
from kmq.gateway.grpc.calls import Calls, GrpcCall
from kmq.gateway.grpc.kmq_v1 import KmqV1
from kmq.gateway.grpc.podbus import PodBus
from kmq.gateway.grpc.schema import KMQ, PODBUS, Schema, refuse, status_of

Unary = Callable[[Any, Any], Awaitable[Any]]
Streaming = Callable[[Any, Any], AsyncGenerator[Any, None]]
Talk = Callable[[AsyncIterator[bytes], GrpcCall, Callable[[Any], Awaitable[None]]], Awaitable[None]]
Serve = Callable[[Any, Any], Awaitable[None]]


class _Service:
    """Methods for a server. Each is registered as a stream, so that `calls` decides when messages are read."""

    def __init__(self, schema: Schema, calls: Calls, requests: Requests, incidents: Incidents, label: str = "") -> None:
        """`label`: stands in front of the methods' names in metrics."""
        self._schema, self._calls, self._requests, self._incidents = schema, calls, requests, incidents
        self._label = label
        self._methods: dict[str, tuple[Serve, Callable[[bytes], Any] | None]] = {}

    def handler(self) -> Any:
        """Return the handler to register with a gRPC server."""
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(serve, decode, self._schema.response_of(name).SerializeToString)
            for name, (serve, decode) in self._methods.items()
        }
        return grpc.method_handlers_generic_handler(self._schema.service, handlers)

    @contextlib.asynccontextmanager
    async def _counted(self, method: str, context: Any) -> AsyncIterator[None]:
        """Give a call its status, and count it."""
        begin, code = time.perf_counter(), grpc.StatusCode.OK
        try:
            yield
        except RequestRefused as refused:
            code = status_of(refused.code)
            await refuse(context, refused)
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED  # by the client, or because its deadline has passed
            raise
        except Exception as err:
            code = status_of("internal")
            self._incidents.note("request_failed", method, type(err).__name__)
            await refuse(context, RequestRefused("internal", str(err)))
        finally:
            self._requests.count(f"{self._label}{method}", code.name, time.perf_counter() - begin)

    def unary(self, name: str, method: Unary, is_raw: bool = False) -> None:
        """Serve a method with one request and one response. `is_raw`: it takes the bytes of its request."""

        async def serve(_: Any, context: Any) -> None:
            async with self._calls.begin(context) as call, self._counted(name, context):
                request = await self._calls.read(call, context)
                await self._calls.write(call, context, await method(request, call))

        self._methods[name] = serve, None if is_raw else self._schema.request_of(name).FromString

    def streaming(self, name: str, method: Streaming, is_stream: bool) -> None:
        """Serve a method with many responses. `is_stream`: its requests are many too."""

        async def serve(requests: Any, context: Any) -> None:
            async with self._calls.begin(context) as call, self._counted(name, context):
                request = self._calls.stream(call, requests) if is_stream else await self._calls.read(call, context)
                async with contextlib.aclosing(method(request, call)) as responses:
                    async for response in responses:
                        await self._calls.write(call, context, response)

        self._methods[name] = serve, self._schema.request_of(name).FromString

    def talking(self, name: str, method: Talk) -> None:
        """Serve a method that reads and writes at the same time. It takes the bytes of its requests."""

        async def serve(requests: Any, context: Any) -> None:
            async with self._calls.begin(context) as call, self._counted(name, context):

                async def write(response: Any) -> None:
                    await self._calls.write(call, context, response)

                await method(self._calls.listen(call, requests), call, write)

        self._methods[name] = serve, None


def podbus_handler(bus: PodBus, calls: Calls, requests: Requests, incidents: Incidents) -> Any:
    """Return the handler of podbus.v1.PodBus."""
    service = _Service(PODBUS, calls, requests, incidents)
    service.unary("Produce", bus.produce)
    service.unary("Consume", bus.consume)
    service.streaming("ProduceStream", bus.produce_stream, is_stream=True)
    service.streaming("ConsumeStream", bus.consume_stream, is_stream=False)
    return service.handler()


def kmq_handler(kmq: KmqV1, calls: Calls, requests: Requests, incidents: Incidents) -> Any:
    """Return the handler of kmq.v1.Kmq. It parses requests itself: gRPC says of a wrong one only that it is wrong."""
    service = _Service(KMQ, calls, requests, incidents, "kmq.v1/")
    service.unary("Produce", kmq.produce, is_raw=True)
    service.unary("Fetch", kmq.fetch, is_raw=True)
    service.talking("Subscribe", kmq.subscribe)
    return service.handler()


# --- health ----------------------------------------------------------------------------------------------------------
# gRPC's own servicer is not used, because it holds a lock while it writes to a watcher. A watcher that reads nothing would
# block the task that reports a change of health, and with it the gateway's heartbeat.

HEALTH: str = health.SERVICE_NAME
_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Tells gRPC clients whether a write can be made durable now."""

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
