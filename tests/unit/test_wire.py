"""The replica protocol between real ends on this machine: texts, the proof, limits, and whatever a stranger sends."""

import asyncio
import mmap
import random
import socket
import ssl
import struct
import zlib
from contextlib import asynccontextmanager, suppress

import pytest
from certificates import Authority
from fake_logger import FakeLogger
from waiting import until_async

from kmq.broker.tls import client_context, make_context
from kmq.cluster.register import Version
from kmq.config.settings import load
from kmq.errors import ConfigError
from kmq.replica import roles, wire
from kmq.replica.wire import (
    Data,
    Diverged,
    FetchText,
    FilesText,
    FileText,
    Gone,
    Have,
    Hw,
    LogRange,
    Me,
    NextLog,
    Peer,
    PieceText,
    RefusedText,
    RegisterText,
    ReplicaPort,
    WireError,
    call,
)

SECRET = b"a secret of a shard"
LINEAGE = "0" * 32
LEADER = Me("s", LINEAGE, "a", "a" * 16, 1, 1 << 20)
FOLLOWER = Me("s", LINEAGE, "b", "b" * 16, 1, 4096)
LINES = b"t|1||x\nt|2||y\n"
MESSAGES = (
    FetchText(Version(31, "0c1d" * 4), 8, 1024723, 8, 4194304),
    Have(31, 1026771, 0),
    Data(8, 5, 6, 1, zlib.crc32(LINES), 4, LINES),
    Hw(1026770),
    Diverged(7, 1024700, 1024723, 8),
    Gone(900000),
    RefusedText("not_leader"),
    RegisterText(b"lineage=\n"),
    FileText("producers.ckpt", 7, zlib.crc32(b"\0" * 9), b"\0" * 9),
    FilesText(3),
    PieceText("append/00000000000000000001.log", 1 << 20, 2, zlib.crc32(LINES), LINES),
    PieceText("dropped.log", 0, 0, 0, b""),
    NextLog("-"),
    LogRange("orders/0", 0, 1 << 40, 1 << 31),
)
PATIENCE_S = 100.0


async def echo(link):
    """Send back what comes."""
    while True:
        link.send(await link.read())


@asynccontextmanager
async def opened(serve=echo, admit=lambda peer: "", tls=None, log=None):
    port = ReplicaPort(lambda: LEADER, SECRET, tls, admit, serve, log or FakeLogger())
    await port.open("127.0.0.1", 0)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield port
    finally:
        await port.close()
        for link in getattr(port, "callers", ()):
            link.abort()
        for _ in range(3):  # turns of the loop in which connections end
            await asyncio.sleep(0)


async def to(port, me=FOLLOWER, secret=SECRET, tls=None):
    """Connect as a follower. The connection ends with the port."""
    link = await call(f"127.0.0.1:{port.port}", me, secret, tls, PATIENCE_S)
    port.callers = [*getattr(port, "callers", ()), link]
    return link


def play(scene):
    """Run it, and have no error go unseen."""

    async def watched():
        unseen = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        await scene()
        assert unseen == []

    asyncio.run(watched())


async def refused_reason(log, count=1):
    """Return the reason of the log line once there are that many."""
    await until_async(lambda: len(log.of("replica_refused")) >= count)
    return log.of("replica_refused")[count - 1]["reason"]


async def check_serves(port):
    """A follower with a proof is served."""
    link = await to(port)
    link.send(Hw(1))
    assert await link.read() == Hw(1)
    link.close()


# --- texts -----------------------------------------------------------------------------------------------------------


def test_each_message_comes_as_it_was_sent():
    async def scene():
        async with opened() as port:
            link = await to(port)
            for message in MESSAGES:
                link.send(message)
            assert [await link.read() for _ in MESSAGES] == list(MESSAGES)
            link.send(MESSAGES[2]._replace(lines=memoryview(LINES)))
            assert await link.read() == MESSAGES[2]

    play(scene)


def test_large_blocks_and_small_texts_mixed_arrive_whole_and_in_order():
    async def scene():
        block = b"x" * 99 + b"\n"
        sent = []
        for count in (1, 40, 41, 4000, 1, 80_000, 2):
            lines = block * count
            sent += [Hw(count), Data(1, 1, count, 0, zlib.crc32(lines), 0, lines)]
        async with opened() as port:
            link = await to(port)
            for message in sent:
                link.send(message)
            assert [await link.read() for _ in sent] == sent

    play(scene)


def test_a_connection_that_broke_holds_nothing_of_the_block_that_was_being_sent():
    async def scene():
        with mmap.mmap(-1, 1 << 20) as ring, socket.create_server(("127.0.0.1", 0)) as server:
            loop, ours = asyncio.get_running_loop(), socket.create_connection(server.getsockname())
            _, link = await loop.create_connection(lambda: wire.Link(ours), sock=ours)
            theirs, _ = server.accept()
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()  # by a reset: nothing can be written any more
            link.send(MESSAGES[2]._replace(lines=memoryview(ring)))
            with pytest.raises(ConnectionError):
                await link.read()
            ring.close()

    play(scene)


def test_a_read_that_is_cancelled_loses_nothing():
    async def scene():
        halves = asyncio.Event()

        async def serve(link):
            text = f"{wire.encode(MESSAGES[2])}\n".encode() + LINES
            link._transport.write(text[:-9])
            await halves.wait()
            link._transport.write(text[-9:])
            await link.read()

        async with opened(serve) as port:
            link = await to(port)
            task = asyncio.create_task(link.read())
            while not link._missing:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            halves.set()
            assert await link.read() == MESSAGES[2]

    play(scene)


# --- the proof -------------------------------------------------------------------------------------------------------


def test_after_the_proof_each_side_knows_the_other():
    async def scene():
        async with opened(echo, admit=lambda peer: "" if peer == Peer("b", "b" * 16, 1, 4096) else "other") as port:
            link = await to(port)
            assert link.peer == Peer("a", "a" * 16, 1, 1 << 20)
            link.send(Hw(1))
            assert await link.read() == Hw(1)

    play(scene)


@pytest.mark.parametrize(
    ("me", "secret", "follower", "leader"),
    [
        (FOLLOWER, b"another secret, as long", "another secret than ours", "no proof"),
        (FOLLOWER._replace(shard="t"), SECRET, "is of another shard", "no proof"),
        (FOLLOWER._replace(lineage="1" * 32), SECRET, "!refused reason=lineage", f"is not {LINEAGE}, the lineage of"),
    ],
)
def test_who_has_another_secret_shard_or_lineage_is_refused_on_both_sides(me, secret, follower, leader):
    async def scene():
        log = FakeLogger()
        async with opened(log=log) as port:
            with pytest.raises(WireError, match=follower):
                await to(port, me, secret)
            assert leader in await refused_reason(log)
            await check_serves(port)

    play(scene)


def test_of_another_lineage_nothing_but_the_refusal_is_told():
    async def scene():
        async with opened() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(f"!replica lineage={'1' * 32} {FOLLOWER.peer.encode()} nonce={'0' * 32}\n".encode())
            assert await reader.read() == b"!refused reason=lineage\n"
            writer.close()

    play(scene)


@asynccontextmanager
async def recorded(port):
    """Play a session through a relay. Yields what either side has said, once it is over."""
    said = {"follower": bytearray(), "leader": bytearray()}

    async def relay(reader, writer):
        there = await asyncio.open_connection("127.0.0.1", port.port)

        async def pass_on(source, sink, name):
            while data := await source.read(4096):
                said[name] += data
                sink.write(data)
            sink.close()

        await asyncio.gather(pass_on(reader, there[1], "follower"), pass_on(there[0], writer, "leader"))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        link = await call(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", FOLLOWER, SECRET, None, PATIENCE_S)
        link.send(Hw(5))
        assert await link.read() == Hw(5)
        link.close()
        yield said


def test_a_recorded_session_is_worth_nothing_to_who_plays_it_to_the_leader():
    async def scene():
        log = FakeLogger()
        async with opened(log=log) as port, recorded(port) as said:
            assert said["follower"].count(b"\n") == 3
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(said["follower"])
            with suppress(ConnectionError):
                assert b"!hw" not in await reader.read()
            writer.close()
            assert await refused_reason(log) == "no proof of the secret"

    play(scene)


def test_a_recorded_session_is_worth_nothing_to_who_plays_the_leader():
    async def scene():
        async with opened() as port, recorded(port) as said:

            async def pose(reader, writer):
                writer.write(said["leader"])
                assert b"!proof" not in await reader.read()
                writer.close()

            server = await asyncio.start_server(pose, "127.0.0.1", 0)
            async with server:
                with pytest.raises(WireError, match="another secret than ours"):
                    await call(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", FOLLOWER, SECRET, None, PATIENCE_S)

    play(scene)


def test_the_leaders_own_proof_sent_back_is_no_proof():
    async def scene():
        async with opened() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(f"!replica lineage={LINEAGE} {LEADER.peer.encode()} nonce={'0' * 32}\n".encode())
            challenge = await reader.readline()
            writer.write(b"!proof " + challenge.split()[-1] + b"\n")
            assert await reader.read() == b"!refused reason=proof\n"
            writer.close()

    play(scene)


def test_a_replica_that_is_not_admitted_is_told_why():
    async def scene():
        log, served = FakeLogger(), []
        async with opened(served.append, admit=lambda peer: "not_leader", log=log) as port:
            link = await to(port)
            assert await link.read() == RefusedText("not_leader")
            with pytest.raises(ConnectionError):
                await link.read()
            assert await refused_reason(log) == f"broker b, replica {'b' * 16}: not_leader" and served == []

    play(scene)


def test_an_address_that_is_none_is_refused_by_its_name():
    async def scene():
        for address in ("", "host", "127.0.0.1:x", "127.0.0.1:99999", f"{'x' * 99}:5677"):
            with pytest.raises(WireError, match="is not the address of a replica port"):
                await call(address, FOLLOWER, SECRET, None, PATIENCE_S)

    play(scene)


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_replica_has_one_connection_and_the_new_one_begins_after_the_old_ones_end():
    async def scene():
        steps, numbers = [], [0]

        async def serve(link):
            name, numbers[0] = numbers[0], numbers[0] + 1
            steps.append(f"begin {name}")
            try:
                await echo(link)
            finally:
                await asyncio.sleep(0)
                steps.append(f"end {name}")

        async with opened(serve) as port:
            old = await to(port)
            old.send(Hw(1))
            assert await old.read() == Hw(1)
            other = await to(port, FOLLOWER._replace(replica="c" * 16))
            other.send(Hw(1))
            assert await other.read() == Hw(1)
            await check_serves(port)
            with pytest.raises(ConnectionError):
                await old.read()
            other.send(Hw(2))
            assert await other.read() == Hw(2)
        assert steps[:4] == ["begin 0", "begin 1", "end 0", "begin 2"]

    play(scene)


HELLO = f"!replica lineage={LINEAGE} {FOLLOWER.peer.encode()} nonce={'0' * 32}\n".encode()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"x" * 5_000_000, "a text of more than 1024 bytes"),
        (b"\n" * 5_000_000, "in place of !replica"),
        (HELLO + b"x" * 5_000_000, "a text of more than 1024 bytes"),
        (HELLO + HELLO * 10_000, "no proof of the secret"),
        (HELLO.replace(b"level=1", b"level=" + b"9" * 30), "in place of !replica"),
        (b"", "no proof: 127.0.0.1"),
    ],
)
def test_megabytes_and_nonsense_before_the_proof_end_the_connection(sent, reason):
    async def scene():
        log = FakeLogger()
        async with opened(log=log) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            with suppress(ConnectionError):
                writer.write(sent)
                writer.write_eof() if not sent else await writer.drain()
                await reader.read()
            assert reason in await refused_reason(log)
            writer.close()
            await check_serves(port)

    play(scene)


@pytest.mark.parametrize("over", ["tcp", "tls"])
def test_who_proves_nothing_in_time_is_cut_off(over, monkeypatch, tls):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.1)

    async def scene():
        log = FakeLogger()
        async with opened(log=log, tls=tls[0] if over == "tls" else None) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            assert await reader.read() == b""
            assert await refused_reason(log) == "no proof: not within 0.1 s"
            writer.close()

    play(scene)


@pytest.mark.parametrize("over", ["tcp", "tls"])
def test_of_too_many_strangers_the_oldest_has_to_go_and_a_follower_gets_in(over, monkeypatch, tls):
    monkeypatch.setattr(wire, "HANDSHAKE_S", PATIENCE_S)
    monkeypatch.setattr(wire, "STRANGERS", 4)

    async def scene():
        log, context = FakeLogger(), tls if over == "tls" else (None, None)
        async with opened(log=log, tls=context[0]) as port:
            strangers = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(6)]
            for reader, _ in strangers[:2]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
            link = await to(port, tls=context[1])
            link.send(Hw(1))
            assert await link.read() == Hw(1)
            link.close()
            assert len(port._strangers) <= 4
            assert await refused_reason(log) == "the oldest of 4 connections without a proof"
            for _, writer in strangers:
                writer.close()

    play(scene)


def test_strangers_that_come_all_at_once_are_all_closed(monkeypatch):
    monkeypatch.setattr(wire, "STRANGERS", 4)
    monkeypatch.setattr(wire, "HANDSHAKE_S", PATIENCE_S)

    async def scene():
        async with opened() as port:
            flood = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(40)]
            for sock in flood[:36]:
                sock.setblocking(False)
                with suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            await check_serves(port)
            for sock in flood:
                sock.close()

    play(scene)


def test_a_stranger_cannot_hold_its_tls_connection_by_not_saying_farewell(tls, monkeypatch):
    monkeypatch.setattr(wire, "DEAD_S", 300)

    def stay(port):
        with tls[1].wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1") as secured:
            secured.settimeout(PATIENCE_S)
            secured.sendall(HELLO.replace(LINEAGE.encode(), b"1" * 32))
            assert secured.recv(100) == b"!refused reason=lineage\n"
            with socket.socket(fileno=secured.detach()) as plain:
                plain.settimeout(PATIENCE_S)
                while plain.recv(100):
                    pass

    async def scene():
        async with opened(tls=tls[0]) as port:
            await asyncio.to_thread(stay, port.port)

    play(scene)


async def send_nonsense(port, times):
    for _ in range(times):
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionError):
            await reader.read()
        writer.close()


def test_a_flood_of_strangers_is_one_log_line_at_once_and_one_for_the_others():
    async def scene():
        log = FakeLogger()
        async with opened(log=log) as port:
            await send_nonsense(port, 50)
            assert len(log.events) == 1
        assert [row["count"] for row in log.of("replica_refused")] == [1, 49]
        assert log.events[0][1]["reason"] == "'GET / HTTP/1.1\\r' in place of !replica"

    play(scene)


def test_the_second_log_line_comes_after_its_time(monkeypatch):
    monkeypatch.setattr(wire, "REPORT_S", 0.1)

    async def scene():
        log = FakeLogger()
        async with opened(log=log) as port:
            await send_nonsense(port, 2)
            await refused_reason(log, count=2)

    play(scene)


def test_a_peer_that_takes_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(wire, "DEAD_S", 1)

    async def scene():
        ended = asyncio.Event()

        async def serve(link):
            lines = b"x" * 99_999 + b"\n"
            for _ in range(640):
                link.send(Data(1, 1, 1, 0, 0, 0, lines))
            assert link._transport.get_write_buffer_size()
            with suppress(ConnectionError):
                await link.read()
            ended.set()

        async with opened(serve) as port:
            link = await to(port)
            await ended.wait()
            link.close()

    play(scene)


# --- lies ------------------------------------------------------------------------------------------------------------

CRC = zlib.crc32(LINES)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (f"!data epoch=1 first=1 last=2 key=0 crc=0 hw=0 bytes={(8 << 20) + 1}\n".encode(), "has at most 8388608"),
        (b"!data epoch=1 first=1 last=2 key=0 crc=0 hw=0 bytes=999999999999999999\n", "has at most 8388608"),
        (b"!register bytes=65537\n", "has at most 65536"),
        (b"!file name=producers.ckpt seq=1 crc=0 bytes=67108865\n", "has at most 67108864"),
        (b"!file name=../x seq=1 crc=0 bytes=0\n", "wrong name"),
        (b"!piece name=format offset=0 left=0 crc=0 bytes=1048577\n", "has at most 1048576"),
        (b"!piece name=a\xc3\xa9 offset=0 left=0 crc=0 bytes=0\n", "wrong name"),
        (b"!piece name=" + b"x" * 301 + b" offset=0 left=0 crc=0 bytes=0\n", "wrong name"),
        (b"!files got=-1\n", "wrong got"),
        (b"!hw seq=01\n", "wrong seq"),
        (b"!hw seq=-1\n", "wrong seq"),
        (b"!hw seq=\xb2\n", "wrong seq"),
        (b"!hw seq=1000000000000000000\n", "wrong seq"),
        (b"!hw  seq=1\n", "is no text"),
        (b"!hw seq=1 \n", "is no text"),
        (b"!hw seq=1\r\n", "wrong seq"),
        (b"!have next=1 version=1 room=1\n", "is no text"),
        (b"!fetch version=1 epoch=1 next=1 last=1 room=1\n", "wrong version"),
        (b"!replica\n", "is no text"),
        (b"\n", "is no text"),
        (f"!data epoch=1 first=1 last=2 key=0 crc={CRC + 1} hw=0 bytes=14\n".encode() + LINES, f"came is {CRC}"),
        (f"!data epoch=1 first=1 last=3 key=0 crc={CRC} hw=0 bytes=14\n".encode() + LINES, "2 lines came"),
        (f"!data epoch=1 first=2 last=1 key=0 crc={CRC} hw=0 bytes=14\n".encode() + LINES, "2 lines came"),
        (f"!data epoch=1 first=0 last=1 key=0 crc={CRC} hw=0 bytes=14\n".encode() + LINES, "2 lines came"),
        (b"!data epoch=1 first=1 last=0 key=0 crc=0 hw=0 bytes=0\n", "0 lines came"),
        (
            f"!data epoch=1 first=1 last=1 key=0 crc={zlib.crc32(b'a' + LINES[-1:] + b'b')} hw=0 bytes=3\na\nb".encode(),
            "1 l",
        ),
        (b"!file name=producers.ckpt seq=1 crc=7 bytes=1\nx", "the crc of what came is"),
        (b"x" * 2000, "more than 1024"),
    ],
)
def test_a_lie_after_the_proof_ends_that_connection_with_its_reason(sent, reason):
    async def scene():
        log = FakeLogger()
        async with opened(log=log) as port:
            link = await to(port)
            link._transport.write(sent)
            with pytest.raises(ConnectionError):
                await link.read()
            assert reason in await refused_reason(log)
            await check_serves(port)

    play(scene)


def mutated(chance, text):
    """Change, drop, double or cut some bytes."""
    text = bytearray(text)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(text) + 1)
        what = chance.randrange(5)
        if what == 0:
            text[at : at + 1] = bytes((chance.randrange(256),))
        elif what == 1:
            del text[at : at + chance.choice((1, 2, 50))]
        elif what == 2:
            text[at:at] = text[at : at + chance.randrange(60)]
        elif what == 3:
            text[at:at] = chance.choice((b"9", b"\n", b" ", b"=", b"-", b"\0", b"\xff", b"9" * 20))
        else:
            del text[at:]
    return bytes(text)


TEXTS = [
    f"{wire.encode(each)}\n".encode() + bytes(getattr(each, wire._BODIES.get(type(each), ""), b"")) for each in MESSAGES
]


def nonsense(chance, texts):
    """Return what a stranger could send: random bytes, or a session with faults."""
    if chance.random() < 0.2:
        return chance.randbytes(chance.choice((1, 10, 1000, 5000)))
    return b"".join(mutated(chance, chance.choice(texts)) for _ in range(chance.randrange(1, 6)))


def test_fuzz_before_the_proof_disturbs_nobody():
    async def scene():
        chance = random.Random(30)
        texts = [HELLO, HELLO, f"!proof mac={'0' * 64}\n".encode(), *TEXTS]
        async with opened(serve=None) as port:
            for _ in range(1500):
                reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
                with suppress(ConnectionError):
                    writer.write(nonsense(chance, texts))
                    writer.write_eof()
                    await reader.read()
                writer.close()
            port._serve = echo
            await check_serves(port)
            await until_async(lambda: not port._strangers)

    play(scene)


def test_fuzz_after_the_proof_is_an_end_of_that_connection_on_either_side():
    async def scene():
        chance = random.Random(31)

        async def serve(link):
            while True:
                link._transport.write(nonsense(chance, TEXTS))
                link.send(await link.read())

        async with opened(serve) as port:
            for _ in range(700):
                link = await to(port)
                link._transport.write(nonsense(chance, TEXTS))
                link._transport.write_eof()
                with pytest.raises((WireError, ConnectionError)):
                    while True:
                        await link.read()
                link.abort()
            port._serve = echo
            await check_serves(port)

    play(scene)


def test_any_cut_of_the_stream_gives_the_same_messages():
    async def scene():
        stream, chance = b"".join(TEXTS * 40), random.Random(32)

        async def serve(link):
            at = 0
            while at < len(stream):
                size = chance.choice((1, 2, 7, 90, 4000, 9000))
                link._transport.write(stream[at : at + size])
                at += size
                await asyncio.sleep(0)
            await link.read()

        async with opened(serve) as port:
            link = await to(port)
            assert [await link.read() for _ in range(40 * len(MESSAGES))] == list(MESSAGES) * 40

    play(scene)


# --- TLS and settings ------------------------------------------------------------------------------------------------


def settings(certificate, key, **more):
    given = {"KMQ_TLS_CERT": str(certificate), "KMQ_TLS_KEY": str(key)}
    return load(given | more, "no such file")


@pytest.fixture
def tls(tmp_path):
    """Contexts of a server and a client that must show its certificate."""
    authority = Authority(tmp_path)
    mine = settings(*authority.issue("broker"), KMQ_TLS_CLIENT_CA=str(authority.path))
    return make_context(mine), client_context(mine)


async def tls_refuses(server, client, host="127.0.0.1", error=ssl.SSLError):
    async with opened(tls=server) as port:
        with pytest.raises((error, ConnectionError)):
            link = await call(f"{host}:{port.port}", FOLLOWER, SECRET, client, PATIENCE_S)
            await link.read()


def test_over_tls_with_certificates_on_both_sides_all_comes_whole(tls):
    async def scene():
        lines = (b"x" * 99 + b"\n") * 9000
        large = Data(1, 1, 9000, 0, zlib.crc32(lines), 0, lines)
        async with opened(tls=tls[0]) as port:
            link = await to(port, tls=tls[1])
            for message in (*MESSAGES, large, *MESSAGES):
                link.send(message)
            for message in (*MESSAGES, large, *MESSAGES):
                assert await link.read() == message
            link.close()

    play(scene)


def test_without_a_certificate_of_the_authority_tls_ends_the_connection(tls, tmp_path):
    other = Authority(tmp_path / "other")
    stranger = settings(*other.issue("stranger"), KMQ_TLS_CLIENT_CA=str(tmp_path / "authority.pem"))
    play(lambda: tls_refuses(tls[0], client_context(stranger)))


def test_a_leader_with_a_certificate_of_another_authority_or_name_is_not_trusted(tls, tmp_path):
    other = Authority(tmp_path / "other")
    posing = settings(*other.issue("posing"))
    play(lambda: tls_refuses(make_context(posing), tls[1], error=ssl.SSLCertVerificationError))
    play(lambda: tls_refuses(tls[0], tls[1], host="127.0.0.2", error=OSError))


def test_brokers_may_share_one_certificate_without_an_authority(tmp_path):
    shared = settings(*Authority(tmp_path).issue("shared"))

    async def scene():
        async with opened(tls=make_context(shared)) as port:
            link = await to(port, tls=client_context(shared))
            link.send(Hw(1))
            assert await link.read() == Hw(1)

    play(scene)


def test_a_secret_is_read_without_its_newline_and_a_short_or_missing_one_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text("  0123456789abcdef\n")
    assert wire.read_secret(str(path)) == b"0123456789abcdef"
    path.write_text("0123456789abcde\n")
    with pytest.raises(ConfigError, match=r"KMQ_REPLICA_SECRET=.*: holds 15 bytes, at least 16 are needed"):
        wire.read_secret(str(path))
    with pytest.raises(ConfigError, match=r"KMQ_REPLICA_SECRET=.*: No such file"):
        wire.read_secret(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("given", "bound", "advertised"),
    [
        ({}, "127.0.0.1", "127.0.0.1"),
        ({"KMQ_HOST": "10.0.0.7"}, "10.0.0.7", "10.0.0.7"),
        ({"KMQ_HOST": "0.0.0.0"}, "0.0.0.0", socket.gethostname()),
        ({"KMQ_HOST": "::"}, "::", socket.gethostname()),
        ({"KMQ_HOST": "0.0.0.0", "KMQ_ADVERTISE": "kmq-0.kmq"}, "0.0.0.0", "kmq-0.kmq"),
        ({"KMQ_TLS_CERT": "c", "KMQ_TLS_KEY": "k"}, "0.0.0.0", socket.gethostname()),
        ({"KMQ_TLS_CERT": "c", "KMQ_TLS_KEY": "k", "KMQ_TLS_HOST": "10.0.0.8"}, "10.0.0.8", "10.0.0.8"),
    ],
)
def test_a_broker_is_reached_where_it_listens_unless_it_says_otherwise(given, bound, advertised):
    mine = load(given, "no such file")
    assert (roles.bind_host(mine), roles.advertised(mine)) == (bound, advertised)


def test_a_port_that_is_taken_is_named():
    async def scene():
        async with opened() as port:
            second = ReplicaPort(lambda: LEADER, SECRET, None, lambda peer: "", echo, FakeLogger())
            with pytest.raises(
                ConfigError, match=f"KMQ_REPLICA_PORT={port.port} on '127.0.0.1': Address already in use"
            ):
                await second.open("127.0.0.1", port.port)

    play(scene)
