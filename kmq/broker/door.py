"""A follower's client ports: each TCP connection is spliced to the same port of the broker that leads the shard.

Only bytes pass, so one mechanism serves every protocol, with TLS or without: the leader and the client speak with each
other. The end of a connection keeps its kind: a half-close stays a half-close, a reset stays a reset. An orderly end
tells a producer that all of its lines were taken.

Leader      If the leader or its addresses change, every spliced connection is reset; clients reconnect, and repeat what
            was not answered. A connection waits WAIT_S for a leader that accepts it, counted from its start or from the
            last change of leader. Then it is refused in its port's protocol: `!err 0 no_leader`, HTTP 503, or a closed
            connection. If this broker has reached no leader for long, it is refused at once.
Dead paths  If a side acknowledges no sent byte for `dead_s`, both are closed; keepalive finds idle dead sides. A side
            that acknowledges and does not read is alive. TCP_USER_TIMEOUT would close it too, and so end backpressure.
Memory      None for the data: it stays in one side's kernel buffer until the other side's has room. So a side that does
            not read slows the other down. At most `most` connections, and _REFUSED more that are told the limit.
Time        `is_over` is asked at least every _TURN_S. Host names are looked up in a thread, so that a slow name server
            never delays the heartbeat.
One hop     A broker counts as the leader only once it has led in the epoch that this broker has promised
            (kmq/replica/stages.py). So two brokers never pass a connection on to each other.
Not covered Rights by address: the leader sees this broker as the peer (docs/security.md).
"""

import contextlib
import errno
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kmq.broker.ports import OPEN_AGAIN_S, cannot_listen, is_taken, listening, say_closed, say_opened
from kmq.broker.stats import Incidents, Row, Strangers
from kmq.config.intakes import MOST, is_among
from kmq.config.values import KIB
from kmq.files import replace_file
from kmq.logfmt import Logger
from kmq.wire import refusals

LINES, CONSUMERS, HTTP, OTHER = "lines", "consumers", "http", ""  # the protocol of a port: how it refuses a client
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
_KEEPALIVE_TRIES = 4
_SWEEP_S = 1.0  # between two looks for unacknowledged bytes
# Of struct tcp_info (linux/tcp.h): packets that are not acknowledged; ms since the last acknowledgement.
_TCP_INFO, _UNACKED_AT, _LAST_ACK_AT = 60, 24, 56
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

# The address that Kafka's clients are told, if it is not the port's own (KMQ_KAFKA_ADVERTISE): by whether it has TLS.
KAFKA_ADVERTISED = {False: "kafka_advertised", True: "kafka_tls_advertised"}


def known_shard(pipes: str) -> dict[str, Any]:
    """Return the shard as our replica last read it from Consul (kmq/replica/shard.py).

    Return {} if the file is missing or unreadable: no process ends for that, and the replica rewrites it at once.
    """
    try:
        with open(f"{pipes}/cluster.json", encoding="ascii") as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return {}


def advertised(pipes: str, *names: str) -> list[str]:
    """Return the addresses (host:port) of these PORTS of all brokers of our shard, alive or not."""
    brokers = known_shard(pipes).get("brokers", {}).values()
    return [each["doors"][name] for each in brokers if each for name in names if name in each.get("doors", {})]


class Door(NamedTuple):
    """One port. `name`: one of PORTS, as in the leader's addresses; `setting`: of its number; `speaks`: a protocol.

    `sources`: the networks that may connect; (): all. Checked here, because the leader sees our address.
    `may_wait`: where another program uses its port, it stays closed, and is tried again; the others serve.
    """

    name: str
    setting: str
    host: str
    port: int
    speaks: str = OTHER
    sources: tuple[Any, ...] = ()
    may_wait: bool = False


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
        "unacked_since",
    )

    def __init__(self, sock: socket.socket, door: Door, peer: str, now: float) -> None:
        self.sock, self.door, self.peer = sock, door, peer
        self.since = now
        sock.setblocking(False)
        self.deadline = 0.0  # of a refused client: when it is closed
        self.other: _SplicedEnd | None = None
        self.mask = 0  # as registered in the epoll; 0: it is not
        self.is_connecting = False  # of the leader's
        self.is_blocked = False  # its data does not fit into the other's kernel buffer
        self.has_ended = False  # everything that came from here was passed on
        self.unacked_since = 0.0  # since when sent bytes wait for an acknowledgement; 0: no bytes wait


class FollowerDoors:
    """The doors of one process, opened by the constructor."""

    def __init__(
        self,
        doors: Sequence[Door],
        most: int,
        leader: Callable[[], dict[str, str] | None],
        row: Row,
        log: Logger,
        clock: Callable[[], float] = time.monotonic,
        dead_s: float = 60.0,
    ) -> None:
        """`leader`: the leader's addresses (host:port) by door; {}: not known, None: clients should look elsewhere.

        `dead_s`: seconds after which a connection over a dead path is closed. Raises ConfigError if a port cannot be
        opened, unless it is in use and its door may wait: then it is in `closed`.
        """
        self._dead_s = dead_s
        self._options: tuple[tuple[int, int, int | bytes], ...] = (*_OPTIONS, *_keepalive(dead_s))
        self._most, self._leader, self._row, self._clock = most, leader, row, clock
        self._log, self._incidents = log, Incidents(log.warn)
        self._strangers = Strangers(row, self._incidents)
        self._leader_doors = leader()
        self._changed_at = self._again_at = self._look_at = self._say_at = self._sweep_at = clock()
        self._poll = select.epoll()
        self._listeners: dict[int, tuple[socket.socket, Door]] = {}
        self._ends: dict[int, _SplicedEnd] = {}  # every open end by descriptor
        self._clients: dict[_SplicedEnd, None] = {}
        self._waiting: dict[_SplicedEnd, None] = {}  # clients that are not spliced yet, the oldest first
        self._refused: dict[_SplicedEnd, None] = {}  # refused clients that read the reason, the oldest first
        self._addresses: dict[str, Address | None] = {}  # by host:port; None: being looked up
        self._attempts = 0  # failed attempts to connect: the next one takes the next address of the name
        self._names: set[str] = set()  # our own end of each connection to the leader
        self._piece = bytearray(_PIECE)
        self._view = memoryview(self._piece)
        self.ports: dict[str, int] = {}
        self.closed: dict[str, Door] = {}  # doors whose ports another program uses
        self._open_at = self._changed_at  # when they are tried next
        self._pipes = ""  # where the files with the ports are
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
            if not (door.may_wait and is_taken(err)):
                raise cannot_listen(door.setting, door.host, door.port, err) from err
            self.closed[door.name] = door
            say_closed(self._log, door.setting, door.port)
        else:
            self._accept_at(door, found)

    def _accept_at(self, door: Door, found: list[socket.socket]) -> None:
        self.ports[door.name] = found[0].getsockname()[1]
        for sock in found:
            self._listeners[sock.fileno()] = sock, door
            self._poll.register(sock, _IN)

    def write_ports(self, pipes: str) -> None:
        """Write where the doors are to the files in which clients look for the ports."""
        self._pipes = pipes
        for name, port in self.ports.items():
            self._write_port(name, port)
        for name in self.closed:  # of an earlier life: a client would find another program there
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{pipes}/{PORTS[name]}.port")

    def _write_port(self, name: str, port: int) -> None:
        replace_file(f"{self._pipes}/{PORTS[name]}.port", b"%d\n" % port)

    def _open_closed(self, now: float) -> None:
        """Open the ports that other programs have released."""
        self._open_at = now + OPEN_AGAIN_S
        for name, door in [*self.closed.items()]:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                found = listening(door.host, door.port)
                for sock in found:
                    stack.callback(sock.close)
                self._write_port(name, found[0].getsockname()[1])  # the disk may be full: then it is tried again
                stack.pop_all()
                self._accept_at(door, found)
                del self.closed[name]
                say_opened(self._log, door.setting, self.ports[name])

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Splice until `is_over` returns True; then close everything at once."""
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
        if self.closed and now >= self._open_at:
            self._open_closed(now)
        self._connect_waiting(now)
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            self._end_dead(now)
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
            for level, option, value in self._options:
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
        """Send `text`, and close the connection a moment later: a reset at once would overtake the text."""
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
        if found == self._leader_doors:
            return
        self._leader_doors, self._changed_at, self._again_at = found, now, now
        self._addresses.clear()
        for client in [client for client in self._clients if client.other is not None]:
            if client in self._waiting:
                self._disconnect(client)
            else:
                self._drop(client)

    def _connect_waiting(self, now: float) -> None:
        """Connect the waiting clients, and refuse those that have waited too long."""
        free = _BATCH if now >= self._again_at else 0
        for client in list(self._waiting):
            if self._leader_doors is None or now - max(client.since, self._changed_at) >= WAIT_S:
                if client.other is not None:
                    self._disconnect(client)
                where = self._address_of(client.door) or "a leader with this port"
                why = (
                    f"waited {WAIT_S:g} s for {where}"
                    if self._leader_doors is not None
                    else "this broker reaches no leader"
                )
                self._strangers.note("no_leader", client.peer, why)
                self._refuse(client, _no_leader(client.door.speaks))
            elif client.other is None and free:
                free -= self._connect(client, self._address_of(client.door))

    def _address_of(self, door: Door) -> str:
        return self._leader_doors.get(door.name, "") if self._leader_doors is not None else ""

    def _end_dead(self, now: float) -> None:
        """End the connections of which one side has acknowledged nothing for too long."""
        for end in [*self._ends.values()]:
            if end.other is None or end.is_connecting or end.sock.fileno() < 0:  # perhaps dropped with the one before
                continue
            info = end.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO)
            unacked = int.from_bytes(info[_UNACKED_AT : _UNACKED_AT + 4], sys.byteorder)
            last_ack_s = int.from_bytes(info[_LAST_ACK_AT : _LAST_ACK_AT + 4], sys.byteorder) / 1000
            is_silent = unacked > 0 and last_ack_s >= _SWEEP_S
            end.unacked_since = (end.unacked_since or now) if is_silent else 0.0
            if is_silent and now - end.unacked_since >= self._dead_s:
                client = end if end in self._clients else end.other
                self._strangers.note("path_dead", client.peer, f"acknowledges nothing for {self._dead_s:g} s")
                self._drop(client)

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
        for level, option, value in self._options:
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
        """Retry later, and look the host name up again."""
        self._again_at, self._attempts = self._clock() + _AGAIN_S, self._attempts + 1
        self._addresses.pop(self._address_of(client.door), None)
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
                self._forward(other, end)
            if event & ~_OUT:
                self._forward(end, other)
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

    def _forward(self, end: _SplicedEnd, other: _SplicedEnd) -> None:
        """Forward what has come from `end`. Raises OSError if one of both is broken."""
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
        """Wait for these events. For no event the end is unregistered: its hang-up would be reported endlessly."""
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


def _keepalive(dead_s: float) -> tuple[tuple[int, int, int], ...]:
    """Return the options by which an idle connection over a dead path ends after about that time."""
    between = max(1, int(dead_s / (2 * _KEEPALIVE_TRIES)))
    return (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(dead_s / 2))),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_TRIES),
    )


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
        except OSError as err:  # out of descriptors: open connections continue
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
    """Return the refusal for a client that no leader has accepted."""
    refusal = refusals.by_code("no_leader")
    if speaks == LINES:
        return f"!err 0 {refusals.reason(refusal.code)}\n".encode()
    if speaks == CONSUMERS:
        return f"!err {refusals.reason(refusal.code)}\n".encode()
    if speaks == HTTP:
        body = json.dumps({"code": refusal.code, "message": refusal.text, "error": refusal.text}).encode()
        head = f"HTTP/1.1 {refusal.http} Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
        return f"{head}Retry-After: 1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    return b""
