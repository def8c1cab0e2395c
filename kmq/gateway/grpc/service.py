"""PodBus as a gRPC service: refusals become statuses, and every call is counted."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from kmq.broker.incidents import Incidents
from kmq.gateway.core.metrics import Requests
from kmq.gateway.core.refused import RequestRefused
from kmq.gateway.grpc.calls import Calls
from kmq.gateway.grpc.podbus import PodBus
from kmq.gateway.grpc.schema import SERVICE, request_of, response_of
from kmq.gateway.grpc.statuses import refuse, status_of

Unary = Callable[[Any, Any], Awaitable[Any]]
Streaming = Callable[[Any, Any], AsyncGenerator[Any, None]]
Serve = Callable[[Any, Any], Awaitable[None]]


class Service:
    """The four methods for a server. Each is registered as a stream, so that `calls` decides when messages are read."""

    def __init__(self, bus: PodBus, calls: Calls, requests: Requests, incidents: Incidents) -> None:
        self._calls, self._requests, self._incidents = calls, requests, incidents
        self._methods: dict[str, Serve] = {
            "Produce": self._unary("Produce", bus.produce),
            "Consume": self._unary("Consume", bus.consume),
            "ProduceStream": self._streaming("ProduceStream", bus.produce_stream, is_stream=True),
            "ConsumeStream": self._streaming("ConsumeStream", bus.consume_stream, is_stream=False),
        }

    def handler(self) -> Any:
        """Return the handler to register with a gRPC server."""
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(
                serve, request_of(name).FromString, response_of(name).SerializeToString
            )
            for name, serve in self._methods.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

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
            self._requests.count(method, code.name, time.perf_counter() - begin)

    def _unary(self, name: str, method: Unary) -> Serve:
        async def serve(_: Any, context: Any) -> None:
            async with self._calls.begin(context) as call, self._counted(name, context):
                request = await self._calls.read(call, context)
                await self._calls.write(call, context, await method(request, call))

        return serve

    def _streaming(self, name: str, method: Streaming, is_stream: bool) -> Serve:
        """`is_stream`: the requests of the method are a stream too."""

        async def serve(requests: Any, context: Any) -> None:
            async with self._calls.begin(context) as call, self._counted(name, context):
                asked = self._calls.stream(call, requests) if is_stream else await self._calls.read(call, context)
                async with contextlib.aclosing(method(asked, call)) as responses:
                    async for response in responses:
                        await self._calls.write(call, context, response)

        return serve
