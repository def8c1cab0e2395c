"""`kmq.Producer`: acknowledged messages from ordinary, blocking code; any number of threads may share one.

    with kmq.Producer(port=5673) as producer:
        seq = producer.send("orders", b"one", key="42").result()         # on disk, as this seq
        producer.send("orders", b"two", callback=lambda d: print(d.seq, d.error))
        producer.send_many("orders", [b"three", b"four"])
                                                                         # leaving: all is answered, or it raises

Promise     No call waits for ever without saying so: each has a timeout, whose error says what was waited for, and whoever waits
            longer than stall_s reports it (on_stall). A message that failed is an exception of its result(), an argument
            of its callback, or, where there is neither, raised by flush() and close().
Threads     One lock guards the core and writes; nobody waits while holding it. Of the threads that wait for replies one attends
            to the socket, so that a caller who sends and waits does all of it himself, without a change of threads. A background
            thread makes connections, and attends when no caller does. Callbacks run in the thread that attends, one after
            the other, in order; one that blocks holds up the others.
"""

import atexit
import contextlib
import logging
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

from kmq.client.lines import no_connection, read_port
from kmq.client.protocol import Choices, Core, Fenced, NotAnswered, Options, Refused
from kmq.client.protocol import Delivery as CoreDelivery
from kmq.errors import KmqError
from kmq.settings import KIB, load

CONNECT_S = 5.0  # to connect and be greeted
BACKOFF_S = (0.01, 0.5)  # between two attempts: the first wait, doubled up to the last
_TICK_S = 0.002  # how long callers may leave the socket alone before the background thread attends to it
_REST_S = 0.05  # and how long that one stays when nothing is left to wait for
_BUSY_TICK_S = 0.01  # the same while callers do attend: each look costs them a change of threads
_LOOK_S = 1.0  # longest wait in one piece: what is overdue is looked for at least so often
_RECEIVE_BYTES = 16 * KIB  # replies are short; a buffer that malloc has to map anew each time costs 20 µs
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

Address = Callable[[], tuple[str, int, str]]  # host, port, token


def keep_alive(sock: socket.socket) -> None:
    """Small writes go at once; a host that is gone is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def local_address() -> tuple[str, int, str]:
    """Where the broker of this directory's settings listens, and the token for its own programs.

    Asked again for each connection, for a port may be any free one.
    """
    settings = load()
    token = ""
    if settings.tokens:
        from kmq import tokens

        token = tokens.local(settings)
    return settings.host, read_port(settings, "ingress", settings.port), token


def backoff(attempt: int) -> float:
    """Seconds before another attempt; not the same for everybody, or all would come back at once."""
    first, longest = BACKOFF_S
    return float(min(longest, first * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0))


class Delivery(CoreDelivery):
    __slots__ = ("_producer",)
    _producer: "Producer"

    def results(self, timeout: float | None = None) -> list[int]:
        """The seq of each message, once all are on disk; 0 where the broker only knows that it was stored long ago."""
        self.result(timeout)
        return self.seqs

    def result(self, timeout: float | None = None) -> int:
        """The seq, once it is on disk; of a list that of its first message. Raises what went wrong with any."""
        self._producer._wait(lambda: self.done, timeout, "the reply to this message")
        if self.error is not None:
            self.seen = self._producer._told = True
            raise self.error
        return self.seq


class Producer:
    """See the module, and Options for what can be told."""

    def __init__(
        self, host: str = "127.0.0.1", port: int | Callable[[], int] = 5673, **options: Unpack[Choices]
    ) -> None:
        """A `port` that is a function is asked before each connection."""
        self._start(lambda: (host, port() if callable(port) else port, ""), Options(**options))

    @classmethod
    def local(cls, **options: Unpack[Choices]) -> "Producer":
        """Of the broker that this directory's settings (environment, kmq.toml) speak of."""
        local_address()
        producer = cls.__new__(cls)
        producer._start(local_address, Options(**options))
        return producer

    def _start(self, address: Address, options: Options) -> None:
        self._address, self.options = address, options
        self._core = Core(options)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for callers that wait
        self._work = threading.Condition(self._lock)  # for the background thread
        self._waiting = 0  # callers that wait for `_changed`
        self._attending = 0  # ident of the thread that attends to the socket
        self._turns = 0  # of callers at it
        self._busy = False  # callers have attended lately
        self._resting = False  # the background thread waits for `_work`
        self._sock: socket.socket | None = None
        self._poll = select.epoll()
        self._out = memoryview(b"")  # taken from the core, not yet by the kernel
        self._wants_room = False
        self._look_s = min(_LOOK_S, options.stall_s / 4, (options.delivery_timeout_s or _LOOK_S) / 4)
        self._look_at = self._said = (
            time.monotonic()
        )  # when to look for what is overdue; when a stall was last spoken of
        self._closed = False
        self._told = False  # a caller has had an exception
        self._thread = threading.Thread(target=self._run, name="kmq-producer", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    @property
    def name(self) -> str:
        """As which the broker knows us, "" without producer ids."""
        return self._core.name

    @property
    def unanswered(self) -> int:
        """Messages without outcome: a snapshot."""
        return self._core.unanswered

    @property
    def connections(self) -> int:
        """Made so far."""
        return self._core.connections

    @property
    def last_id(self) -> int:
        """The id below the next one that is made; before any, of a connected producer without first_id, the last one stored."""
        return self._core.last_id

    @property
    def duplicates(self) -> int:
        """Messages sent again that the broker had stored already."""
        return self._core.duplicates

    def connect(self, timeout: float | None = None) -> int:
        """Wait for the first connection. Returns the most bytes of a line that the broker takes."""
        self._wait(lambda: self._core.connections > 0, timeout, "a connection")
        if self._core.failed is not None:
            self._told = True
            raise self._core.failed
        return self._core.max_line

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        payload: bytes | str | None,
        key: str | bytes | None = None,
        *,
        partition: int | None = None,
        id: str | int | None = None,
        headers: Mapping[str, str] | None = None,
        ts: float | None = None,
        callback: Callable[[CoreDelivery], object] | None = None,
        timeout: float | None = None,
    ) -> Delivery:
        """Queue one message; waits only while the window is full. `callback` is called with the delivery.

        A payload of None is a tombstone. Without `partition` the key decides; without either, partitions take turns.
        """
        delivery = Delivery(callback)
        delivery._producer = self
        core = self._core
        with self._lock:
            if core.is_full or core.failed or self._closed:
                self._wait_for_room(timeout)
            core.add(delivery, topic, payload, key, id, headers, ts, partition)
            if self._resting or not core.waits_for_reply:
                self._queued()
        return delivery

    def send_many(
        self,
        topic: str,
        payloads: Sequence[bytes | None],
        key: str | bytes | None = None,
        *,
        partition: int | None = None,
        ts: float | None = None,
        callback: Callable[[CoreDelivery], object] | None = None,
        timeout: float | None = None,
    ) -> Delivery:
        """Queue a list in one go, for a fraction of the cost of as many sends; made ids, one delivery for all."""
        delivery = Delivery(callback)
        delivery._producer = self
        with self._lock:
            self._wait_for_room(timeout, len(payloads))
            self._core.add_many(delivery, topic, payloads, key, ts, partition)
            self._queued()
        return delivery

    def send_lines(
        self,
        lines: bytes,
        *,
        callback: Callable[[CoreDelivery], object] | None = None,
        timeout: float | None = None,
    ) -> Delivery:
        """Queue whole lines `routing_key|ts|id|payload` as they are; with producer= or window= the ids are yours."""
        count = lines.count(b"\n")
        if lines and not lines.endswith(b"\n"):
            raise ValueError("each line ends with a newline")
        delivery = Delivery(callback)
        delivery._producer, delivery.may_be_stored = self, True
        with self._lock:
            self._wait_for_room(timeout, count)
            self._core.add_lines(delivery, lines, count)
            self._queued()
        return delivery

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every message has its reply. Raises what ended the producer, or an error that nobody has been told of."""
        self._wait(lambda: not self._core.unanswered, timeout, "the replies to all messages")
        with self._lock:
            error = self._core.failed or self._core.unseen_error()
        if error is not None:
            self._told = True
            raise error

    def close(self, timeout: float | None = None) -> None:
        """flush, then end. After a timeout, too: what has no reply then is lost to this program, though it may be stored."""
        if self._closed:
            return
        try:
            self.flush(timeout)
        finally:
            self.abort()

    def _at_exit(self) -> None:
        """The program ends and has forgotten us."""
        told = self._told
        try:
            self.close()
        except KmqError as err:
            if not told:
                _log().error("not closed, and at exit: %s", err)

    def abort(self) -> None:
        """End now; what is unanswered fails."""
        atexit.unregister(self._at_exit)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._core.failed is None:
                self._core.fail(NotAnswered("the producer was closed before the reply came"))
            self._drop()
        if threading.current_thread() is not self._thread:
            self._thread.join(CONNECT_S)
        self._tell()

    def __enter__(self) -> "Producer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _queued(self) -> None:
        """Something has been queued; the lock is held."""
        self._write()
        if self._resting:
            self._resting = False
            self._work.notify()

    def _wait_for_room(self, timeout: float | None, count: int = 1) -> None:
        """The lock is held, also afterwards; others may have it in between."""
        core = self._core
        if count > self.options.max_in_flight:
            raise ValueError(f"a list of {count:,} messages is over max_in_flight={self.options.max_in_flight:,}")
        if core.is_full:
            self._wait_locked(lambda: core.has_room_again, timeout, "room among the messages in flight")
            core.filling = True
        if core.failed is not None:
            self._told = True
            raise core.failed
        if self._closed:
            raise KmqError("this producer is closed")

    def _wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        with self._lock:
            self._wait_locked(ready, timeout, what)

    def _wait_locked(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Until `ready`, attending to the socket unless another thread does. Raises NotAnswered when time is up."""
        if ready():
            return
        core, me = self._core, threading.get_ident()
        deadline = time.monotonic() + (self.options.timeout_s if timeout is None else timeout)
        while not ready() and core.failed is None and not self._closed:
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                raise NotAnswered(f"timed out waiting for {what}: {core.describe(now)}")
            if core.has_queued:
                core.hurry = True
                self._write()
            if self._sock is not None and self._attending in (0, me):
                self._turns += 1
                self._attend(left)
            else:
                self._waiting += 1
                self._changed.wait(min(left, self._look_s))
                self._waiting -= 1
            if now >= self._look_at:
                self._look_for_overdue()

    def _attend(self, timeout_s: float) -> None:
        """Take what the socket has, within that time, and tell. The lock is held, and let go meanwhile."""
        before, self._attending = self._attending, threading.get_ident()
        try:
            self._lock.release()
            try:
                events = self._poll.poll(min(timeout_s, self._look_s))
            finally:
                self._lock.acquire()
            if events and self._sock is not None:
                self._read()
                if self._out or self._core.has_queued:
                    self._write()
            if self._core.done:
                self._lock.release()
                try:
                    self._tell()
                finally:
                    self._lock.acquire()
        finally:
            self._attending = before
            if self._waiting:
                self._changed.notify_all()

    def _tell(self) -> None:
        """Call the callbacks; in order, for only who attends gets here."""
        done = self._core.done
        while done:
            delivery = done.popleft()
            try:
                assert delivery.callback is not None
                delivery.callback(delivery)
            except Exception:
                _log().exception("a delivery callback failed")

    def _look_for_overdue(self) -> None:
        """Let messages fail whose time is up; speak up when nothing has come for long. The lock is held."""
        core, now = self._core, time.monotonic()
        self._look_at = now + self._look_s
        core.expire(now)
        oldest = core.oldest
        if oldest is None or now - max(oldest, self._said) < self.options.stall_s:
            return
        self._said = now
        text = core.describe(now)
        self._lock.release()
        try:
            (self.options.on_stall or _log().warning)(text)
        finally:
            self._lock.acquire()

    # --- the socket --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._sock is not None
        try:
            while True:
                data = self._sock.recv(_RECEIVE_BYTES)
                if not data:
                    raise ConnectionResetError("the broker closed the connection")
                self._core.receive(data)
                self._attempt = 0
                if len(data) < _RECEIVE_BYTES and not isinstance(self._sock, ssl.SSLSocket):
                    return
        except _WOULD_BLOCK:
            return
        except (OSError, Refused) as err:
            self._lose(str(err))

    def _write(self) -> None:
        """Give the kernel what may go, as far as it takes it."""
        core = self._core
        while self._sock is not None:
            if not self._out:
                taken = core.take(time.monotonic())
                if not taken:
                    break
                self._out = memoryview(taken)
            try:
                self._out = self._out[self._sock.send(self._out) :]
            except _WOULD_BLOCK:
                break
            except OSError as err:
                self._lose(str(err))
                return
        if self._sock is not None and bool(self._out) != self._wants_room:
            self._wants_room = not self._wants_room
            self._poll.modify(self._sock, select.EPOLLIN | (select.EPOLLOUT if self._wants_room else 0))

    def _lose(self, reason: str) -> None:
        self._core.lost(reason)
        self._drop()

    def _drop(self) -> None:
        """Let go of the connection, and wake everybody."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(self._sock)
            self._sock.close()
            self._sock = None
        self._out, self._wants_room = memoryview(b""), False
        self._resting = False
        self._work.notify()
        self._changed.notify_all()

    # --- the background thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._attempt = 0
        with self._lock:
            while not self._closed and self._core.failed is None:
                if self._sock is None:
                    self._connect()
                else:
                    self._help()
            self._changed.notify_all()
        self._poll_closed()

    def _poll_closed(self) -> None:
        with self._lock:
            while self._attending:  # a caller sees within _LOOK_S that it is over
                self._changed.wait(_LOOK_S)
            self._poll.close()
        self._tell()

    def _connect(self) -> None:
        """One attempt, then a pause where it failed. The lock is held, and let go meanwhile."""
        sock = None
        self._lock.release()
        try:
            sock, greeting, reason = self._dial()
        finally:
            self._lock.acquire()
        try:
            if sock is not None and not self._closed:
                self._core.greeted(greeting)
        except Refused as refused:
            reason = str(refused)
        if self._core.connected and sock is not None:
            sock.setblocking(False)
            self._sock = sock
            self._poll.register(sock, select.EPOLLIN)
            self._write()
            self._changed.notify_all()
            return
        if sock is not None:
            sock.close()
        self._core.lost(reason)
        self._look_for_overdue()
        self._changed.notify_all()
        if self._core.done:
            self._lock.release()
            try:
                self._tell()
            finally:
                self._lock.acquire()
        if not self._closed:
            self._work.wait(backoff(self._attempt))
            self._attempt += 1

    def _dial(self) -> tuple[socket.socket | None, bytes, str]:
        """(connection, its reply to our hello, "") or (None, b"", why not)."""
        options, sock = self.options, None
        where = "the broker"
        try:
            host, port, token = self._address()
            where = f"{host}:{port}"
            sock = socket.create_connection((host, port), timeout=CONNECT_S)
            keep_alive(sock)
            if options.tls is not None:
                sock = options.tls.wrap_socket(sock, server_hostname=options.server_hostname or host)
            sock.sendall(self._core.hello(token))
            greeting = b""
            while not self._core.is_greeting(greeting):
                data = sock.recv(4 * KIB)
                if not data:
                    raise ConnectionResetError("closed without a word")
                greeting += data
            return sock, greeting, ""
        except (OSError, KmqError) as err:
            if sock is not None:
                sock.close()
            return None, b"", no_connection(where, err)

    def _help(self) -> None:
        """Attend to the socket while no caller does. The lock is held, and let go meanwhile."""
        core, turns = self._core, self._turns
        if not core.unanswered and not self._busy:
            self._resting = True
            self._work.wait()
            return
        self._work.wait(_BUSY_TICK_S if self._busy else _TICK_S)
        self._busy = bool(self._attending) or turns != self._turns
        if core.filling and core.has_queued:  # who was filling the window has stopped
            core.hurry = True
            self._write()
        if self._busy:
            return
        until = time.monotonic() + _REST_S
        while self._sock is not None and not self._waiting and not self._closed and not self._attending:
            now = time.monotonic()
            if core.unanswered:
                until = now + _REST_S
            elif now > until:
                return
            linger = core.linger_left(now)
            self._attend(_REST_S if linger is None else min(linger + 0.0005, _REST_S))
            self._write()
            if now >= self._look_at:
                self._look_for_overdue()


def _log() -> logging.Logger:
    return logging.getLogger("kmq.producer")


__all__ = ["Delivery", "Fenced", "NotAnswered", "Options", "Producer", "Refused"]
