"""The replica protocol (port 5677): messages between a shard's leader and its followers, after a proof on both sides.

    → !replica lineage=… broker=b replica=… level=3 max_line=… nonce=…
    ← !challenge broker=a replica=… level=3 max_line=… nonce=… mac=…
    → !proof mac=…                                                            ← !refused reason=not_leader
    → !fetch version=31:0c1d… epoch=8 next=1024723 last=8 room=4194304        ← !data epoch=8 first=… … bytes=…, its
    bytes

Text        A line of ASCII, at most LINE_BYTES: a word, then each field by its name, in the order of the classes below.
            `!data`, `!register`, `!file` and `!piece` are followed by the number of bytes that `bytes` says.
Proof       HMAC-SHA256 with the shard's secret over the direction, the shard, the lineage, and of both sides broker,
            replica, level, max_line and nonce. So no proof is good in another session, for another replica, or for the
            other side. The server proves itself first: a follower shows its proof only to a peer that knows the secret.
Memory      Before the proof: STRANGERS connections of BUFFER_BYTES each, for HANDSHAKE_S; a new one evicts the oldest.
            After it: one connection per replica, with READ_BYTES and one message at a time. Its peer is trusted to
            leave unread at most the bytes that it has `room` for, and for DEAD_S at most.
Faults      A breach of the protocol raises WireError, which ends that connection and changes nothing else.
Not covered Texts after the proof have no mac of their own. TLS protects them on a network that others can write to.
"""

import asyncio
import hmac
import re
import secrets
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kmq.broker.stats import Incidents
from kmq.cluster.presence import NAME
from kmq.cluster.register import Version
from kmq.errors import ConfigError, KmqError
from kmq.logfmt import Logger
from kmq.message.record import count_lines

LINE_BYTES = 1024
BUFFER_BYTES, READ_BYTES = 4096, 256 << 10  # for texts, and for texts with their bytes: before the proof, and after it
REGISTER_BYTES = 64 << 10  # a register has at most 25 KB
FILE_BYTES = 64 << 20  # a file is held in memory, on both sides
PIECE_BYTES = 1 << 20  # of a file in a bootstrap
HANDSHAKE_S = 5.0  # TLS and proof together
STRANGERS = 32  # connections without a proof
REPORT_S = 60.0  # between two log lines about refused peers
DEAD_S = 10  # without a sign of life, or with data that the peer does not read
SECRET_BYTES = 16  # shortest secret
MOST_LINE = 256 << 20  # the greatest KMQ_MAX_LINE
FILES = ("producers.ckpt",)
NOBODY = "0" * 16  # the replica id of a peer that only compares; no replica has it


class WireError(KmqError):
    """The peer has broken the protocol, or has no valid proof."""


class Me(NamedTuple):
    """What this side says about itself."""

    shard: str
    lineage: str
    broker: str
    replica: str
    level: int
    max_line: int

    @property
    def peer(self) -> "Peer":
        """Return how the other side sees us."""
        return Peer(self.broker, self.replica, self.level, self.max_line)


class Peer(NamedTuple):
    """The other side, after its proof."""

    broker: str
    replica: str
    level: int
    max_line: int

    def encode(self) -> str:
        return f"broker={self.broker} replica={self.replica} level={self.level} max_line={self.max_line}"


# --- texts -----------------------------------------------------------------------------------------------------------


class FetchText(NamedTuple):
    """A follower's position. `next`: the first seq not on its disk; `last`: the epoch of the record before it."""

    version: Version
    epoch: int
    next: int
    last: int
    room: int


class Have(NamedTuple):
    """What a follower has on disk. `version`: the number of the version that it has promised."""

    version: int
    next: int
    room: int


class Data(NamedTuple):
    """Whole records of the WAL. `key`: length of the routing key that all of them share; 0: unknown, or not shared."""

    epoch: int
    first: int
    last: int
    key: int
    crc: int
    hw: int
    lines: bytes | bytearray | memoryview


class Hw(NamedTuple):
    """The leader's high watermark."""

    seq: int


class Diverged(NamedTuple):
    """Before `end` the leader only has records of epochs up to `last`. Its last record there is of `epoch`."""

    epoch: int
    end: int
    next: int
    last: int


class Gone(NamedTuple):
    """The leader no longer has records before `first`."""

    first: int


class RefusedText(NamedTuple):
    """Why the leader does not serve this peer, in one word. The connection ends after it."""

    reason: str


class RegisterText(NamedTuple):
    """A register, as Consul holds it."""

    text: bytes | bytearray


class FileText(NamedTuple):
    """A file of FILES, as of `seq`."""

    name: str
    seq: int
    crc: int
    content: bytes | bytearray


class FilesText(NamedTuple):
    """Asks for the leader's files (bootstrap.py). `got`: number of pieces received."""

    got: int


class PieceText(NamedTuple):
    """The bytes of a file from `offset` on. `left`: number of pieces after it."""

    name: str
    offset: int
    left: int
    crc: int
    content: bytes | bytearray


class NextLog(NamedTuple):
    """Asks for the log after this one (compare.py)."""

    log: str


class LogRange(NamedTuple):
    """Records of a log from `first` to before `next`. As a request it asks for their crc, as an answer it has it."""

    log: str
    first: int
    next: int
    crc: int


_Reply = Data | Hw | Diverged | Gone | RefusedText | RegisterText | FileText | PieceText | LogRange
Message = FetchText | Have | FilesText | NextLog | _Reply

_TYPES: dict[str, type[Message]] = {
    "!fetch": FetchText,
    "!have": Have,
    "!data": Data,
    "!hw": Hw,
    "!diverged": Diverged,
    "!gone": Gone,
    "!refused": RefusedText,
    "!register": RegisterText,
    "!file": FileText,
    "!files": FilesText,
    "!piece": PieceText,
    "!next": NextLog,
    "!range": LogRange,
}
_WORDS = {each: word for word, each in _TYPES.items()}
_BODIES: dict[type, str] = {Data: "lines", RegisterText: "text"} | dict.fromkeys((FileText, PieceText), "content")
_NAMES = {each: ["bytes" if name == _BODIES.get(each) else name for name in each._fields] for each in _WORDS}
_N = "(0|[1-9][0-9]{0,17})"
_NUMBER, _REASON, _PATH = re.compile(_N), re.compile("[!-~]{1,200}"), re.compile("[!-~]{1,300}")


def encode(message: Message) -> str:
    """Return the text of a message, without its newline and the bytes that follow."""
    pairs: Iterable[tuple[str, Any]] = zip(_NAMES[type(message)], message, strict=True)
    words = [f"{name}={len(value) if name == 'bytes' else value}" for name, value in pairs]
    return " ".join([_WORDS[type(message)], *words])


def decode(text: str) -> tuple[Message, int]:
    """Return the message of a text, and how many bytes follow it. They are not in it yet. Raises WireError."""
    word, *parts = text.split(" ")
    form = _TYPES.get(word)
    pairs = [part.partition("=") for part in parts]
    if form is None or [name for name, _, _ in pairs] != _NAMES[form]:
        raise WireError(f"{text[:40]!r} is no text of the replica protocol")
    size, values = 0, []
    for name, _, value in pairs:
        found = _value(form, name, value)
        if found is None:
            raise WireError(f"{text[:40]!r}: wrong {name}")
        if name == "bytes":
            size, found = int(value), b""
        values.append(found)
    return form(*values), size  # type: ignore[arg-type]


def _value(form: type[Message], name: str, value: str) -> Version | int | str | bytes | None:
    """Return the value of a field; None if it is not valid."""
    if name == "version" and form is FetchText:
        return Version.parse(value)
    if name == "name":
        return value if value in FILES or (form is PieceText and _PATH.fullmatch(value)) else None
    if name in ("log", "reason"):
        return value if (_PATH if name == "log" else _REASON).fullmatch(value) else None
    return int(value) if _NUMBER.fullmatch(value) else None


def _with_body(message: Message, body: bytearray) -> Message:
    """Return the message with the bytes that followed it. Raises WireError if they do not match it."""
    if isinstance(message, RegisterText):
        return RegisterText(body)
    assert isinstance(message, (Data, FileText, PieceText))
    if (crc := zlib.crc32(body)) != message.crc:
        raise WireError(f"{encode(message)}: the crc of what came is {crc}")
    if not isinstance(message, Data):
        return message._replace(content=body)
    count = count_lines(body)
    if not message.first or message.last - message.first + 1 != count or not body.endswith(b"\n"):
        raise WireError(f"{encode(message)}: {count} lines came")
    return message._replace(lines=body)


# --- a connection ----------------------------------------------------------------------------------------------------


class Link(asyncio.BufferedProtocol):
    """One connection. Bytes of a message that exceed the buffer go from the socket straight to their final place.

    One task reads. The next read resumes one that was cancelled.
    """

    peer: Peer  # known after the proof

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._socket = sock  # for writing without a copy; None: TLS is in between
        self.max_data, self.address = 0, ""  # bytes of a block, known after the proof; host:port
        self._transport: asyncio.Transport | None = None
        self._texts = bytearray(BUFFER_BYTES)
        self._begin = self._end = 0  # the part of _texts that was not read yet
        self._message: Message | None = None  # the message whose bytes are awaited
        self._body = bytearray()
        self._missing = 0  # bytes of _body
        self._is_paused = False
        self._lost: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # --- reading

    async def read(self) -> Message:
        """Return the next message. Raises WireError for a breach of the protocol, ConnectionError at the end."""
        if self._message is None:
            message, size = decode(await self.text())
            if type(message) not in _BODIES:
                return message
            limits = {RegisterText: REGISTER_BYTES, FileText: FILE_BYTES, PieceText: PIECE_BYTES}
            most = limits.get(type(message), self.max_data)
            if size > most:
                raise WireError(f"bytes={size}: a {type(message).__name__} has at most {most}")
            self._message = message
            here = min(size, self._end - self._begin)  # bytes of the body that arrived with the text
            self._body, self._missing = self._texts[self._begin : self._begin + here], size - here
            self._begin += here
            self._body += bytes(self._missing)
        while self._missing:
            await self._more()
        message, self._message = self._message, None
        body, self._body = self._body, bytearray()
        return _with_body(message, body)

    async def text(self) -> str:
        """Return the next line, without its end."""
        while (at := self._texts.find(b"\n", self._begin, self._end)) < 0 and self._end - self._begin < LINE_BYTES:
            await self._more()
        if not 0 <= at - self._begin < LINE_BYTES:
            raise WireError(f"a text of more than {LINE_BYTES} bytes")
        text = self._texts[self._begin : at].decode("latin-1")
        self._begin = at + 1
        return text

    async def _more(self) -> None:
        """Wait for more bytes."""
        if self._lost is not None:
            raise ConnectionError(f"{self.address}: {str(self._lost) or 'the peer has closed the connection'}")
        if self._begin:  # also for a body, because the text after it needs room at once
            self._texts[: self._end - self._begin] = self._texts[self._begin : self._end]
            self._begin, self._end = 0, self._end - self._begin
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._missing:
            return memoryview(self._body)[len(self._body) - self._missing :]
        return memoryview(self._texts)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._missing:
            self._missing -= nbytes
            if self._missing:
                return
        else:
            self._end += nbytes
            if self._end == len(self._texts) and self._transport is not None:
                self._is_paused = True  # the reader must take some of it first
                self._transport.pause_reading()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- writing

    def send(self, message: Message) -> None:
        """Write a message. Its bytes must stay until sent. The caller bounds what is in flight by the peer's `room`."""
        self.write(encode(message), getattr(message, _BODIES.get(type(message), ""), b""))

    def write(self, text: str, data: bytes | bytearray | memoryview = b"") -> None:
        """Write a text, and the bytes that follow it."""
        if self._transport is None or self._transport.is_closing():
            return  # the reader gets the error
        head, sent = f"{text}\n".encode("ascii"), 0
        if self._socket is not None and not self._transport.get_write_buffer_size():
            with suppress(OSError):  # the transport finds out too
                sent = self._socket.sendmsg([head, data])
        for part in (head, memoryview(data)):
            if sent < len(part):
                self._transport.write(part[sent:])
            sent = max(0, sent - len(part))

    # --- begin and end

    def set_peer(self, peer: Peer, me: Me) -> None:
        """Make this a connection to `peer`. The greater max_line of the two sides bounds a block."""
        self.peer = peer
        self._texts += bytes(READ_BYTES - len(self._texts))
        self.max_data = max(8 << 20, min(max(peer.max_line, me.max_line), MOST_LINE) + (64 << 10))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock, name = transport.get_extra_info("socket"), transport.get_extra_info("peername")
        self.address = f"{name[0]}:{name[1]}" if name else ""
        with suppress(OSError):  # the peer may be gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or a reply waits for the next one: 40 ms
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 7)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)

    def eof_received(self) -> None:
        self._lost = self._lost or EOFError()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        # Without its traceback, whose frames hold the block that was being sent, and so the ring that it lies in.
        self._lost = self._lost or (exc.with_traceback(None) if exc is not None else EOFError())
        self._transport = None
        self._wake()

    def close(self) -> None:
        """End the connection after sending what was written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()


# --- the proof -------------------------------------------------------------------------------------------------------

_PEER = f"broker=({NAME.pattern}) replica=([0-9a-f]{{16}}) level={_N} max_line={_N}"
_HELLO = re.compile(f"!replica lineage=([0-9a-f]{{32}}) {_PEER} nonce=([0-9a-f]{{32}})")
_CHALLENGE = re.compile(f"!challenge {_PEER} nonce=([0-9a-f]{{32}}) mac=([0-9a-f]{{64}})")
_PROOF = re.compile("!proof mac=([0-9a-f]{64})")


def _mac(secret: bytes, direction: str, me: Me, follower: tuple[Peer, str], leader: tuple[Peer, str]) -> str:
    """Return the proof that only a peer with the secret can make in this session; (peer, nonce) of both sides."""
    fields = ("kmq replica 1", direction, me.shard, me.lineage, *follower[0], follower[1], *leader[0], leader[1])
    return hmac.new(secret, "\n".join(map(str, fields)).encode(), "sha256").hexdigest()


def _peer_of(groups: Sequence[str]) -> Peer:
    return Peer(groups[0], groups[1], int(groups[2]), int(groups[3]))


async def call(address: str, me: Me, secret: bytes, tls: ssl.SSLContext | None, timeout_s: float) -> Link:
    """Return a connection to the leader at host:port, which has proved itself. Raises WireError and OSError.

    The first read tells whether the leader serves us.
    """
    host, _, port = address.rpartition(":")
    host, link = host.strip("[]"), Link()
    more: dict[str, Any] = {"server_hostname": host, "ssl_shutdown_timeout": DEAD_S} if tls is not None else {}
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(lambda: link, host, int(port), ssl=tls, **more)
            link.set_peer(await _prove_to_leader(link, me, secret), me)
    except BaseException as err:
        link.abort()
        if isinstance(err, (ValueError, OverflowError)) and not isinstance(err, OSError):
            raise WireError(f"{address!r} is not the address of a replica port: {err}") from err
        raise
    return link


async def _prove_to_leader(link: Link, me: Me, secret: bytes) -> Peer:
    nonce = secrets.token_hex(16)
    link.write(f"!replica lineage={me.lineage} {me.peer.encode()} nonce={nonce}")
    match = _CHALLENGE.fullmatch(text := await link.text())
    if match is None:
        raise WireError(f"{link.address}: {text[:100]!r} in place of a challenge")
    leader = _peer_of(match.groups())
    both = (me.peer, nonce), (leader, match[5])
    if not hmac.compare_digest(_mac(secret, "leader", me, *both), match[6]):
        raise WireError(f"{link.address}: knows another secret than ours (KMQ_REPLICA_SECRET), or is of another shard")
    link.write(f"!proof mac={_mac(secret, 'follower', me, *both)}")
    return leader


async def _verify_follower(link: Link, me: Me, secret: bytes) -> Peer:
    """Return the follower once it has proved itself. Raises WireError if it cannot."""
    match = _HELLO.fullmatch(text := await link.text())
    if match is None:
        raise WireError(f"{text[:40]!r} in place of !replica")
    if match[1] != me.lineage:
        link.send(RefusedText("lineage"))
        raise WireError(f"lineage {match[1]} is not {me.lineage}, the lineage of shard {me.shard}")
    follower, nonce = _peer_of(match.groups()[1:]), secrets.token_hex(16)
    both = (follower, match[6]), (me.peer, nonce)
    link.write(f"!challenge {me.peer.encode()} nonce={nonce} mac={_mac(secret, 'leader', me, *both)}")
    proof = _PROOF.fullmatch(await link.text())
    if proof is None or not hmac.compare_digest(_mac(secret, "follower", me, *both), proof[1]):
        link.send(RefusedText("proof"))
        raise WireError("no proof of the secret")
    return follower


# --- the port --------------------------------------------------------------------------------------------------------


class ReplicaPort:
    """Accepts followers that prove themselves. Calls `me` for each connection, because lineage and id may change."""

    def __init__(
        self,
        me: Callable[[], Me],
        secret: bytes,
        tls: ssl.SSLContext | None,
        admit: Callable[[Peer], str],
        serve: Callable[[Link], Awaitable[None]],
        log: Logger,
    ) -> None:
        """`admit` returns why a peer with a proof is not served; "": it is served.

        `serve` has a connection until it returns or raises. It is cancelled when its replica connects again.
        """
        self._me, self.port = me, 0
        self._secret, self._tls, self._admit, self._serve = secret, tls, admit, serve
        self._incidents, self._has_refused = Incidents(log.warn), False
        self._timer: asyncio.TimerHandle | None = None
        self._strangers: dict[asyncio.Task[None], str] = {}  # without a proof, the oldest first, with its address
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: dict[str, tuple[Link, asyncio.Task[None]]] = {}  # by replica id
        self._replacing = asyncio.Lock()

    async def open(self, host: str, port: int) -> "ReplicaPort":
        """Listen. Raises ConfigError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as err:
            raise ConfigError(f"KMQ_REPLICA_PORT={port} on {host!r}: {err.strerror or err}") from err
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def close(self) -> None:
        """Close the port and all of its connections."""
        for link, _ in self._serving.values():
            link.abort()
        tasks = [self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        self._report()
        if self._timer is not None:
            self._timer.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, name = await loop.sock_accept(self._socket)
            except OSError as err:  # no free file descriptor, for example
                self._refuse("", err.strerror or str(err))
                await asyncio.sleep(1)
                continue
            if len(self._strangers) >= STRANGERS:
                oldest = next(iter(self._strangers))
                self._refuse(self._strangers.pop(oldest), f"the oldest of {STRANGERS} connections without a proof")
                oldest.cancel()
            address = f"{name[0]}:{name[1]}"
            task = asyncio.create_task(self._handle(sock, address))
            self._strangers[task] = address
            self._tasks.add(task)
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # a flood of connections must not stop the loop; and the new task begins

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "a replica could not be served", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _handle(self, sock: socket.socket, address: str) -> None:
        """Check the proof of one connection, and serve it."""
        link, peer, task = Link(sock if self._tls is None else None), None, asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                shutdown = DEAD_S if self._tls is not None else None
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: link, sock, ssl=self._tls, ssl_shutdown_timeout=shutdown
                )
                me = self._me()
                peer = await _verify_follower(link, me, self._secret)
            self._strangers.pop(task, None)
            link.set_peer(peer, me)
            await self._serve_proved(link, task)
        except WireError as err:
            self._refuse(address, str(err))
        except OSError as err:
            if peer is None:
                late = f"not within {HANDSHAKE_S:g} s"
                self._refuse(address, f"no proof: {late if isinstance(err, TimeoutError) else err}")
        finally:
            if peer is None:
                link.abort()  # a peer without a proof cannot make TLS wait for its close
            else:
                link.close()

    async def _serve_proved(self, link: Link, task: asyncio.Task[None]) -> None:
        """Make this the connection of its replica, after ending the one before it."""
        peer = link.peer
        if reason := self._admit(peer):
            link.send(RefusedText(reason))
            raise WireError(f"broker {peer.broker}, replica {peer.replica}: {reason}")
        async with self._replacing:
            if before := self._serving.get(peer.replica):
                before[0].abort()
                before[1].cancel()
                await asyncio.wait([before[1]])
            self._serving[peer.replica] = link, task
        try:
            await self._serve(link)
        finally:
            if self._serving.get(peer.replica) == (link, task):
                del self._serving[peer.replica]

    # --- the log

    def _refuse(self, peer: str, reason: str) -> None:
        """Count a refused peer. The first refusal is logged at once, the others in one line a minute."""
        self._incidents.note("replica_refused", peer, reason)
        self._has_refused = True
        if self._timer is None:
            self._report()

    def _report(self) -> None:
        self._timer = None
        if self._has_refused:
            self._has_refused = False
            self._incidents.say()
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._report)


# --- settings --------------------------------------------------------------------------------------------------------


def read_secret(path: str) -> bytes:
    """Return the secret of the shard. Raises ConfigError that names the file."""
    try:
        with open(path, "rb") as file:
            secret = file.read(1 << 16).strip()
    except OSError as err:
        raise ConfigError(
            f"KMQ_REPLICA_SECRET={path!r}: {err.strerror}; the brokers of a shard share this file"
        ) from err
    if len(secret) < SECRET_BYTES:
        raise ConfigError(
            f"KMQ_REPLICA_SECRET={path!r}: holds {len(secret)} bytes, at least {SECRET_BYTES} are needed;"
            " make one with: head -c 32 /dev/urandom | base64"
        )
    return secret
