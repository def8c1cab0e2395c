"""The Kafka ports: access, dispatch of requests to their handlers, and Metadata about the broker and its topics.

    Metadata of topic orders    → node 0 at localhost:9092, orders with 8 partitions, all led by node 0

Cluster     To a client this broker is a cluster of one: node 0, leader of every partition, controller, coordinator of
            every group. A shard is a cluster of its brokers, 1 to n, and its leader has all these roles. A follower's
            port passes clients on to the leader (kmq/broker/door.py). The cluster's id is the lineage.
Address     Clients connect to the address that Metadata names. That is KMQ_KAFKA_ADVERTISE. Without it a broker that is
            alone names the address by which the connection has reached it: right for one pod, wrong behind a port that
            is forwarded under another number. In a shard it is where other brokers reach this one (KMQ_ADVERTISE).
Misdirected A client that was told a wrong address returns and asks for the address again. `Seekers` finds it.
Roles       As at the other doors (access.py).
Invariant   A request that cannot be read ends its connection, and no other.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID

from kmq.access.tokens import Tokens
from kmq.broker.door import KAFKA_ADVERTISED, known_shard
from kmq.broker.stats import Row, Strangers
from kmq.config.settings import Settings
from kmq.config.values import KIB
from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.core.connection import drain
from kmq.gateway.core.core import Core
from kmq.gateway.core.metrics import Requests as RequestCounts
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.access import BEFORE, AccessHandler
from kmq.gateway.kafka.connection import ApiHandler, Call, Connection, Handler, Requests
from kmq.gateway.kafka.topic_ids import TopicIds
from kmq.gateway.kafka.wire import BadRequest, ErrorCode, Fields, Header, KafkaRefused, Key, Unsupported
from kmq.log import identity
from kmq.logfmt import Logger
from kmq.message import record

_AUTHENTICATE_S = 10.0  # until a client has shown its token
_REFUSED_S = 0.5  # that a client with a refused token has to end its connection
_LARGE = 64 * KIB  # bytes of a request that is read in a thread, because it would block others
_MANY = 100  # entries of a response that is made in a thread
_API_VERSIONS = {"api_keys": [{"api_key": key, "min_version": key.low, "max_version": key.high} for key in Key]}
_SUPPORTED_S = 60.0  # between two log lines about one client's unknown requests


def _is_long(answer: Fields) -> bool:
    """Return True if an answer has many entries, nested ones included: encoding them would block others."""
    left, count = [answer], 0
    while left:
        for value in left.pop().values():
            if isinstance(value, list | tuple):
                count += len(value)
                if count > _MANY:
                    return True
                left += [row for row in value if isinstance(row, Mapping)]
    return False


class Kafka:
    """The connections of the Kafka ports. An instance is a factory of protocols, as aiohttp's server is."""

    def __init__(
        self,
        cluster: "Cluster",
        tokens: Tokens | None,
        strangers: Strangers,
        counts: RequestCounts,
        log: Logger,
        api_handlers: Sequence[ApiHandler],
    ) -> None:
        self._tokens, self._strangers, self._counts, self._log = tokens, strangers, counts, log
        self._requests = Requests(strangers)
        self._access = AccessHandler(tokens, strangers)
        self._unsupported: dict[str, float] = {}  # client → when it was logged
        self._seekers = Seekers(cluster, log)
        self._handlers: dict[Key, Handler] = {Key.API_VERSIONS: self._api_versions}
        self._api_handlers: Sequence[ApiHandler] = (self._access, cluster, *api_handlers)
        for api_handler in self._api_handlers:
            self._handlers |= api_handler.handlers

    def __call__(self) -> Connection:
        return Connection(self._serve, self._requests, is_open=self._tokens is None)

    @property
    def connections(self) -> int:
        return len(self._requests.connections)

    def publish(self, row: Row) -> None:
        """Write the door's figures into the gateway's row. Call about once a second."""
        row.kafka_connections, row.kafka_misdirected = self.connections, self._seekers.lost()
        row.kafka_cached, row.kafka_rendered = self._counts.batches["cache"], self._counts.batches["lines"]

    def stop(self) -> None:
        """End all connections. Their clients reconnect, and repeat unanswered requests."""
        for connection in [*self._requests.connections]:
            connection.end()

    async def drain(self) -> None:
        """Wait a moment until the connections have ended, then end the API handlers."""
        await drain(self._requests.connections)
        for api_handler in self._api_handlers:
            await api_handler.close()

    # --- one connection ----------------------------------------------------------------------------------------------

    async def _serve(self, connection: Connection) -> None:
        late = None
        if not connection.is_known:
            late = asyncio.get_running_loop().call_later(_AUTHENTICATE_S, self._cut_unknown, connection)
        try:
            while not self._access.has_failed(connection) and (frame := await connection.next_frame()) is not None:
                try:
                    await self._handle(connection, frame)
                except Unsupported as err:
                    return self._note_unsupported(connection, err.header)
                frame = b""  # an idle connection holds none
                await asyncio.sleep(0)  # others have their turn, even if this client has sent many
            await connection.all_answered()
            if self._access.has_failed(connection):
                await self._wait_for_end(connection)
            if connection.bad:
                self._strangers.cut_off(connection.peer, f"Kafka: {connection.bad}")
        except BadRequest as err:
            self._strangers.cut_off(connection.peer, f"Kafka: {err}")
        finally:
            if late is not None:
                late.cancel()
            for api_handler in self._api_handlers:
                api_handler.forget(connection)

    async def _wait_for_end(self, connection: Connection) -> None:
        """Give a refused client time to read why. Some clients read nothing once a connection has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REFUSED_S):
                while await connection.next_frame() is not None:
                    pass

    async def _handle(self, connection: Connection, frame: bytes) -> None:
        """Answer a request, or begin to. Raises BadRequest and Unsupported, which allow no answer."""
        if self._access.is_bare(connection):
            return await connection.answer(frame, self._access.bare(connection, frame))
        view = memoryview(frame)
        try:
            found = wire.header(view)
        except Unsupported as err:
            if err.header.key != Key.API_VERSIONS:
                raise
            await connection.all_answered()
            # In the oldest version, which every client can read.
            refused = _API_VERSIONS | {"error_code": ErrorCode.unsupported_version}
            return await connection.answer(frame, wire.encode(err.header._replace(version=0), refused))
        key = Key(found.key)
        if not connection.is_known and key not in BEFORE:
            self._strangers.refuse(connection.peer, f"Kafka {key.name} without a token", "token")
            raise ConnectionAbortedError("not authenticated")
        by_hand = key in (Key.PRODUCE, Key.FETCH)
        if by_hand:
            body = wire.Reader(view, found.body, wire.is_flexible(key, found.version))
        elif len(frame) < _LARGE:
            body = wire.decode(found, view)
        else:
            body = await asyncio.to_thread(wire.decode, found, view)
        call = Call(found, body, connection, [])
        connection.is_admitted = connection.is_known
        if key == Key.PRODUCE:
            return await connection.answer_later(frame, self._answer(call))
        await connection.all_answered()
        connection.pending, connection.may_wait = 1, True
        response = await self._answer(call)
        connection.pending, connection.may_wait = 0, False
        await connection.answer(frame, response)

    async def _answer(self, call: Call) -> bytes | None:
        answer = self._access.refusal(call) or await self._handlers[Key(call.header.key)](call)
        if isinstance(answer, Mapping) and answer.get("error_code"):
            call.errors.append(answer["error_code"])
        self._seekers.note(call, answer)
        code = call.errors[0].name if call.errors else "OK"
        self._counts.count_kafka(Key(call.header.key).name.lower(), code)
        if not isinstance(answer, Mapping):
            return answer
        if _is_long(answer):
            return await asyncio.to_thread(wire.encode, call.header, answer)
        return wire.encode(call.header, answer)

    def _note_unsupported(self, connection: Connection, header: Header) -> None:
        """Log, once a minute for each client, which requests of it are not served."""
        now = time.monotonic()
        self._unsupported = {name: at for name, at in self._unsupported.items() if now - at < _SUPPORTED_S}
        if header.client not in self._unsupported and len(self._unsupported) < 100:
            self._unsupported[header.client] = now
            self._log.warn(
                "kafka_unsupported",
                peer=connection.peer,
                client=header.client,
                key=header.key,
                version=header.version,
                effect="its connection is closed",
            )

    # --- who it is ---------------------------------------------------------------------------------------------------

    async def _api_versions(self, call: Call) -> Fields:
        return _API_VERSIONS

    def _cut_unknown(self, connection: Connection) -> None:
        if not connection.is_known:
            self._strangers.cut_off(connection.peer, f"Kafka: no token within {_AUTHENTICATE_S:.0f} s")
            connection.force_close()


# --- the cluster -----------------------------------------------------------------------------------------------------

_AUTO_CREATE = "on"
_BY_ID_FROM = 12  # version of Metadata in which a topic may have no name


class BrokerNodes(NamedTuple):
    """The brokers by number. `me` leads every partition. `places`: (node, host, port) of brokers with a known address.

    `is_tls`: they speak TLS there.
    """

    me: int
    replicas: tuple[int, ...]
    insync: tuple[int, ...]
    min_insync: int
    places: tuple[tuple[int, str, int], ...]
    is_tls: bool

    def rows(self) -> list[dict[str, Any]]:
        """Return the brokers as Metadata and DescribeCluster show them."""
        return [{"node_id": at, "broker_id": at, "host": host, "port": port} for at, host, port in self.places]


def asks_for_all(call: Call) -> bool:
    """Return True if this Metadata request is about all topics."""
    return call.body.topics is None or (call.version == 0 and not call.body.topics)


class Cluster(ApiHandler):
    """Metadata and related requests: brokers, topics, partitions."""

    def __init__(self, settings: Settings, core: Core, ids: TopicIds, epoch: Callable[[], int]) -> None:
        """`epoch`: in which this broker leads its shard; 0: it is alone."""
        self._settings, self._core, self._ids, self.epoch = settings, core, ids, epoch
        self.handlers: dict[Key, Handler] = {
            Key.METADATA: self._metadata,
            Key.DESCRIBE_CLUSTER: self._describe,
            Key.FIND_COORDINATOR: self._coordinator,
        }

    def nodes(self, connection: Connection) -> BrokerNodes:
        """Return the brokers with addresses for this client. A shard is as the replica last read it."""
        shard = known_shard(self._settings.pipes) if self._settings.shard else {}
        numbers = dict(zip(shard.get("members", ()), count(1)))
        me = numbers.get(self._settings.broker)
        if me is None:
            return BrokerNodes(0, (0,), (0,), 1, ((0, *self._alone(connection)),), connection.is_tls)
        brokers = shard["brokers"]
        doors = {node: brokers[name]["doors"] for name, node in numbers.items() if brokers[name]}
        names = KAFKA_ADVERTISED[connection.is_tls], "kafka_tls" if connection.is_tls else "kafka"
        if names[1] in doors.get(me, {}):  # Consul may still have the port of an earlier role: the client came to ours
            host, port = doors[me][names[1]].rpartition(":")[0], connection.transport.get_extra_info("sockname")[1]
            doors[me] = doors[me] | {names[1]: f"{host}:{port}"}
        texts = {node: found.get(names[0]) or found.get(names[1]) for node, found in doors.items()}
        places = ((node, *text.rsplit(":", 1)) for node, text in texts.items() if text)
        return BrokerNodes(
            me,
            tuple(numbers.values()),
            tuple(numbers[name] for name in shard["isr"]),
            int(shard["min_insync"]),
            tuple((node, host.strip("[]"), int(port)) for node, host, port in places),
            connection.is_tls,
        )

    def address(self, connection: Connection) -> tuple[str, int]:
        """Return host and port of this broker for this client."""
        nodes = self.nodes(connection)
        return next(((host, port) for node, host, port in nodes.places if node == nodes.me), ("", 0))

    def _alone(self, connection: Connection) -> tuple[str, int]:
        """Return host and port for this client of a broker that is alone."""
        found = (self._settings.kafka_advertise or {}).get(connection.is_tls)
        if found is not None:
            return found
        host, port = connection.transport.get_extra_info("sockname")[:2]
        return ("localhost" if host in ("127.0.0.1", "::1") else host), port

    def _broker_fields(self, nodes: BrokerNodes) -> dict[str, Any]:
        """Return the brokers' part of Metadata and DescribeCluster."""
        id = identity.lineage(self._settings.data)
        return {"brokers": nodes.rows(), "cluster_id": id, "controller_id": nodes.me}

    async def _metadata(self, call: Call) -> Fields:
        topics = call.body.topics
        if asks_for_all(call):
            names = await self._core.topics.names()
        else:
            names = [*dict.fromkeys([topic.name for topic in topics if topic.name is not None])]
        by_id = [topic.topic_id for topic in topics or () if topic.name is None]
        may_create = topics is not None and getattr(call.body, "allow_auto_topic_creation", True)
        rows, nodes = [], self.nodes(call.connection)
        for name in names:
            rows.append(await self._topic(call, name, may_create, nodes))
            if len(rows) % _MANY == 0 or len(rows[-1]["partitions"]) > _MANY:
                await asyncio.sleep(0)
        for id in dict.fromkeys(by_id):
            rows.append(await self._topic_of(call, id, nodes))
            if len(rows) % _MANY == 0 or len(rows[-1]["partitions"]) > _MANY:
                await asyncio.sleep(0)
        return self._broker_fields(nodes) | {"topics": rows}

    async def _topic(self, call: Call, name: str, may_create: bool, nodes: BrokerNodes) -> Fields:
        """Return a topic as Metadata shows it. Create it first if it is missing, and that is wanted and allowed."""
        code, partitions, id = ErrorCode.none, 0, None
        try:
            partitions = await self.partitions(call, name, may_create)
            id = self._ids.of(name)
        except RequestRefused as err:
            is_name = err.fields.get("field") == "name"
            code = ErrorCode.invalid_topic_exception if is_name else wire.code_of(err)
        rows = [
            {
                "partition_index": number,
                "leader_id": nodes.me,
                "leader_epoch": self.epoch(),
                "replica_nodes": nodes.replicas,
                "isr_nodes": nodes.insync,
            }
            for number in range(partitions)
        ]
        is_internal = name.startswith("__")
        return {"error_code": code, "name": name, "topic_id": id, "is_internal": is_internal, "partitions": rows}

    async def _topic_of(self, call: Call, id: UUID | None, nodes: BrokerNodes) -> Fields:
        """Return the topic with this id as Metadata shows it."""
        name = None if id is None else await self._ids.topic(id)
        row = None if name is None else await self._topic(call, name, False, nodes)
        if row is not None and row["topic_id"] == id:
            return row
        code, none = ErrorCode.unknown_topic_id, None if call.version >= _BY_ID_FROM else ""
        return {"error_code": code, "name": none, "topic_id": id, "partitions": ()}

    async def partitions(self, call: Call, name: str, may_create: bool) -> int:
        """Return how many partitions a topic has. Raises RequestRefused."""
        try:
            count, from_seq = self._core.partitions.declared(name)
            if from_seq is not None or not may_create:
                return count
        except RequestRefused as err:
            if err.code != "unknown_topic":
                raise
            if name.startswith("__") or not record.is_topic(name):
                raise RequestRefused("bad_topic", NAMES) from None
            if not may_create or self._settings.auto_create_topics != _AUTO_CREATE:
                raise
            if call.holder is not None and not call.may(Key.PRODUCE):
                raise RequestRefused("forbidden", call.holder.refusal(Key.PRODUCE.act)) from None
        made, _ = await self._core.topics.create(name, self._settings.kafka_partitions, {})
        if made.from_seq is None:  # a batch would be refused, too, so the client asks again
            raise KafkaRefused(ErrorCode.leader_not_available, f"topic {name} is in force once the router is up")
        return made.partitions

    async def _describe(self, call: Call) -> Fields:
        return self._broker_fields(self.nodes(call.connection))

    async def _coordinator(self, call: Call) -> Fields:
        nodes = self.nodes(call.connection)
        # Without an address: this broker's own entry has not returned from Consul yet.
        none = {"error_code": ErrorCode.coordinator_not_available}
        me = next((row for row in nodes.rows() if row["node_id"] == nodes.me), none)
        return me | {"coordinators": [me | {"key": key} for key in getattr(call.body, "coordinator_keys", ())]}


NAMES = (
    "a topic's name must match [A-Za-z0-9_][A-Za-z0-9_.-]{0,199} and not begin with append, dropped or __,"
    " which are KMQ's own"
)


# --- misdirected clients ---------------------------------------------------------------------------------------------

_SEEKING = (Key.METADATA, Key.FIND_COORDINATOR, Key.INIT_PRODUCER_ID)  # a new client's first requests
_LOOKS, _LOOKS_S = 10, 60.0  # a client that only asks, so many times in so many seconds, is misdirected
_LOOK_S = 1.0  # requests that follow each other within this time are one look
_MOST_SEEKERS = 1000
_LONGEST_CLIENT = 100


class Seekers:
    """Clients that have asked where the broker is, and have sent no other request since.

    Judgement   A client is its host and its client.id. A client that was told the right address soon sends another
                request, and is forgotten here. A client that was told a wrong address asks again every second or so, on
                the same connection or on a new one. A client that asks for all topics lists them, and has what it
                wanted. A client whose topic does not exist waits for the topic.
    Memory      At most _MOST_SEEKERS; those that asked longest ago make room.
    Not covered A client that asks once: it gives up, or tries only the address that it was told. A client that shares
                host and client.id with another, for which the address is right. A program that does nothing but ask
                about named topics, ten times a minute, is taken for misdirected.
    """

    def __init__(self, cluster: Cluster, log: Logger) -> None:
        self._cluster, self._log = cluster, log
        # host, client.id, whether it has asked for more than topics → times of its requests; the latest is last
        self._looks: dict[tuple[str, str, bool], deque[float]] = {}
        self._address, self._logged_at = "", -_LOOKS_S

    def note(self, call: Call, answer: Fields | bytes | None) -> None:
        """Note a client's request, and whether it only asks for the address again."""
        key = call.header.key
        if key in BEFORE or (key not in _SEEKING and not self._looks):
            return
        host, client = call.connection.peer.rpartition(":")[0], call.header.client[:_LONGEST_CLIENT]
        if key not in _SEEKING:
            self._looks.pop((host, client, False), None)
            self._looks.pop((host, client, True), None)
        elif key == Key.METADATA and asks_for_all(call):
            self._looks.pop((host, client, False), None)
        elif isinstance(answer, Mapping) and not call.errors and not any(map(_has_failed, answer.get("topics", ()))):
            self._look((host, client, key != Key.METADATA), call.connection)

    def _look(self, seeker: tuple[str, str, bool], connection: Connection) -> None:
        looks, now = self._looks.pop(seeker, None) or deque(maxlen=_LOOKS), time.monotonic()
        self._looks[seeker] = looks
        if not looks or now - looks[-1] >= _LOOK_S:
            looks.append(now)
        if len(self._looks) > _MOST_SEEKERS:
            del self._looks[next(iter(self._looks))]
        if len(looks) == _LOOKS:
            self._address = ":".join(map(str, self._cluster.address(connection)))

    def lost(self) -> int:
        """Return how many clients are misdirected; log it once a minute."""
        now = time.monotonic()
        self._looks = {seeker: looks for seeker, looks in self._looks.items() if now - looks[-1] < _LOOKS_S}
        lost = {
            seeker[:2] for seeker, looks in self._looks.items() if len(looks) == _LOOKS and now - looks[0] < _LOOKS_S
        }
        if lost and now - self._logged_at >= _LOOKS_S:
            self._logged_at = now
            host, client = min(lost)
            self._log.warn(
                "kafka_misdirected",
                count=len(lost),
                peer=host,
                client=client,
                told=self._address,
                effect="they connect there, and do not come to this broker",
                advice="set KMQ_KAFKA_ADVERTISE to the host and port by which clients reach it",
            )
        return len(lost)


def _has_failed(topic: Fields) -> bool:
    return bool(topic["error_code"])
