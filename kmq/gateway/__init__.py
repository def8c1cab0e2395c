"""The gateway: lines out, gRPC, and HTTP. One asyncio process beside the four stages; it owns nothing on disk.

    __main__.py       the command: settings, ownership, exit code
    server.py         the process: what it opens, watches and ends
    ports.py      every port it listens on, with TLS and tokens
    ports.py          every connection, from accept to its end
    core/             what all doors share; knows none of them
      core.py         all of it, for a door to hold
      broker.py       the state of the broker: health, readiness
      topic_admin.py  topics: create, describe, change, delete; topic_options.py: their options
      producing.py    typed messages through ingress; places.py: seq → partition and offset
      fetching.py     messages of one partition, from an offset on
      catalog.py      which logs exist, and their first and end offsets
      bounds.py       the first and end offsets of partitions, cached
      spans.py        a range of records as checked bytes of the files
      partitions.py   what a consumer may read: offsets, batches
      waking.py       readers that wait for new records
      locating.py     where the record with a seq is
      feed.py         the records of a topic in order of seq, and how far the router has come
      compacting.py   starts compactor.py, a process that compacts topics
      metrics.py      every metric
      refused.py      a refused request; kmq/wire/refusals.py has the codes
    groups/           consumer groups; knows the core, and no door
      offset_records.py  the records of topic __consumer_offsets
      store.py        committed offsets: read, written, forgotten
      offset_table.py, offset_log.py, offset_writer.py   its memory, its start, its connection to ingress
      keeping.py      the task that keeps it
      coordinator.py  members, generations, assignments; without I/O and clock
      known_topics.py which topics groups know
      lives.py        how many gateways there were
      membership.py   all of it, as doors use it
    console/          the console: its page, and what its API shows; knows the core and the groups, and no door
      page.py         the files of the page, in static/
      overview.py     the broker as one document; history.py, events.py: what it was
      messages.py     messages by place, seq, key and time; following.py, dead.py
    http/             door: HTTP
      web.py          the application: /metrics /healthz /readyz, and everything below
      api.py          /api/…: topics.py, produce.py, consume.py; bodies.py bounds what they read
      operations.py   every path of the API, declared once; operation.py: what such a declaration is
      schema.py       the JSON that goes in and out, written in the words of shapes.py
      console_operations.py, console_schema.py   the same for the console
      console.py      what the console asks for; console_messages.py: messages, dead letters, and what it may change
      openapi.py      the document and its page, made from these declarations
      message_json.py a message as JSON
      errors.py       refusals as responses
      logs.py         /v1/…, the logs as they are in the files
    lines/            door: lines out, and GET_STATUS
    grpc/             door: gRPC
      podbus.py       what the methods of podbus.v1.PodBus do
      kmq_v1.py       what the methods of kmq.v1.Kmq do; subscription.py: Subscribe; delivering.py: its fetches
      values.py       messages of kmq.v1 as the gateway's values, in and out
      reading.py      the memory of records on their way out
      schema.py       the messages of both (podbus.proto, kmq.proto; podbus.desc and kmq.desc are these files compiled)
      service.py      both as services: statuses, counting
      calls.py        each call: its memory, its deadlines, which call is evicted
      front.py        connections relayed to gRPC
      health.py       service grpc.health.v1.Health
      statuses.py     refusals as gRPC statuses

A door never imports another door. Further doors get a folder each, beside http/ and grpc/.

The gateway produces through ingress' acknowledged protocol and reads the queue files that the
router writes. So it can be killed and started at any time: a client without a reply sends its request again.
"""

from importlib.util import find_spec


def is_installed() -> bool:
    """Return True if the extra `gateway` is installed. Imports none of its packages."""
    return all(map(find_spec, ("aiohttp", "grpc", "grpc_health", "grpc_reflection", "prometheus_client")))
