"""The gateway: lines out, gRPC, and HTTP. One asyncio process beside the four stages; it owns no log.

    __main__.py   the command, and the process until its modules are loaded: settings, ownership, heartbeat, exit code
    server.py     the process from then on: what it opens, watches and ends
    ports.py      every port it listens on, and every connection from accept to its end
    access.py     who may do what over HTTP
    core/         what all doors share; knows none of them: the broker's state, topics, partitions, producing, fetching,
                  finding a record, metrics, and the compactor, a process of its own
    groups/       consumer groups; knows the core, and no door: coordinator.py is pure code, offsets.py what is on disk,
                  membership.py both as doors use them, reader.py what a member reads next, and redelivery.py what comes
                  again; streaming.py and polling.py are for members that hold a stream, and that ask and go away
    console/      the console: what its API shows, and the files of its page; knows the core and the groups, and no door
    http/         door: HTTP. operations.py declares every path of the API, schema.py its JSON, logs.py is /v1/…
    lines/        door: lines out, and GET_STATUS
    grpc/         door: gRPC. podbus.py and kmq_v1.py are what the methods do (podbus.proto, kmq.proto; podbus.desc and
                  kmq.desc are these files compiled)

A door never imports another door. Further doors get a folder each, beside http/ and grpc/.

The gateway produces through ingress' acknowledged protocol and reads the queue files that the router writes. So it can
be killed and started at any time: a client without a reply sends its request again.
"""

from importlib.util import find_spec


def is_installed() -> bool:
    """Return True if the extra `gateway` is installed. Imports none of its packages."""
    return all(map(find_spec, ("aiohttp", "grpc", "grpc_health", "grpc_reflection", "prometheus_client")))
