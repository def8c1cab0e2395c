"""The replica protocol between real ends on this machine: texts, the proof, limits, and whatever a stranger sends."""

import asyncio
import zlib
from contextlib import asynccontextmanager

from fake_logger import FakeLogger

from kmq.cluster.register import Version
from kmq.replica import wire
from kmq.replica.wire import (
    AskPromise,
    Data,
    Diverged,
    FetchText,
    FileText,
    Gone,
    Have,
    Hw,
    Me,
    RefusedText,
    RegisterText,
    ReplicaPort,
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
    AskPromise(),
    RegisterText(b"lineage=\n"),
    FileText("producers.ckpt", 7, zlib.crc32(b"\0" * 9), b"\0" * 9),
)
PATIENCE_S = 30.0


async def echo(link):
    """Send back what comes."""
    while True:
        link.send(await link.read())


@asynccontextmanager
async def opened(serve=echo, admit=lambda peer: "", tls=None, log=None):
    port = ReplicaPort(LEADER, SECRET, tls, admit, serve, log or FakeLogger())
    await port.open("127.0.0.1", 0)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield port
    finally:
        await port.close()


def to(port, me=FOLLOWER, secret=SECRET, tls=None):
    return call(f"127.0.0.1:{port.port}", me, secret, tls, PATIENCE_S)


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
    while len(log.of("replica_refused")) < count:
        await asyncio.sleep(0.001)
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
            link.send_data(*MESSAGES[2][:-1], memoryview(LINES))
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
