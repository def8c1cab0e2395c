"""Requests of a session that cross with others, and with what the gateway does meanwhile: commits with reads, rebalances."""

import asyncio
import errno
import os
import socket
import struct
import threading

import pytest
from log_server import up
from made_data import write_data
from waiting import until_async

from kmq.broker.stats import STATES, Incidents, Strangers
from kmq.gateway.core import partitions
from kmq.gateway.core.feed import Watermark
from kmq.gateway.core.fetching import Waking
from kmq.gateway.core.metrics import Requests
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import OffsetStore
from kmq.gateway.lines import connection
from kmq.gateway.lines.door import Lines
from kmq.gateway.lines.service import Service
from kmq.gateway.ports import Doors, listening
from kmq.logfmt import Logger

PATIENCE_S = 100.0
MOST = 3  # connections


class Held(Service):
    """Reads as always, and hands a batch, or what `holds` names, over when it is told to."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.holds = "batch"
        self.gate, self.held = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def run_now(self, work, *arguments):
        result = await super().run_now(work, *arguments)
        if self.holds in work.__qualname__ and not self.gate.is_set():
            self.held.set()
            await self.gate.wait()
        return result


class Client:
    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    @classmethod
    async def at(cls, address):
        return cls(*await asyncio.open_connection(*address))

    async def ask(self, *lines):
        self._writer.write("".join(f"{line}\n" for line in lines).encode())

    async def wait_for_records(self):
        """Begin a session whose fetch waits at the end of t/0."""
        await self.ask("ASSIGN t/0@latest", "!fetch 20 wait=60000", "!offsets")
        assert await self.line() == "!assign 0 t/0@100"
        assert (await self.line()).startswith("!offsets t/0 ")  # the fetch is behind it

    @property
    def address(self):
        return self._writer.get_extra_info("peername")

    async def close(self):
        self._writer.close()
        await self._writer.wait_closed()

    def reset(self):
        """Go as a process that was killed with records unread."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def line(self):
        return (await self._reader.readline()).decode().rstrip("\n")

    async def batch(self):
        head = (await self.line()).split()
        await self._reader.readexactly(int(head[4]))
        return head[1], int(head[2])


@pytest.fixture
def run(tmp_path):
    """Runs a coroutine function that is given the service and a client of a session on topic t, of 100 records."""
    stored = [b"t|0||%d" % n for n in range(100)] + [b"u|0||%d" % n for n in range(20)]
    data = write_data(tmp_path / "d", stored, {"t": 1, "u": 2})

    def go(work, state="ready"):
        async def main():
            with up(data, synced=len(stored)) as broker:
                broker.page.rows["router"].seq = len(stored)
                broker.page.rows["router"].state = STATES.index(state)
                waking, strangers = (
                    Waking(Watermark(broker.page)),
                    Strangers(broker.page.rows["gateway"], Incidents(lambda *_, **__: None)),
                )
                service = Held(broker.settings, waking, None, strangers, Requests())
                log = Logger("test")
                store = OffsetStore(broker.settings, Watermark(broker.page), log)
                groups = Groups(broker.settings, store, service.partitions, log)
                await store.load()
                running = asyncio.create_task(groups.run())
                await until_async(lambda: groups.is_ready)
                lines = Lines(service, groups)
                [door] = listening("127.0.0.1", 0)
                doors = Doors(broker.settings, strangers)
                doors.serve(door, lines, None, MOST)
                client = await Client.at(door.getsockname())
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await work(service, client)
                finally:
                    running.cancel()
                    lines.stop()
                    await client.close()
                    await lines.drain()
                    doors.close()
                    service.close()
                    waking.close()

        asyncio.run(main())

    return go


def test_a_client_that_goes_while_its_batch_is_read_leaves_no_file_open(run, monkeypatch):
    monkeypatch.setattr(partitions, "IN_MEMORY", 0)  # every batch is a piece of a file
    read, has_begun, may_go_on = partitions.Partition.batch, threading.Event(), threading.Event()

    def slow(*arguments):
        batch = read(*arguments)
        has_begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return batch

    def opened():
        paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return [path for path in paths if os.path.exists(path) and os.readlink(path).endswith((".log", ".idx"))]

    async def work(service, client):
        before = len(opened())
        monkeypatch.setattr(partitions.Partition, "batch", slow)
        await client.ask("ASSIGN t/0@0", "!fetch 2000000")
        assert await client.line() == "!assign 0 t/0@0"
        await until_async(has_begun.is_set)
        assert len(opened()) > before
        client.reset()
        await until_async(
            lambda: not any("Connection._run" in repr(task) for task in asyncio.all_tasks()), "the end of the session"
        )
        may_go_on.set()
        await until_async(lambda: len(opened()) <= before)

    run(work)


def test_a_seek_during_a_read_that_finds_nothing_is_not_forgotten(run):
    async def work(service, client):
        await client.wait_for_records()
        service.gate.clear()
        await client.ask("!seek t/0 latest")  # so that the waiting fetch reads once more
        assert await client.line() == "!seek t/0@100"
        await service.held.wait()
        await client.ask("!seek t/0 7")
        assert await client.line() == "!seek t/0@7"
        service.gate.set()
        assert await client.batch() == ("t/0", 7)

    run(work)


def test_a_batch_that_was_read_before_a_seek_is_not_sent(run):
    async def work(service, client):
        await client.wait_for_records()
        service.gate.clear()
        await client.ask("!seek t/0 50")
        assert await client.line() == "!seek t/0@50"
        await service.held.wait()
        await client.ask("!seek t/0 7")
        assert await client.line() == "!seek t/0@7"
        service.gate.set()
        assert await client.batch() == ("t/0", 7)
        await client.ask("!fetch 20")
        assert await client.batch() == ("t/0", 8)

    run(work)


def test_a_commit_is_answered_while_a_slow_disk_holds_a_fetch_up(run):
    async def work(service, client):
        await client.ask("ASSIGN g t/0@0")
        assert await client.line() == "!assign 0 t/0@0"
        service.gate.clear()
        await client.ask("!fetch 20", "!commit again t/0 7")
        assert await client.line() == "!committed again t/0 7"
        await service.held.wait()
        service.gate.set()
        assert await client.batch() == ("t/0", 0)

    run(work)


@pytest.mark.parametrize(
    ("opening", "line", "reply"),
    [
        ("ASSIGN t/0@0", "!seek t/0 50", "!seek t/0@50"),
        ("ASSIGN t/0@0", "!offsets", "!offsets t/0 start=0 end=100 next=1 committed=-"),
        ("ASSIGN t/0@0", "!nack t/0 0", "!err nack bad_request this connection names no group; say"),
        ("GROUP g member=a topics=t", "!leave", ""),  # the end
    ],
)
def test_all_but_a_commit_is_answered_after_the_fetch_before_it(run, opening, line, reply):
    async def work(service, client):
        await client.ask(opening)
        assert (await client.line()).startswith("!assign ")
        service.gate.clear()
        await client.ask("!fetch 20", line)
        await service.held.wait()
        other = await Client.at(client.address)
        await other.ask("ASSIGN t/0@0", "!seek t/0 1")
        assert [await other.line() for _ in range(2)] == ["!assign 0 t/0@0", "!seek t/0@1"], "so long it takes"
        service.gate.set()
        assert await client.batch() == ("t/0", 0)
        after = await client.line()
        assert after.startswith(reply) and bool(after) == bool(reply)
        await other.close()

    run(work)


def test_where_the_file_system_has_no_sendfile_records_are_read_and_sent(run, monkeypatch):
    asked = []

    def refuse(*arguments):
        asked.append(arguments)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(connection, "HIGH_BYTES", 10)
    monkeypatch.setattr(partitions, "IN_MEMORY", 10)  # more than this is for sendfile
    monkeypatch.setattr(os, "sendfile", refuse)

    async def work(service, client):
        await client.ask("ASSIGN t/0@0", "!fetch 20", "!fetch 2000000")
        assert await client.line() == "!assign 0 t/0@0"
        assert [await client.batch() for _ in range(2)] == [("t/0", 0), ("t/0", 1)]
        assert asked

    run(work)


def test_a_fetch_behind_a_seek_shows_nothing_from_before_it(run):
    async def work(service, client):
        await client.ask("ASSIGN t/0@0")
        assert await client.line() == "!assign 0 t/0@0"
        service.gate.clear()
        await client.ask("!fetch 20", "!fetch 20", "!seek t/0 50", "!fetch 20", "!fetch 20")
        await service.held.wait()
        service.gate.set()
        assert [await client.batch() for _ in range(2)] == [("t/0", 0), ("t/0", 1)]
        assert await client.line() == "!seek t/0@50"
        assert [await client.batch() for _ in range(2)] == [("t/0", 50), ("t/0", 51)]

    run(work)


@pytest.mark.parametrize("line", ["!fetch 20 t/7", "!fetch much"])
def test_a_fetch_that_is_refused_is_answered_after_the_fetch_before_it(run, line):
    async def work(service, client):
        await client.ask("ASSIGN t/0@0", "!fetch 20", line, "!fetch 20")
        assert await client.line() == "!assign 0 t/0@0"
        assert await client.batch() == ("t/0", 0)
        assert (await client.line()).startswith("!err fetch ")
        assert await client.batch() == ("t/0", 1)

    run(work)


def test_only_fetches_that_wait_for_records_count_as_waiting(run):
    async def work(service, client):
        await client.ask("ASSIGN t/0@0", *["!fetch 20"] * 100)
        assert await client.line() == "!assign 0 t/0@0"
        assert [await client.batch() for _ in range(100)] == [("t/0", offset) for offset in range(100)]
        await client.ask(*["!fetch 20 wait=60000"] * 65)
        assert (await client.line()).startswith("!err fetch too_many ")

    run(work)


def test_a_fetch_shows_nothing_of_a_partition_behind_its_revoke(run):
    """Also what was read before the revoke, and is written after it, because the disk is slow."""

    async def work(service, client):
        await client.ask("GROUP g member=a topics=u")
        assert (await client.line()).endswith(" u/0@0 u/1@0")
        await client.ask("!fetch 20")
        assert await client.batch() == ("u/0", 0)
        service.gate.clear()
        await client.ask("!fetch 20")
        await service.held.wait()
        other = await Client.at(client.address)
        await other.ask("GROUP g member=b topics=u")
        assert await client.line() == "!revoke u/1", "it was being read"
        assert await client.line() == "!assign 2 u/0@1"
        await client.ask("!fetch 20")
        service.gate.set()
        assert [await client.batch() for _ in range(2)] == [("u/0", 1), ("u/0", 2)]
        await other.close()

    run(work)


@pytest.mark.parametrize(("state", "code"), [("ready", "out_of_range"), ("recovering", "not_ready")])
def test_an_offset_behind_the_end_is_too_early_while_the_router_recovers(run, state, code):
    """A consumer that goes on after a power cut tries again then, and does not end."""

    async def work(service, client):
        await client.ask("ASSIGN t/0@200")
        assert (await client.line()).startswith(f"!err {code} ")
        assert await client.line() == "", "the end"

    run(work, state)


def test_a_partition_may_be_given_up_before_the_assignment_of_that_rebalance_is_written(run):
    """The gateway opens what comes with it, which takes long with many partitions. It is nobody's fault."""

    async def work(service, client):
        await client.ask("GROUP g member=a topics=u")
        assert (await client.line()).endswith(" u/0@0 u/1@0")
        other = await Client.at(client.address)
        service.holds = "_open"
        service.gate.clear()
        await other.ask("GROUP g member=b topics=u")
        assert (await client.line()).startswith("!revoke u/")
        await client.ask("!revoked", "!offsets")
        assert not (await client.line()).startswith("!err")
        service.gate.set()
        while (line := await client.line()).startswith("!assign ") and line.count("u/") != 1:
            pass
        assert line.startswith("!assign ") and line.count("u/") == 1
        await other.close()

    run(work)


def test_the_gateway_ends_while_a_refused_client_still_reads(run):
    """The client keeps its half of the connection open, so the gateway waits a moment before it closes."""

    async def work(service, client):
        await client.ask("NONSENSE")
        assert (await client.line()).startswith("!err bad_request ")
        assert await client.line() == ""

    run(work)


def test_the_fetch_of_a_refused_client_waits_no_longer(run):
    """It would take a message that comes again, and nobody would have it."""

    async def work(service, client):
        before = asyncio.all_tasks()
        await client.wait_for_records()
        await client.ask("NONSENSE")
        assert (await client.line()).startswith("!err bad_request ")
        assert await client.line() == ""
        await client.close()
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)

    run(work)


def test_strangers_that_ask_for_nothing_make_room_before_an_idle_consumer(run):
    """However many they are. The consumer works on its records meanwhile, so it is silent for longer than they are."""

    async def work(service, client):
        await client.ask("ASSIGN t/0")
        assert await client.line() == "!assign 0 t/0@0"
        strangers = [await Client.at(client.address) for _ in range(MOST + 1)]
        assert await strangers[0].line() == "", "it was evicted"
        await client.ask("!fetch 20")
        assert await client.batch() == ("t/0", 0)
        for stranger in strangers:
            await stranger.close()

    run(work)
