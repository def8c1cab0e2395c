"""kmq.v1 without a broker: members and clients that are slow, silent, greedy or wrong, and what they cost the others."""

import asyncio
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from brokers import FREE_PORTS
from chaos.attacks_ports import Http2
from log_server import up
from made_data import write_data
from waiting import PATIENCE_S, attempts, until_async

from kmq.broker.stats import Incidents, Strangers
from kmq.config.values import KIB, MIB
from kmq.gateway.core import core, producing
from kmq.gateway.core.core import Core
from kmq.gateway.core.metrics import Requests
from kmq.gateway.groups import membership
from kmq.gateway.groups.membership import Groups
from kmq.gateway.groups.offsets import OffsetStore
from kmq.gateway.grpc import calls, kmq_v1
from kmq.gateway.grpc.calls import Calls, Streams
from kmq.gateway.grpc.kmq_v1 import KmqV1
from kmq.gateway.grpc.schema import KMQ
from kmq.gateway.grpc.service import kmq_handler
from kmq.gateway.ports import Doors, DoorServers, grpc_server, listen
from kmq.logfmt import Logger

SUBSCRIBE = f"/{KMQ.service}/Subscribe"
Request = KMQ.request_of("Subscribe")
RECORDS = 4000  # of 1 KB, in two partitions


class Gateway:
    """The service on a port, as the gateway serves it. `gate` holds back what was read."""

    def __init__(self, settings, page, streams):
        log, self.strangers = Logger("test"), Strangers(page.rows["gateway"], Incidents(lambda *_, **__: None))
        self.core, self.settings = Core(settings, page, log), settings
        store = OffsetStore(settings, self.core.watermark, log)
        self.groups = Groups(settings, store, self.core.partitions, log)
        self.calls, self.streams = Calls(settings, self.strangers), Streams(streams)
        self.kmq = KmqV1(self.core, self.groups, self.calls, self.streams)
        self.gate, self.held = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self._read = self.core.fetching.read
        self.core.fetching.read = self._hold
        self._store = store
        self.heard, self.looks = set(), 0  # members that gave a sign of life; how often the clock was looked at
        self._beat, self._turn = self.groups.beat, self.groups._turn
        self.groups.beat, self.groups._turn = self._hear, self._look

    def _hear(self, group, member, **more):
        self._beat(group, member, **more)
        self.heard.add(member)

    def _look(self):
        self._turn()
        self.looks += 1

    async def until_heard(self, *members):
        await until_async(lambda: self.heard >= {*members}, f"signs of life of {members}")

    async def until_looked(self):
        before = self.looks
        await until_async(lambda: self.looks > before, "a look at the clock")

    async def _hold(self, *arguments):
        found = await self._read(*arguments)
        if not self.gate.is_set():
            self.held.set()
            await self.gate.wait()
        return found

    @asynccontextmanager
    async def serving(self):
        await self._store.load()
        doors = Doors(self.settings, self.strangers)
        server = grpc_server(self.settings, None, self.strangers, self.calls, [KMQ.service])
        incidents = Incidents(lambda *_, **__: None)
        server.add_generic_rpc_handlers((kmq_handler(self.kmq, self.calls, Requests(), incidents),))
        self.port = listen(DoorServers(server, None, None, None, None), self.calls, doors, self.settings, None)["grpc"]
        await server.start()
        beside = [asyncio.create_task(self.groups.run()), asyncio.create_task(self._sweep())]
        try:
            await until_async(lambda: self.groups.is_ready, "groups")
            yield self
        finally:
            doors.close()
            self.core.stop()
            self.kmq.stop()
            await server.stop(0)
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self.core.close()
            await self._close_connections()

    async def _close_connections(self):
        """A client closes its end some time after `close`, and this loop would not hear of it any more."""
        relays = self.calls.fronts[0]._relays
        for relay in [*relays.values()]:
            relay.force_close()
        await until_async(lambda: not relays, "the end of the connections")

    async def _sweep(self):
        while True:
            self.calls.sweep()
            await asyncio.sleep(0.02)

    def client(self):
        return Client(self.port)


class Client:
    """A connection of its own."""

    def __init__(self, port):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.channel.close()

    def fetch(self, metadata=(), **fields):
        invoke = self.channel.unary_unary(f"/{KMQ.service}/Fetch", None, KMQ.response_of("Fetch").FromString)
        request = KMQ.request_of("Fetch")(**fields).SerializeToString()
        return invoke(request, timeout=PATIENCE_S, metadata=metadata)

    def produce(self, **fields):
        invoke = self.channel.unary_unary(f"/{KMQ.service}/Produce")
        return invoke(KMQ.request_of("Produce")(**fields).SerializeToString(), timeout=PATIENCE_S)

    def subscribe(self):
        invoke = self.channel.stream_stream(SUBSCRIBE, None, KMQ.response_of("Subscribe").FromString)
        return Stream(invoke(timeout=PATIENCE_S))

    async def member(self, id, **more):
        """A member that was told its first assignment."""
        stream = self.subscribe()
        await stream.send("join", group="g", topics=["t"], member=id, **more)
        await stream.next("joined")
        stream.first = await stream.next("assigned")
        return stream


class Stream:
    def __init__(self, call):
        self.call, self.first = call, None

    async def send(self, kind, **fields):
        await self.call.write(Request(**{kind: fields}).SerializeToString())

    async def next(self, kind):
        """The next response of this kind."""
        while (response := await self.call.read()) is not grpc.aio.EOF:
            if response.WhichOneof("response") == kind:
                return getattr(response, kind)
        raise AssertionError(await self.status())

    async def status(self):
        """(status, code) of the end."""
        return (await self.call.code()).name, (await self.call.details()).partition(":")[0]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Topic t: two partitions, each with RECORDS / 2 records."""
    lines = [b"t.@%d|0||%d %s" % (n % 2, n, b"x" * 1000) for n in range(RECORDS)]
    return write_data(tmp_path_factory.mktemp("kmq") / "d", lines, {"t": 2})


@pytest.fixture
def run(stored, monkeypatch):
    """Runs a coroutine function that is given a gateway."""
    monkeypatch.setattr(membership, "_LOOK_S", 0.02)

    def go(work, streams=10, **settings):
        async def main():
            with up(stored, RECORDS, **FREE_PORTS | settings) as broker:
                broker.page.rows["router"].seq = RECORDS
                async with (
                    asyncio.timeout(PATIENCE_S),
                    Gateway(broker.settings, broker.page, streams).serving() as made,
                ):
                    await work(made)

        asyncio.run(main())

    return go


@pytest.fixture
def clock(monkeypatch):
    """The clock of the groups; `clock.ahead` seconds are added to it."""
    made = SimpleNamespace(ahead=0.0, time=time.time)
    made.monotonic = lambda: time.monotonic() + made.ahead
    monkeypatch.setattr(membership, "time", made)
    return made


# --- silent and slow members -----------------------------------------------------------------------------------------


def test_a_member_that_is_stopped_beyond_its_session_loses_its_partitions(run, clock):
    async def work(gateway):
        async with gateway.client() as one, gateway.client() as two:
            stopped, awake = (
                await one.member("stopped", session_ms=60_000),
                await two.member("awake", session_ms=300_000),
            )
            await stopped.next("revoke")
            await stopped.send("revoked")
            while len((await awake.next("assigned")).partitions) != 1:
                pass
            gateway.heard.clear()
            clock.ahead = 50.0
            await stopped.send("heartbeat")
            await awake.send("heartbeat")
            await gateway.until_heard("stopped", "awake")
            clock.ahead = 100.0  # ten seconds are for a busy machine
            await gateway.until_looked()
            await stopped.send("commit", offsets=[{"topic": "none"}])
            await stopped.next("error")  # it was a sign of life
            clock.ahead = 170.0
            assert await stopped.status() == ("FAILED_PRECONDITION", "session_timeout")
            assert len((await awake.next("assigned")).partitions) == 2

    run(work)


def test_a_member_that_does_not_read_is_cut_off_and_its_memory_is_free(run):
    async def work(gateway):
        async with gateway.client() as one, gateway.client() as two:
            slow = await one.member("slow")
            for _ in range(8):
                await slow.send("fetch", max_records=1000)
            assert (await slow.status())[0] == "UNAVAILABLE"
            await until_async(lambda: not len(gateway.streams), "the end of the stream")
            answer = await two.fetch(topic="t", max_records=3)
            assert [record.offset for record in answer.records] == [0, 1, 2]
            again = await two.member("slow")  # its session goes on
            await again.send("fetch", max_records=1)
            assert len((await again.next("batch")).records) == 1

    run(work, KMQ_LINE_DEADLINE="2s")


def test_a_stopped_member_ends_although_it_has_not_read_its_batches(run, clock):
    async def work(gateway):
        async with gateway.client() as one, gateway.client() as two:
            stopped = await one.member("stopped", session_ms=6000)
            for _ in range(8):
                await stopped.send("fetch", max_records=1000)
            (call,) = gateway.streams._open
            await until_async(lambda: call.since, "a response that is not read")
            clock.ahead = 7.0
            await until_async(lambda: gateway.groups.describe("g").state.value == "empty", "the end of its session")
            assert len((await two.member("other")).first.partitions) == 2
            assert (await stopped.status())[0] in ("UNAVAILABLE", "FAILED_PRECONDITION")
            await until_async(lambda: len(gateway.streams) == 1, "the end of its stream")

    run(work, KMQ_LINE_DEADLINE="2s")


def test_a_slow_reader_gives_way_when_others_need_its_memory(run, monkeypatch):
    monkeypatch.setattr(core, "ANSWER_BYTES", 0)  # so there is room for one read

    async def work(gateway):
        async with gateway.client() as one, gateway.client() as two:
            slow = await one.member("slow")
            for _ in range(8):
                await slow.send("fetch", max_records=1000)
            await slow.next("batch")
            for _ in range(5):
                answer = await two.fetch(topic="t", max_records=3)
                assert len(answer.records) == 3
            assert (await slow.status())[0] == "UNAVAILABLE"

    run(work)


def test_a_stream_without_a_join_ends_at_the_deadline_and_a_silent_member_does_not(run):
    async def work(gateway):
        async with gateway.client() as one, gateway.client() as two:
            silent = await one.member("silent")
            assert (await two.subscribe().status())[0] == "UNAVAILABLE"
            await silent.send("fetch", max_records=1)
            assert len((await silent.next("batch")).records) == 1

    run(work, KMQ_LINE_DEADLINE="2s")


def test_a_gateway_that_stops_says_so_to_members_and_to_fetches_that_wait(run):
    async def work(gateway):
        async with gateway.client() as one:
            member = await one.member("m")
            waiting = asyncio.ensure_future(one.fetch(topic="t", **{"from": {"place": 1}}, wait_ms=60_000))
            await until_async(lambda: len(gateway.streams) == 2, "the fetch")
            gateway.core.stop()
            gateway.kmq.stop()
            assert await member.status() == ("UNAVAILABLE", "stopping")
            assert not (await waiting).records

    run(work)


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_streams_and_fetches_that_wait_are_bounded_together(run):
    async def work(gateway):
        async with gateway.client() as one:
            member = await one.member("m")
            latest = {"topic": "t", "from": {"place": 1}, "wait_ms": 60_000}
            waiting = asyncio.ensure_future(one.fetch(**latest))
            await until_async(lambda: len(gateway.streams) == 2, "the fetch")
            assert await one.subscribe().status() == ("RESOURCE_EXHAUSTED", "too_many")
            with pytest.raises(grpc.aio.AioRpcError, match="too_many"):
                await one.fetch(**latest)
            assert len((await one.fetch(topic="t", max_records=1, wait_ms=60_000)).records) == 1
            waiting.cancel()
            await member.send("leave")
            assert (await member.status())[0] == "OK"
            await until_async(lambda: not len(gateway.streams), "room")

    run(work, streams=2)


def test_messages_over_the_limit_are_refused_while_others_are_being_stored(run, monkeypatch):
    monkeypatch.setattr(kmq_v1, "_HELD_BYTES", 2000)
    monkeypatch.setattr(producing, "ANSWER_S", 5.0)

    async def work(gateway):
        async with gateway.client() as one:
            none = KMQ.messages["ProduceRequest"].NONE
            assert await one.produce(topic="t", messages=[{"value": b"x" * 3000}], acks=none) == b""  # alone it may
            with pytest.raises(grpc.aio.AioRpcError) as refused:  # nobody stores the first: there is no broker
                await one.produce(topic="t", messages=[{"value": b"x"}])
            assert (refused.value.code(), refused.value.details()[:6]) == (grpc.StatusCode.UNAVAILABLE, "busy: ")

    run(work)


def framed(request):
    """A request as gRPC has it on the wire."""
    data = request.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def test_unfinished_requests_are_cut_off_and_whole_ones_never(run, monkeypatch):
    monkeypatch.setattr(calls, "_UNFINISHED_BYTES", MIB)
    large = {"offsets": [{"topic": "none", "metadata": "x" * 4000} for _ in range(15)]}

    def attack(port):
        with Http2("127.0.0.1", port) as peer:
            joins = [Request(join={"group": "a", "topics": ["t"], "member": f"a{n}"}) for n in range(3)]
            streams = [peer.call(SUBSCRIBE, request=framed(join)) for join in joins]
            rest = dict.fromkeys(streams, b"\0" + (900 * KIB).to_bytes(4, "big") + b"x" * 800 * KIB)
            tries = attempts("all is taken", every_s=0)
            with pytest.raises((ConnectionError, BrokenPipeError)):
                while any(rest.values()):
                    next(tries)
                    for stream in streams:
                        rest[stream] = peer.send(stream, rest[stream])
                    peer.take()
                while True:
                    peer.take()

    async def work(gateway):
        async with gateway.client() as one:
            honest = await one.member("honest")
            for _ in range(40):
                await honest.send("commit", **large)
                assert (await honest.next("error")).code == "unknown_partition"
            for _ in range(40):  # while the member says nothing
                with pytest.raises(grpc.aio.AioRpcError, match="unknown_topic"):
                    await one.fetch(topic="x" * 60_000)
            for number in range(200):  # what is no request counts only until the member says something
                await one.fetch([("x", f"{number}" * 2000)], topic="t", max_records=1)
                await honest.send("seek", topic="t", to={})
                await honest.next("sought")
            await asyncio.to_thread(attack, gateway.port)
            await honest.send("fetch", max_records=1)
            assert len((await honest.next("batch")).records) == 1

    run(work)


def test_a_refusal_that_names_something_long_is_cut_and_the_connection_goes_on(run):
    async def work(gateway):
        async with gateway.client() as one:
            member = await one.member("m")
            for topic in ("x" * 60_000, "€" * 20_000):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await one.fetch(topic=topic)
                assert refused.value.details().startswith("unknown_topic: ") and len(refused.value.details()) > 500
            await member.send("fetch", max_records=1)
            assert len((await member.next("batch")).records) == 1

    run(work)


# --- what was read and is not wanted any more ------------------------------------------------------------------------


def test_a_batch_that_was_read_before_a_seek_is_not_sent(run):
    async def work(gateway):
        async with gateway.client() as one:
            member = await one.member("m")
            gateway.gate.clear()
            await member.send("fetch", max_records=1, partitions=[{"topic": "t", "partitions": [1]}])
            await gateway.held.wait()
            await member.send("seek", topic="t", partition=1, to={"offset": 7})
            assert (await member.next("sought")).next_offset == 7
            gateway.gate.set()
            assert [record.offset for record in (await member.next("batch")).records] == [7]

    run(work)


def test_a_partition_may_be_given_up_before_the_assignment_of_that_rebalance_is_written(run):
    """The gateway opens what comes with it, which takes long with many partitions. It is nobody's fault."""

    async def work(gateway):
        async with gateway.client() as one, gateway.client() as two:
            first = await one.member("one")
            gate, run = asyncio.Event(), gateway.core.fetching.run

            async def held(work, *arguments):
                if work.__name__ == "_open":
                    await gate.wait()
                return await run(work, *arguments)

            gateway.core.fetching.run = held
            second = two.subscribe()
            await second.send("join", group="g", topics=["t"], member="two")
            await first.next("revoke")
            await first.send("revoked")
            await first.send("commit", offsets=[{"topic": "none"}])
            assert (await first.next("error")).code == "unknown_partition", "not the one before it"
            gate.set()
            while len((await second.next("assigned")).partitions) != 1:
                pass
            while len((await first.next("assigned")).partitions) != 1:
                pass

    run(work)


def test_a_batch_of_a_partition_that_is_revoked_while_it_is_read_is_not_sent(run):
    async def work(gateway):
        async with gateway.client() as one, gateway.client() as two:
            member = await one.member("a")
            gateway.gate.clear()
            await member.send("fetch", max_records=1, wait_ms=60_000)
            await gateway.held.wait()
            await two.member("b")
            (gone,) = (await member.next("revoke")).partitions
            gateway.gate.set()
            batch = await member.next("batch")
            assert {*gone.partitions, batch.partition} == {0, 1}

    run(work)


def test_a_fetch_that_waits_without_a_watch_of_its_directory_hears_of_a_seek(run):
    async def work(gateway):
        waking, waits = gateway.core.waking, []
        waking._most, moved = 0, waking._moved

        async def noted(seconds):
            waits.append(seconds)
            await moved(seconds)

        waking._moved = noted
        async with gateway.client() as one:
            member = await one.member("m")
            got = 0
            while got < RECORDS:
                await member.send("fetch", max_records=RECORDS, max_bytes=8 * MIB)
                got += len((await member.next("batch")).records)
            await member.send("fetch", max_records=10, wait_ms=60_000)
            await until_async(lambda: waits, "it waits")
            await member.send("seek", topic="t", partition=0, to={"offset": 5})
            assert (await member.next("batch")).records
            assert max(waits) <= 0.5  # or it would hear of the seek that late

    run(work)
