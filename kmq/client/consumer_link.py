"""The connection of a kmq.AsyncConsumer: everything runs in one event loop; tasks keep the connection and the member."""

import asyncio
import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable

from kmq.client.connection import CONNECT_S, Address, backoff, keep_alive, open_socket
from kmq.client.consumer_options import logger
from kmq.client.consumer_protocol import Core
from kmq.client.failures import NotAnswered, Refused
from kmq.client.lines import no_connection
from kmq.config.values import KIB
from kmq.errors import KmqError
from kmq.wire.refusals import find
from kmq.wire.replies import Failed, Started, reply
from kmq.wire.requests import EARLIEST, LATEST, BadLine, Consume, TopicPartition

# --- consumer discovery ----------------------------------------------------------------------------------------------
# Which partitions a topic has, and where they end: a consumer without a group reads them all, and `latest` is their ends.
#
# `CONSUME <topic> from=latest` is answered by `!ok <topic>/<partition> offset=<end>` for each partition, and no record. A
# damaged partition may be left out or refused; it is one nevertheless, and whoever reads it hears of the damage.

DISCOVER_S = 10.0  # between two looks for new partitions
_NOT_YET = frozenset({"unknown_topic", "not_found"})


def discover(
    topics: Iterable[str], host: str, port: int, token: str, tls: ssl.SSLContext | None, server_hostname: str | None
) -> dict[TopicPartition, int | None]:
    """Return the partitions of these topics and their ends, None if damage hides one; a topic that is not there has none.

    Raises OSError, Refused.
    """
    found: dict[TopicPartition, int | None] = {}
    for topic in topics:
        with open_socket(host, port, tls, server_hostname) as sock:
            sock.sendall(Consume(topic, None, LATEST, token=token).encode())
            ends = _read(sock)
        for number in range(max((place.partition + 1 for place in ends), default=0)):
            place = TopicPartition(topic, number)
            found[place] = ends.get(place)
    return found


def _read(sock: socket.socket) -> dict[TopicPartition, int | None]:
    found: dict[TopicPartition, int | None] = {}
    unfinished, deadline = b"", time.monotonic() + CONNECT_S
    while data := sock.recv(64 * KIB):
        *whole, unfinished = (unfinished + data).split(b"\n")
        for line in whole:
            if line.startswith(b"!"):  # others are records that came while the broker answered
                _note(line, found)
        if time.monotonic() > deadline:
            raise TimeoutError("the broker has not named the partitions in time")
    return found


def _note(line: bytes, found: dict[TopicPartition, int | None]) -> None:
    """Add what a reply says. The first of a partition counts: another one follows where retention has deleted records."""
    try:
        answer = reply(line)
    except BadLine as err:
        raise Refused(f"protocol the broker's reply does not fit: {err}") from None
    if isinstance(answer, Failed) and answer.code not in (*_NOT_YET, "damaged"):
        raise Refused(f"{answer.code} {answer.text}")
    if isinstance(answer, Started):
        found.setdefault(answer.place, answer.offset)
    elif isinstance(answer, Failed) and answer.place is not None:
        found.setdefault(answer.place, None)


def take_over(core: Core, found: dict[TopicPartition, int | None]) -> bool:
    """Read these partitions too, if there is no group. Returns True if there are new ones.

    What was not there when the consumer subscribed begins at its first record, also with `latest`.
    """
    is_first = core.ends is None
    if core.ends is None:
        core.ends, core.subscribed_us = found, time.time_ns() // 1000
    if core.is_managed:
        return False
    read = {*core.holdings.owned, *core.wanted}
    topics = {place.topic for place in read}
    is_young = core.start == LATEST and not is_first
    new = [place for place in found if place not in read]
    for place in new:
        if is_young or place.topic in topics:
            core.wanted[place] = EARLIEST
        else:
            core.wanted[place] = core.start if found[place] is not None else core.start_of(place)
    return bool(new)


# --- consumer link ---------------------------------------------------------------------------------------------------

_SLICE_S = 1.0  # longest wait without a look around
_LEAVE_S = 1.0  # longest wait until the broker has taken the last requests


class Link(asyncio.Protocol):
    """Moves a core's bytes."""

    def __init__(self, core: Core, address: Address) -> None:
        self.core, self.address = core, address
        self.closed = False
        self.discovers: tuple[str, ...] = ()
        self.used_at = time.monotonic()  # when the application last asked for records
        self._changed = asyncio.Event()  # set, and replaced, whenever something has come
        self._gone = asyncio.Event()  # there is no connection
        self._used = asyncio.Event()  # the application has come back
        self._transport: asyncio.Transport | None = None
        self._discover_at = 0.0
        self._attempts = 0
        self._is_resting = False  # the application has not come back for too long: no member until it does
        self._tasks: list[asyncio.Task[None]] = []

    # --- the application's tasks -------------------------------------------------------------------------------------

    async def wait(self, is_ready: Callable[[], bool], timeout_s: float, fetches: bool = False) -> bool:
        """Wait until `is_ready`; return False when the time is up. `fetches`: records are what is waited for.

        Raises the error that has ended the consumer.
        """
        self._start()
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            self.use(now)
            if is_ready() or (self.closed and fetches):
                return True
            if self.core.failed is not None:
                raise self.core.failed
            left_s = deadline - now
            if fetches:
                self.core.fetch(now, max(left_s, 0.0))
            self.write()
            if left_s <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _SLICE_S)):
                    await self._changed.wait()

    def use(self, now: float) -> None:
        """Note that the application has come back."""
        self.used_at = now
        if self._is_resting:
            self._is_resting = False
            self._used.set()

    def write(self) -> None:
        """Write the requests."""
        if self._transport is not None and (data := self.core.requests.take()):
            self._transport.write(data)

    def drop(self, reason: str) -> None:
        """Close the connection; the task makes another one."""
        self.core.lost(reason)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._gone.set()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def end(self) -> None:
        """Leave the group and close the connection."""
        if self.closed:
            return
        self.closed = True
        if self._transport is not None and self.core.is_managed:
            self.core.leave(time.monotonic())
            self.write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._gone.wait()
        self.core.fail(NotAnswered("this consumer is closed"))
        self.drop("this consumer is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._wake()

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return  # given up already
        try:
            self.core.receive(data)
            self._attempts = 0
        except Refused as refused:
            self.drop(str(refused))
            return
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self.drop(str(error or "the broker closed the connection"))

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._tasks and not self.closed:
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._keep_connected(), name="kmq-consumer"),
                loop.create_task(self._keep_alive(), name="kmq-consumer-beat"),
            ]

    async def _keep_connected(self) -> None:
        while not self.closed and self.core.failed is None:
            if self._is_resting:
                self._used.clear()
                await self._used.wait()
            if await self._connect():
                await self._gone.wait()
            self._wake()
            await asyncio.sleep(backoff(self._attempts))
            self._attempts += 1

    async def _connect(self) -> bool:
        """Make one attempt. Returns True if there is a connection."""
        where, reason = "the broker", ""
        try:
            host, port, token = self.address()
            where = f"{host}:{port}"
            if self.discovers or self.core.lacks_ends:
                await self._discover(host, port, token)
            if self.core.has_something_to_read:
                async with asyncio.timeout(CONNECT_S):
                    await self._open(host, port, token)
                return True
            reason = f"no partitions of {', '.join(self.discovers) or 'any topic'} yet"
        except Refused as err:
            reason = str(err)
            if not find(err.code).is_retryable:
                self.core.fail(err)
        except (OSError, KmqError) as err:
            reason = str(err) if isinstance(err, KmqError) else no_connection(where, err)
        self.core.lost(reason)
        return False

    async def _open(self, host: str, port: int, token: str) -> None:
        options, loop = self.core.options, asyncio.get_running_loop()
        name = (options.server_hostname or host) if options.tls is not None else None
        transport, _ = await loop.create_connection(lambda: self, host, port, ssl=options.tls, server_hostname=name)
        self._gone.clear()
        transport.write(self.core.opening(token))
        self.core.connected()
        self._transport = transport

    async def _discover(self, host: str, port: int, token: str) -> bool:
        options = self.core.options
        found = await asyncio.to_thread(
            discover,
            self.discovers or self.core.topics,
            host,
            port,
            options.token or token,
            options.tls,
            options.server_hostname,
        )
        self._discover_at = time.monotonic() + DISCOVER_S
        return take_over(self.core, found)

    async def _keep_alive(self) -> None:
        """Beat, and notice a broker that does not answer, and an application that does not come back."""
        while not self.closed:
            await asyncio.sleep(min(1.0, self.core.options.session_s / 6))
            now = time.monotonic()
            if self._transport is None:
                continue
            if why := self.core.overdue(now):
                self.drop(why)
            self.core.beat(now)
            self.write()
            if self.core.is_managed and now - self.used_at > self.core.options.max_poll_interval_s:
                self._rest(now)
            elif self.discovers and now >= self._discover_at:
                await self._look_for_partitions()

    async def _look_for_partitions(self) -> None:
        with contextlib.suppress(OSError, KmqError):
            if await self._discover(*self.address()):
                self.drop("there are new partitions")

    def _rest(self, now: float) -> None:
        """Leave the group until the application comes back: others may be quicker."""
        logger().warning("left the group: no poll for %g s", self.core.options.max_poll_interval_s)
        self._is_resting = True
        self.core.leave(now)
        self.write()
        self.core.holdings.lose(tuple(self.core.holdings.owned))
        if self._transport is not None:
            self._transport.close()  # after what was written
            self._transport = None
        self.core.lost("left the group: no poll within max_poll_interval_s")
        self._gone.set()


# --- consumer driver -------------------------------------------------------------------------------------------------
# The socket of a kmq.Consumer, and the thread that keeps it alive while the application works.
#
# Turns       The application's thread reads and writes in its own calls: a second thread that reads while the application
#             computes would wait for the interpreter at every read. The next batch waits in the socket meanwhile. The
#             background thread looks in twice a session or more often: it beats, takes in what has come, and reconnects.
# Locking     One lock guards the core and the socket. No thread waits while holding it. Callbacks run without it, in the
#             application's thread.

_RECEIVE_BYTES = 256 * KIB
_JOIN_S = 5.0
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Driver:
    """Moves a core's bytes."""

    def __init__(self, core: Core, address: Address) -> None:
        self.core, self.address = core, address
        self.lock = threading.RLock()
        self.closed = False
        self.used_at = time.monotonic()  # when the application last asked for records
        self.is_due = False  # the background thread wants the application to look around
        self.discovers: tuple[str, ...] = ()  # topics whose partitions are all to be read, without a group
        self._discover_at = 0.0
        self._is_resting = False  # the application has not come back for too long: no member until it does
        self._sock: socket.socket | None = None
        self._epoll = select.epoll()
        self._out = memoryview(b"")
        self._wants_room = False
        self._dialing = threading.Lock()
        self._attempts = 0
        self._dial_at = 0.0  # not before, because an attempt has just failed
        self._waiting = 0  # threads of the application that attend to the socket
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    # --- the application's thread ------------------------------------------------------------------------------------

    def wait(self, is_ready: Callable[[], bool], timeout_s: float, fetches: bool = False) -> bool:
        """Attend until `is_ready`; return False when the time is up. `fetches`: records are what is waited for.

        Raises the error that has ended the consumer.
        """
        self._start()
        deadline = time.monotonic() + timeout_s
        self._waiting += 1
        try:
            while True:
                now = time.monotonic()
                if not self._turn(is_ready, deadline - now, fetches):
                    return True
                if now >= deadline:
                    return False
                self._pause(min(deadline - now, _SLICE_S))
        finally:
            self._waiting -= 1

    def _turn(self, is_ready: Callable[[], bool], left_s: float, fetches: bool) -> bool:
        """Do what can be done now. Returns True if there is more to wait for."""
        if self._sock is None:
            self._connect(max(left_s, 0.1))
        with self.lock:
            self._is_resting = False
            self.used_at = now = time.monotonic()
            self.look(now)
            if is_ready() or (self.closed and fetches):
                return False
            if self.core.failed is not None:
                raise self.core.failed
            if fetches:
                self.core.fetch(now, max(left_s, 0.0))
                self.write()
        return True

    def _pause(self, timeout_s: float) -> None:
        """Wait for the socket, or until another attempt to connect."""
        if self._sock is None:
            time.sleep(min(timeout_s, max(0.001, self._dial_at - time.monotonic())))
        else:
            with contextlib.suppress(OSError, ValueError):  # closed by another thread
                self._epoll.poll(timeout_s)

    # --- with the lock held ------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Read what has come, beat if that is due, and write."""
        if self._sock is not None:
            self._read()
        if self._sock is not None:
            if why := self.core.overdue(now):
                self.drop(why)
            self.core.beat(now)
            self.write()

    def _read(self) -> None:
        sock = self._sock
        assert sock is not None
        try:
            while True:
                data = sock.recv(_RECEIVE_BYTES)
                if not data:
                    raise ConnectionResetError("the broker closed the connection")
                self.core.receive(data)
                self._attempts = 0
                if len(data) < _RECEIVE_BYTES and not isinstance(sock, ssl.SSLSocket):
                    return
        except _WOULD_BLOCK:
            return
        except (OSError, Refused) as err:
            self.drop(str(err))

    def write(self) -> None:
        """Write the requests, as far as the kernel accepts them."""
        sock = self._sock
        if sock is None:
            return
        try:
            while self._out or (taken := self.core.requests.take()):
                if not self._out:
                    self._out = memoryview(taken)
                self._out = self._out[sock.send(self._out) :]
        except _WOULD_BLOCK:
            pass
        except OSError as err:
            self.drop(str(err))
            return
        if bool(self._out) != self._wants_room:
            self._wants_room = not self._wants_room
            self._epoll.modify(sock, select.EPOLLIN | (select.EPOLLOUT if self._wants_room else 0))

    def drop(self, reason: str) -> None:
        """Close the connection; the next turn makes another one."""
        self.core.lost(reason)
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(self._sock)
            self._sock.close()
            self._sock = None
        self._out, self._wants_room = memoryview(b""), False

    # --- connections -------------------------------------------------------------------------------------------------

    def _connect(self, timeout_s: float) -> None:
        """Make one attempt, unless one has just failed, or nothing is to be read."""
        if time.monotonic() < self._dial_at or not self._dialing.acquire(blocking=False):
            return
        try:
            if not self.closed and self.core.failed is None:
                self._dial(min(timeout_s, CONNECT_S))
        finally:
            self._dialing.release()

    def _dial(self, timeout_s: float) -> None:
        where, reason = "the broker", ""
        try:
            host, port, token = self.address()
            where = f"{host}:{port}"
            if self.discovers or self.core.lacks_ends:
                self._discover(host, port, token)
            if self.core.has_something_to_read:
                options = self.core.options
                self._open(open_socket(host, port, options.tls, options.server_hostname, timeout_s), token)
                return
            reason = f"no partitions of {', '.join(self.discovers) or 'any topic'} yet"
        except Refused as err:
            reason = str(err)
            if not find(err.code).is_retryable:
                self.core.fail(err)
        except (OSError, KmqError) as err:
            reason = str(err) if isinstance(err, KmqError) else no_connection(where, err)
        with self.lock:
            self.core.lost(reason)
        self._dial_at = time.monotonic() + backoff(self._attempts)
        self._attempts += 1

    def _open(self, sock: socket.socket, token: str) -> None:
        with self.lock:
            try:
                sock.sendall(self.core.opening(token))
            except OSError:
                sock.close()
                raise
            sock.setblocking(False)
            self._epoll.register(sock, select.EPOLLIN)
            self._sock = sock
            self.core.connected()

    def _discover(self, host: str, port: int, token: str) -> bool:
        """Ask for partitions and ends. Returns True if there are partitions that are not read yet."""
        options = self.core.options
        found = discover(
            self.discovers or self.core.topics, host, port, options.token or token, options.tls, options.server_hostname
        )
        self._discover_at = time.monotonic() + DISCOVER_S
        with self.lock:
            return take_over(self.core, found)

    # --- the background thread ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kmq-consumer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        tick_s = min(1.0, self.core.options.session_s / 6)
        while not self._wake.wait(tick_s):
            if self.core.failed is not None:
                return
            try:
                self._watch()
            except Exception:
                logger().exception("the consumer's background thread goes on after an error")

    def _watch(self) -> None:
        """Look for new partitions, and keep the member alive while the application works."""
        now = time.monotonic()
        if self.discovers and now >= self._discover_at and self._sock is not None:
            self._look_for_partitions()
        if self._waiting:
            return
        if self._sock is None and not self._is_resting and self.core.connections:
            self._connect(CONNECT_S)
        now = time.monotonic()
        with self.lock:
            self.is_due = True
            self.look(now)
            if self.core.is_managed and now - self.used_at > self.core.options.max_poll_interval_s:
                self._rest(now)

    def _look_for_partitions(self) -> None:
        with contextlib.suppress(OSError, KmqError):
            if self._discover(*self.address()):
                with self.lock:
                    self.drop("there are new partitions")

    def _rest(self, now: float) -> None:
        """Leave the group until the application comes back: others may be quicker."""
        if self._sock is not None:
            logger().warning("left the group: no poll for %g s", self.core.options.max_poll_interval_s)
            self.core.leave(now)
            self.write()
            self.core.holdings.lose(tuple(self.core.holdings.owned))
            self.drop("left the group: no poll within max_poll_interval_s")
        self._is_resting = True

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave the group and close the connection."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            if self._sock is not None:
                self.core.leave(time.monotonic())
                self.write()
                if self.core.is_managed:
                    self._linger()
            self.core.fail(NotAnswered("this consumer is closed"))
            self.drop("this consumer is closed")
        self._wake.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        self._epoll.close()

    def _linger(self) -> None:
        """Wait until the broker has taken the last request: a connection cut off at once might lose it."""
        sock = self._sock
        if sock is None:
            return
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(_LEAVE_S)
            deadline = time.monotonic() + _LEAVE_S
            while time.monotonic() < deadline and sock.recv(_RECEIVE_BYTES):
                pass
