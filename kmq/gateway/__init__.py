"""The gateway: PodBus over gRPC, and HTTP. One asyncio process beside the four stages; it owns nothing on disk.

    server.py     the process: what it opens, watches and ends
    listeners.py  every port it listens on
    podbus.py     service podbus.v1.PodBus (podbus.proto; podbus.desc is that file compiled)
    feed.py       the records of a topic in order of seq, and how far the router is
    broker.py     how the broker is: health, readiness
    web.py        HTTP: /metrics /healthz /readyz
    logs.py       HTTP: /v1/…, the logs as they are in the files
    spans.py      a range of records as checked bytes of those files
    metrics.py    every metric
    answers.py    every refusal, with its gRPC and its HTTP status

Produces through ingress' acknowledged protocol, over one connection; reads the queue files that the router writes. So it can be
killed and started at any time: a client that was not answered asks again.
"""

from importlib.util import find_spec


def is_installed() -> bool:
    """Whether the extra `gateway` is there. Imports nothing of it."""
    return all(map(find_spec, ("aiohttp", "grpc", "grpc_health", "grpc_reflection", "prometheus_client")))
