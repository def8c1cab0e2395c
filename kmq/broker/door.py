"""A follower's client ports: each TCP connection is spliced to the same port of the broker that leads the shard.

Only bytes pass, so one mechanism serves every protocol, with TLS or without: the leader and the client speak with each
other. An end passes as what it was: a half-close as a half-close, a reset as a reset. That matters, because an orderly
end tells a producer that all of its lines were taken.

Leader      Another leader, or another address of its doors: every spliced connection is reset; clients come back, and
            send again what was not answered. A connection waits WAIT_S for a leader that accepts it, from when it came
            or from when the leader was last another one. Then it is refused by what its port speaks: `!err 0 no_leader`,
            HTTP 503, or by its end.
Memory      None for what passes: it stays in the kernel of one side until the kernel of the other takes it. So a side
            that does not read is backpressure for the other. At most `most` connections, and _REFUSED that are told why
            there are no more.
Time        `is_over` is asked at least every _TURN_S. Names of hosts are looked up in a thread: no stranger's name server
            holds up the heartbeat.
One hop     Nobody is a leader here before it has led in the epoch that this broker has promised (kmq/replica/stages.py),
            so two brokers never pass a connection on to each other.
Not covered Rights by address: the leader sees this broker as the peer (docs/security.md).
"""

import contextlib
import errno
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kmq.broker.ports import cannot_listen, listening
from kmq.broker.stats import Incidents, Row, Strangers
from kmq.config.intakes import MOST, is_among
from kmq.config.values import KIB
from kmq.files import replace_file
from kmq.logfmt import Logger
from kmq.wire import refusals

LINES, CONSUMERS, HTTP, OTHER = "lines", "consumers", "http", ""  # what a port speaks, so how a client is refused there
WAIT_S = 5.0

_TURN_S = 0.1
_ASK_S = 0.02
_SAY_S = 1.0  # between two log lines of one event; how long a refused client has to read why
_AGAIN_S = 0.25  # after an attempt to connect that failed
_PIECE = 64 * KIB
_BATCH = 64  # connections accepted, or connected, in a row
_REFUSED = 16
_RESET, _ORDERLY = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
_OPTIONS = ((socket.SOL_SOCKET, socket.SO_LINGER, _RESET), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1))
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT

Address = tuple[int, tuple[Any, ...]]  # family, and what connect() takes


# The ports of a broker as its note in Consul names them → its file KMQ_PIPES/<file>.port.
PORTS = {"lines": "ingress", "acks": "ack", "lines_tls": "tls"} | {
    name: name
    for name in (
        *("egress", "egress_tls", "http", "https", "grpc", "grpcs", "status", "kafka", "kafka_tls"),
        *(f"intake{at}" for at in range(1, MOST + 1)),
    )
}

# Where clients of Kafka are told that a broker is, if that is not its port (KMQ_KAFKA_ADVERTISE): by whether it has TLS.
KAFKA_ADVERTISED = {False: "kafka_advertised", True: "kafka_tls_advertised"}


def known_shard(pipes: str) -> dict[str, Any]:
    """Return the shard as our replica has read it from Consul last (kmq/replica/shard.py).

    Return {} if it has not yet, or if that cannot be read: nobody ends for that, and the replica writes it anew at once.
    """
    try:
        with open(f"{pipes}/cluster.json", encoding="ascii") as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return {}


def advertised(pipes: str, *names: str) -> list[str]:
    """Return where the brokers of our shard have these of PORTS, as host:port, whether they are alive or not."""
    brokers = known_shard(pipes).get("brokers", {}).values()
    return [each["doors"][name] for each in brokers if each for name in names if name in each.get("doors", {})]


class Door(NamedTuple):
    """One port. `name`: as in the leader's addresses, one of PORTS; `setting`: of its number; `speaks`: OTHER: its end.

    `sources`: the networks that may connect; (): all. The leader sees our address, so it cannot tell.
    """

    name: str
    setting: str
    host: str
    port: int
    speaks: str = OTHER
    sources: tuple[Any, ...] = ()


class _SplicedEnd:
    """One socket of a connection: the client's, or the leader's."""

    __slots__ = (
        "deadline",
        "door",
        "has_ended",
        "is_blocked",
        "is_connecting",
        "mask",
        "other",
        "peer",
        "since",
        "sock",
    )

    def __init__(self, sock: socket.socket, door: Door, peer: str, now: float) -> None:
        self.sock, self.door, self.peer = sock, door, peer
        self.since = now
        sock.setblocking(False)
        self.deadline = 0.0  # of a refused client: when it is closed
        self.other: _SplicedEnd | None = None
        self.mask = 0  # as registered in the epoll; 0: it is not
        self.is_connecting = False  # of the leader's
        self.is_blocked = False  # what has come from here does not fit into the other's kernel
        self.has_ended = False  # everything that came from here was passed on


class FollowerDoors:
    """The doors of one process, open from its making on."""

    def __init__(
        self,
        doors: Sequence[Door],
        most: int,
        leader: Callable[[], dict[str, str]],
        row: Row,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`leader`: the addresses (host:port) of the leader by door; {}: nobody knows. Raises ConfigError."""
        self._most, self._leader, self._row, self._clock = most, leader, row, clock
        self._incidents = Incidents(log.warn)
        self._strangers = Strangers(row, self._incidents)
        self._known = leader()
        self._changed_at = self._again_at = self._look_at = self._say_at = clock()
        self._poll = select.epoll()
        self._listeners: dict[int, tuple[socket.socket, Door]] = {}
        self._ends: dict[int, _SplicedEnd] = {}  # every open end by descriptor
        self._clients: dict[_SplicedEnd, None] = {}
        self._waiting: dict[_SplicedEnd, None] = {}  # clients that are not spliced yet, the oldest first
        self._refused: dict[_SplicedEnd, None] = {}  # clients that were told why, the oldest first
        self._addresses: dict[str, Address | None] = {}  # by host:port; None: being looked up
        self._attempts = 0  # to connect that have failed: the next one takes the next address of a name
        self._names: set[str] = set()  # our own end of each connection to the leader
        self._piece = bytearray(_PIECE)
        self._view = memoryview(self._piece)
        self.ports: dict[str, int] = {}
        try:
            for door in doors:
                self._listen(door)
        except BaseException:
            self.close()
            raise

    def _listen(self, door: Door) -> None:
        try:
            found = listening(door.host, door.port)
        except OSError as err:
            raise cannot_listen(door.setting, door.host, door.port, err) from err
        self.ports[door.name] = found[0].getsockname()[1]
        for sock in found:
            self._listeners[sock.fileno()] = sock, door
            self._poll.register(sock, _IN)

    def write_ports(self, pipes: str) -> None:
        """Write where the doors are to the files in which clients look for the ports."""
        for name, port in self.ports.items():
            replace_file(f"{pipes}/{PORTS[name]}.port", b"%d\n" % port)

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Splice until it is over; then close everything at once."""
        ask_at = 0.0
        try:
            while (now := time.monotonic()) < ask_at or not is_over():
                ask_at = ask_at if now < ask_at else now + _ASK_S
                self.turn(_TURN_S)
        finally:
            self.close()

    def turn(self, timeout_s: float) -> None:
        """Wait at most this long for something to do, and do it."""
        events = self._poll.poll(timeout_s)
        for fd, event in events:
            if fd in self._ends:  # else it was closed in this turn
                self._serve(self._ends[fd], event)
        for fd, _ in events:  # last: a new connection may get the descriptor of one that was closed
            if fd in self._listeners:
                self._accept(*self._listeners[fd])
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + _TURN_S
            self._follow_leader(now)
            for client in [client for client in self._refused if client.deadline <= now]:
                self._drop(client)
            self._row.connections = len(self._clients)
        self._connect_waiting(now)
        if now >= self._say_at:
            self._say_at = now + _SAY_S
            self._incidents.say()

    def close(self) -> None:
        """Reset every connection, and close the ports."""
        for client in list(self._clients):
            self._drop(client)
        for sock, _ in self._listeners.values():
            sock.close()
        self._listeners.clear()
        self._poll.close()
        self._row.connections = 0
        self._incidents.say()

    # --- clients that come, and that are refused ---------------------------------------------------------------------

    def _accept(self, listener: socket.socket, door: Door) -> None:
        for sock, address in _accepted(listener, self._strangers):
            for level, option, value in (*_OPTIONS, *_KEEPALIVE):
                sock.setsockopt(level, option, value)
            client = _SplicedEnd(sock, door, _text(address), self._clock())
            if door.sources and not is_among(door.sources, address[0]):
                self._strangers.note("intake_refused", client.peer, f"{door.setting}: not in KMQ_INTAKES_FROM")
                sock.close()
            elif client.peer in self._names:
                self._strangers.note("door_leads_here", client.peer, "the leader's address is that of this broker")
                sock.close()
            elif len(self._clients) < self._most:
                self._add(client)
                self._waiting[client] = None
            else:
                self._turn_away(client)

    def _turn_away(self, client: _SplicedEnd) -> None:
        reason = f"{self._most} are open already (KMQ_CONNECTIONS, ulimit -n)"
        self._strangers.turn_away(client.peer, reason)
        if client.door.speaks == LINES and len(self._clients) < self._most + _REFUSED:
            self._add(client)
            self._refuse(client, f"!err 0 connections {reason}\n".encode())
        else:
            client.sock.close()

    def _refuse(self, client: _SplicedEnd, text: bytes) -> None:
        """Say why, and close the connection a moment later: a reset at once would overtake the text."""
        self._waiting.pop(client, None)
        client.deadline = self._clock() + (_SAY_S if text else 0.0)
        self._refused[client] = None
        with contextlib.suppress(OSError):
            client.sock.send(text)
            if client.door.speaks == HTTP:
                client.sock.shutdown(socket.SHUT_WR)

    def _add(self, client: _SplicedEnd) -> None:
        self._ends[client.sock.fileno()] = client
        self._clients[client] = None

    # --- the leader --------------------------------------------------------------------------------------------------

    def _follow_leader(self, now: float) -> None:
        found = self._leader()
        if found == self._known:
            return
        self._known, self._changed_at, self._again_at = found, now, now
        self._addresses.clear()
        for client in [client for client in self._clients if client.other is not None]:
            if client in self._waiting:
                self._disconnect(client)
            else:
                self._drop(client)

    def _connect_waiting(self, now: float) -> None:
        """Connect who waits, and refuse who has waited too long."""
        free = _BATCH if now >= self._again_at else 0
        for client in list(self._waiting):
            if now - max(client.since, self._changed_at) >= WAIT_S:
                if client.other is not None:
                    self._disconnect(client)
                where = self._known.get(client.door.name, "a leader with this port")
                self._strangers.note("no_leader", client.peer, f"waited {WAIT_S:g} s for {where}")
                self._refuse(client, _no_leader(client.door.speaks))
            elif client.other is None and free:
                free -= self._connect(client, self._known.get(client.door.name, ""))

    def _connect(self, client: _SplicedEnd, address: str) -> bool:
        """Begin to connect a client to this address of the leader. Return False if it is not known yet."""
        found = self._find(address) if address else None
        if found is None:
            return False
        family, where = found
        try:
            leader = _SplicedEnd(socket.socket(family, socket.SOCK_STREAM), client.door, "", 0.0)
        except OSError:  # out of descriptors
            self._again_at = self._clock() + _AGAIN_S
            return True
        for level, option, value in _OPTIONS:
            leader.sock.setsockopt(level, option, value)
        client.other, leader.other, leader.is_connecting = leader, client, True
        self._ends[leader.sock.fileno()] = leader
        if leader.sock.connect_ex(where) in (0, errno.EINPROGRESS):
            leader.peer = _text(leader.sock.getsockname())
            self._names.add(leader.peer)
            self._watch(leader, _OUT)
        else:
            self._failed(client)
        return True

    def _failed(self, client: _SplicedEnd) -> None:
        """Try again later, and look the name of the host up again."""
        self._again_at, self._attempts = self._clock() + _AGAIN_S, self._attempts + 1
        self._addresses.pop(self._known.get(client.door.name, ""), None)
        self._disconnect(client)

    def _find(self, address: str) -> Address | None:
        """Return family and socket address of host:port; None while it is being looked up."""
        if address not in self._addresses:
            try:
                self._addresses[address] = _resolve(address, 0, socket.AI_NUMERICHOST)
            except (OSError, ValueError):
                self._addresses[address] = None
                threading.Thread(target=_look_up, args=(address, self._attempts, self._addresses), daemon=True).start()
        return self._addresses.get(address)

    # --- splicing ----------------------------------------------------------------------------------------------------

    def _serve(self, end: _SplicedEnd, event: int) -> None:
        other = end.other
        assert other is not None  # a client is watched only while it is spliced
        if end.is_connecting:
            if end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._failed(other)
                return
            end.is_connecting = False
            del self._waiting[other]
        try:
            if event & _OUT:  # an error too makes it writable
                other.is_blocked = False
                self._pass_on(other, end)
            if event & ~_OUT:
                self._pass_on(end, other)
            if end.has_ended and other.has_ended:
                end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ORDERLY)
                other.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ORDERLY)
        except OSError:
            end.has_ended = other.has_ended = True
        if end.has_ended and other.has_ended:
            self._drop(end if end in self._clients else other)
            return
        for each, its in ((end, other), (other, end)):
            self._watch(each, _IN * (not each.has_ended and not each.is_blocked) | _OUT * its.is_blocked)

    def _pass_on(self, end: _SplicedEnd, other: _SplicedEnd) -> None:
        """Pass on what has come from `end`. Raises OSError if one of both is broken."""
        if end.has_ended or end.is_blocked:
            return
        try:
            count = end.sock.recv_into(self._piece, _PIECE, socket.MSG_PEEK)
        except BlockingIOError:
            return
        if not count:
            end.has_ended = True
            other.sock.shutdown(socket.SHUT_WR)
            return
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = other.sock.send(self._view[:count])
        if sent:
            end.sock.recv_into(self._piece, sent, socket.MSG_TRUNC)  # discards it, without a copy
        end.is_blocked = sent < count

    def _watch(self, end: _SplicedEnd, mask: int) -> None:
        """Wait for these events. Who waits for none is not registered: an end would be reported again and again."""
        if mask == end.mask:
            return
        if not mask:
            self._poll.unregister(end.sock)
        elif end.mask:
            self._poll.modify(end.sock, mask)
        else:
            self._poll.register(end.sock, mask)
        end.mask = mask

    def _disconnect(self, client: _SplicedEnd) -> None:
        """Close the leader's end of a client."""
        leader, client.other = client.other, None
        assert leader is not None
        del self._ends[leader.sock.fileno()]
        self._names.discard(leader.peer)
        leader.sock.close()  # which takes it out of the epoll

    def _drop(self, client: _SplicedEnd) -> None:
        """Close both ends: by a reset, unless both have ended in order."""
        if client.other is not None:
            self._disconnect(client)
        for table in (self._clients, self._waiting, self._refused):
            table.pop(client, None)
        del self._ends[client.sock.fileno()]
        client.sock.close()


def addresses(pipes: str, host: str) -> dict[str, str]:
    """Return the addresses of the ports of this broker by name, as others reach them under `host`."""
    try:
        written = set(os.listdir(pipes))  # most of PORTS are not: one look is cheaper than many misses
    except OSError:
        return {}
    found = {}
    for name, file in PORTS.items():
        if f"{file}.port" in written:
            with contextlib.suppress(OSError, ValueError), open(f"{pipes}/{file}.port", "rb") as text:
                found[name] = host_port(host, int(text.read()))
    return found


def host_port(host: str, port: int) -> str:
    """Return an address as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _accepted(listener: socket.socket, strangers: Strangers) -> Iterator[tuple[socket.socket, tuple[Any, ...]]]:
    """Yield the connections that wait at a listener, some at a time."""
    for _ in range(_BATCH):
        try:
            yield listener.accept()
        except BlockingIOError:
            return
        except ConnectionError:
            continue
        except OSError as err:  # out of descriptors: what is open goes on
            strangers.note("accept_failed", "", err.strerror or str(err))
            time.sleep(_TURN_S)
            return


def _text(address: tuple[Any, ...]) -> str:
    return f"{address[0]}:{address[1]}"


def _resolve(address: str, turn: int, flags: int = 0) -> Address:
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=flags)
    family, _, _, _, where = found[turn % len(found)]
    return family, where


def _look_up(address: str, turn: int, found: dict[str, Address | None]) -> None:
    try:
        found[address] = _resolve(address, turn)
    except (OSError, ValueError):
        time.sleep(_AGAIN_S)
        found.pop(address, None)


def _no_leader(speaks: str) -> bytes:
    """Return what a client is told that no leader has accepted."""
    refusal = refusals.known("no_leader")
    if speaks == LINES:
        return f"!err 0 {refusals.reason(refusal.code)}\n".encode()
    if speaks == CONSUMERS:
        return f"!err {refusals.reason(refusal.code)}\n".encode()
    if speaks == HTTP:
        body = json.dumps({"code": refusal.code, "message": refusal.text, "error": refusal.text}).encode()
        head = f"HTTP/1.1 {refusal.http} Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
        return f"{head}Retry-After: 1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    return b""
