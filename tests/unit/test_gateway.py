"""The gateway's parts without a broker: what a feed shows, how far it trusts the router, what ready means, what is declared."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from aiohttp.test_utils import TestClient, TestServer
from fake_logger import FakeLogger
from google.protobuf import descriptor_pb2
from log_server import groups_of, up
from made_data import write_data
from made_up import stored
from waiting import until_async

from kmq import gateway
from kmq.broker import stats, topic_rates
from kmq.broker.door import advertised
from kmq.broker.overview import VerdictChanges
from kmq.broker.stats import ADMISSIONS, STATES, Incidents, StatsPage, Strangers
from kmq.config.intakes import parse_intakes
from kmq.config.settings import STAGES, load
from kmq.files import replace_file
from kmq.gateway import ports as listeners
from kmq.gateway.core import feed, metrics
from kmq.gateway.core.broker import Broker, RequestRefused
from kmq.gateway.core.cold import ColdReads
from kmq.gateway.core.connection import ClientConnection
from kmq.gateway.core.core import Core
from kmq.gateway.core.feed import Feed, Watermark
from kmq.gateway.grpc import podbus
from kmq.gateway.grpc.calls import Calls, Streams
from kmq.gateway.grpc.schema import status_of
from kmq.gateway.http import server as web
from kmq.gateway.ports import Doors
from kmq.gateway.server import Gateway
from kmq.log import passes, topics
from kmq.log.damage import DamageError
from kmq.log.identity import open_data
from kmq.message.routing import Topic
from kmq.wire import refusals
from kmq.wire.refusals import RETRYABLE

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 100.0


# --- the schema ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["podbus", "kmq"])
def test_the_compiled_schema_is_the_one_in_the_proto(tmp_path, name):
    directory = ROOT / "kmq" / "gateway"
    argv = [sys.executable, "-m", "grpc_tools.protoc", f"-I{directory}", f"--descriptor_set_out={tmp_path}/made"]
    subprocess.run([*argv, f"{name}.proto"], check=True, capture_output=True)
    parse = descriptor_pb2.FileDescriptorSet.FromString
    assert parse((directory / f"{name}.desc").read_bytes()) == parse((tmp_path / "made").read_bytes())


def test_whether_the_gateway_is_installed_is_known_without_loading_it():
    code = "import sys; from kmq import gateway; assert gateway.is_installed(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"grpc", "aiohttp", "prometheus_client", "asyncio"} & set(done.stdout.split())


def test_a_gateway_loads_nothing_that_only_tests_need():
    """What is measured in a checkout, bench and demo too, is then what is shipped."""
    code = (
        "import importlib, pkgutil, sys, kmq.gateway.server\n"
        "for each in pkgutil.walk_packages(kmq.gateway.__path__, 'kmq.gateway.'): importlib.import_module(each.name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows = [re.match(r"([\w-]+).*?(?:extra == '(\w+)')?$", row).groups() for row in metadata.requires("kmq")]
    for_tests = {name for name, extra in rows if extra == "dev"} - {name for name, extra in rows if extra != "dev"}
    assert {"hypothesis", "pytest"} <= for_tests
    of = {name: {each.lower() for each in found} for name, found in metadata.packages_distributions().items()}
    loaded = {name for name in done.stdout.split() if of.get(name, set()) & for_tests}
    assert "kio" in done.stdout.split()
    assert loaded <= {"grpc_tools"}  # an empty module, for which grpc itself looks


def test_without_one_of_its_packages_the_gateway_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc_health", None)
    monkeypatch.setattr(gateway, "find_spec", lambda name: sys.modules.get(name, name))
    assert not gateway.is_installed()


# --- feeds -----------------------------------------------------------------------------------------------------------


class Queue:
    """A topic on disk, as the router leaves it."""

    def __init__(self, data, partitions=1):
        self.data = data
        self.grow(partitions)

    def grow(self, partitions):
        self.topic = Topic("t", partitions, 1)
        for number, link in enumerate(self.topic.log_names()):
            os.makedirs(f"{self.data}/topics/t/{number}", exist_ok=True)
            with suppress(FileExistsError):
                os.symlink(f"topics/t/{number}/{0:020d}.log", f"{self.data}/{link}")
        if partitions > 1:
            Path(f"{self.data}/t.log").unlink(missing_ok=True)
        replace_file(f"{self.data}/topics/t/topic.toml", b"partitions = %d\nfrom_seq = 1\n" % partitions)

    def append(self, *seqs):
        for seq in seqs:
            (text,) = stored([b"t|0|%d|payload %d" % (seq, seq)], seq)
            self.write(text, seq % self.topic.partitions)

    def write(self, text, partition=0):
        with open(f"{self.data}/topics/t/{partition}/{0:020d}.log", "ab") as file:
            file.write(text)


def taken(source, upto):
    """The seqs that come until nothing more does."""
    seqs = []
    while source.has_more():
        source.fill(upto)
        if not source.ready:
            break
        while source.ready:
            seq, payload = source.ready.popleft()
            assert payload == b"payload %d" % seq
            seqs.append(seq)
    return seqs


@pytest.fixture(params=[1 << 16, 100], ids=["all in one chunk", "a record or two in a chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(feed, "CHUNK_BYTES", request.param)


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_feed_gives_all_records_in_order_of_seq(data, chunk, partitions):
    queue = Queue(data, partitions)
    seqs = [*range(1, 50), *range(60, 70, 3), *range(200, 250)]
    queue.append(*seqs)
    assert taken(Feed(data, "t", 0), 250) == seqs
    assert taken(Feed(data, "t", 50), 250) == [seq for seq in seqs if seq >= 50]
    assert taken(Feed(data, "t", 251), 250) == []


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_feed_shows_nothing_that_the_router_has_not_passed(data, chunk, partitions):
    queue = Queue(data, partitions)
    queue.append(*range(1, 20))
    source = Feed(data, "t", 1)
    assert taken(source, 0) == []
    assert taken(source, 7) == [*range(1, 8)]
    assert taken(source, 19) == [*range(8, 20)]


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_feed_goes_on_when_records_come_and_looks_at_nothing_before(data, chunk, partitions):
    source = Feed(data, "t", 0)
    source.fill(9)
    assert not source.ready and source.has_more()  # no topic yet
    queue = Queue(data, partitions)
    queue.append(1, 2, 3)
    assert taken(source, 9) == [1, 2, 3]
    assert not source.has_more()
    queue.append(7)
    assert source.has_more()
    assert taken(source, 9) == [7]


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_feed_that_begins_beyond_the_end_passes_over_what_comes_before_its_seq(data, chunk, partitions):
    queue = Queue(data, partitions)
    queue.append(1, 2)
    source = Feed(data, "t", 10)
    assert taken(source, 2) == []
    queue.append(5, 6, 7)
    assert taken(source, 7) == []
    queue.append(9, 10, 11)
    assert taken(source, 11) == [10, 11]


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_feed_reads_the_partitions_that_its_topic_gets(data, partitions):
    queue = Queue(data, partitions)
    queue.append(1, 2, 3)
    source = Feed(data, "t", 0)
    assert taken(source, 9) == [1, 2, 3] and not source.has_more()
    queue.grow(4)
    assert source.has_more() and taken(source, 9) == []
    queue.append(7, 10)
    assert taken(source, 9) == [7] and taken(source, 10) == [10]


def test_a_feed_goes_on_in_the_next_segment(data):
    queue = Queue(data)
    queue.append(1, 2)
    source = Feed(data, "t", 0)
    assert taken(source, 9) == [1, 2] and not source.has_more()
    Path(f"{data}/topics/t/0/{2:020d}.log").write_bytes(b"".join(stored([b"t|0|3|payload 3"], 3)))
    os.unlink(f"{data}/t.log")
    os.symlink(f"topics/t/0/{2:020d}.log", f"{data}/t.log")
    assert source.has_more()
    assert taken(source, 9) == [3]


def test_a_feed_passes_over_what_compaction_has_emptied(data, chunk):
    queue = Queue(data, 2)
    queue.append(1, 2)
    queue.write(b"\n" * 300, partition=0)
    queue.append(3, 4, 5, 6)
    assert taken(Feed(data, "t", 0), 9) == [1, 2, 3, 4, 5, 6]


def test_a_feed_serves_what_is_good_and_raises_at_the_damage(data):
    queue = Queue(data)
    queue.append(1, 2)
    queue.write(b"3|no stored line\n")
    source = Feed(data, "t", 0)
    source.fill(9)
    assert [seq for seq, _ in source.ready] == [1, 2] and source.next_seq == 3
    with pytest.raises(DamageError, match=r"topics/t/0/0+\.log"):
        source.fill(9)


def test_a_feed_decodes_what_is_marked_as_base64_and_nothing_else(data):
    queue = Queue(data)
    ids = [b"1;enc=b64", b"2", b"3;p=x;enc=b64", b"4;enc=b641"]
    for seq, line in enumerate(stored([b"t|0|%b|AAEC" % id for id in ids], 1), 1):
        queue.write(line)
        assert line.startswith(b"%d|" % seq)
    source = Feed(data, "t", 0)
    source.fill(9)
    assert [payload for _, payload in source.ready] == [b"\0\1\2", b"AAEC", b"\0\1\2", b"AAEC"]


# --- the watermark ---------------------------------------------------------------------------------------------------


def rows(**seqs):
    return SimpleNamespace(rows={name: SimpleNamespace(seq=seq) for name, seq in seqs.items()})


def within(seconds, coroutine):
    async def run():
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(run())


def test_whoever_waits_for_the_router_goes_on_when_it_has_passed():
    page = rows(router=3, durability=9)
    watermark, passed = Watermark(page), []

    async def wait(seq):
        await watermark.passed(seq)
        passed.append((seq, page.rows["router"].seq))

    async def run():
        waiting = [asyncio.create_task(wait(seq)) for seq in (3, 4, 5, 9)]
        for seq in (4, 9):
            while sum(task.done() for task in waiting) < {4: 1, 9: 2}[seq]:
                await asyncio.sleep(0)
            page.rows["router"].seq = seq
        await asyncio.gather(*waiting)

    within(PATIENCE_S, run())
    assert passed == [(3, 3), (4, 4), (5, 9), (9, 9)]


def test_a_router_that_starts_again_has_passed_nothing_and_wakes_when_it_is_back():
    page = rows(router=5, durability=9)

    async def run():
        watermark = Watermark(page)
        waiting = asyncio.create_task(watermark.passed(6))
        await asyncio.sleep(0)
        page.rows["router"].seq = 0
        watermark.poll()
        assert not waiting.done()
        page.rows["router"].seq = 6
        await waiting

    within(PATIENCE_S, run())


def test_what_was_durable_stays_durable_while_durability_starts_again():
    page = rows(router=0, durability=7)
    watermark = Watermark(page)
    assert watermark.durable == 7
    page.rows["durability"].seq = 0
    assert watermark.durable == 7
    watermark.expect(12)
    assert watermark.durable == 12


def test_the_watermark_is_looked_at_less_and_less_often_until_something_is_expected():
    async def run():
        watermark = Watermark(rows(router=0, durability=0))
        waiting = asyncio.create_task(watermark.passed(1))
        await asyncio.sleep(0)
        assert watermark.pause_s == feed.FAST_S
        await until_async(lambda: watermark.pause_s >= feed.SLOW_S)
        watermark.expect(1)
        assert watermark.pause_s == feed.FAST_S
        watermark.stop()
        with pytest.raises(RequestRefused, match="stopping"):
            await waiting

    within(PATIENCE_S, run())


def test_nobody_looks_while_nobody_waits():
    async def run():
        watermark = Watermark(rows(router=0, durability=0))
        waiting = asyncio.create_task(watermark.passed(1))
        await asyncio.sleep(0)
        assert watermark.is_polling
        waiting.cancel()
        await until_async(lambda: not watermark.is_polling)

    within(PATIENCE_S, run())


# --- limits ----------------------------------------------------------------------------------------------------------


def bus_of(data, streams):
    settings = load({"KMQ_DATA": data}, "/nonexistent.toml")
    return podbus.PodBus(settings, Watermark(rows(router=0, durability=0)), FakeLogger(), streams)


def test_streams_over_the_limit_are_refused_until_one_ends(data):
    async def run():
        open_ones = Streams(2)
        bus = bus_of(data, open_ones)
        request = SimpleNamespace(offset=1, follow=True)
        streams = [asyncio.create_task(anext(bus.consume_stream(request, None))) for _ in range(2)]
        while len(open_ones) < 2:
            await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="2 streams are open already") as refused:
            await anext(bus.consume_stream(request, None))
        assert refused.value.code == "too_many"
        bus.stop()
        ended = await asyncio.gather(*streams, return_exceptions=True)
        assert [answer.code for answer in ended] == ["stopping", "stopping"]
        assert len(open_ones) == 0

    within(PATIENCE_S, run())


def test_records_over_the_limit_are_refused_while_others_wait_for_room(data, monkeypatch):
    monkeypatch.setattr(podbus, "_WAITING_BYTES", 100)

    async def run():
        bus = bus_of(data, Streams(2))
        submitting, room = asyncio.Event(), asyncio.Event()

        async def submit(producer, topic, record, id):
            submitting.set()
            await room.wait()
            reply = asyncio.get_running_loop().create_future()
            reply.set_result(len(record))
            return reply

        monkeypatch.setattr(podbus.AsyncProducer, "submit", submit)
        request = SimpleNamespace(message_id="1", record=b"x" * 101)
        waiting = asyncio.create_task(bus.produce(request, None))
        await submitting.wait()
        with pytest.raises(RequestRefused) as refused:
            await bus.produce(request, None)
        assert refused.value.code == "busy"
        room.set()
        assert [(await waiting).offset, (await bus.produce(request, None)).offset] == [101, 101]

    within(PATIENCE_S, run())


# --- answers, listeners ----------------------------------------------------------------------------------------------


def test_what_may_be_sent_again_is_unavailable_over_grpc_and_503_or_507_over_http():
    assert {status_of(code) for code in RETRYABLE} == {grpc.StatusCode.UNAVAILABLE}
    full = {code for code in RETRYABLE if refusals.by_code(code).http == 507}
    assert full == {"disk_full", "quota"} and {refusals.by_code(code).http for code in RETRYABLE - full} == {503}


def test_a_code_that_nobody_knows_is_an_internal_error():
    assert (
        status_of("never_heard") == grpc.StatusCode.INTERNAL and RequestRefused("never_heard", "").refusal.http == 500
    )
    assert all(isinstance(status_of(row.code), grpc.StatusCode) for row in refusals.table())
    assert all(400 <= row.http < 600 for row in refusals.table())


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_port_that_is_taken_is_named_with_its_setting(tmp_path, kind):
    from aiohttp import web as http

    strangers = Strangers(SimpleNamespace(), Incidents(print))

    async def listen(settings):
        doors, calls = Doors(settings, strangers), Calls(settings, strangers)
        try:
            server = listeners.grpc_server(settings, None, strangers, calls, ["x"])
            runner = http.AppRunner(http.Application())
            await runner.setup()
            servers = listeners.DoorServers(server, runner.server, None, None, None)
            return listeners.listen(servers, calls, doors, settings, None), [*doors.closed]
        finally:
            doors.close()

    names, setting = ("grpc", "http", "egress", "status"), f"KMQ_{kind.upper()}_PORT"
    environ = {"KMQ_PIPES": str(tmp_path)} | {f"KMQ_{name.upper()}_PORT": "0" for name in names}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = load(environ | {setting: str(port)}, "/nonexistent.toml")
        opened, closed = asyncio.run(listen(settings))
        assert closed == [kind] and {*opened} == {*names} - {kind}, setting
    opened, _ = asyncio.run(listen(load(environ, "/nonexistent.toml")))
    assert opened == {name: int((tmp_path / f"{name}.port").read_text()) for name in names}


def test_a_connection_whose_service_breaks_is_ended(caplog):
    async def serve(connection):
        raise LookupError("a defect")

    async def ask():
        server = await asyncio.get_running_loop().create_server(lambda: ClientConnection(serve, set()), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(ask())
    assert "a defect" in caplog.text


# --- health ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def broker(data, tmp_path):
    """Four stages that are ready, as the stats page has them."""
    instance = f"unit-gateway-{os.getpid()}"
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "raw")
    settings = load({"KMQ_INSTANCE": instance, "KMQ_DATA": data, "KMQ_PIPES": f"{tmp_path}/pipes"}, "/nonexistent.toml")
    page = StatsPage(instance, open_data(data), data)
    for number, name in enumerate(STAGES, 1):
        page.rows[name].pid, page.rows[name].state = number, STATES.index("ready")
        page.rows[name].heartbeat = time.monotonic_ns() + 10**12  # ahead: however long a test takes, it lives
    yield Broker(settings, page)
    os.unlink(page.path)


def test_a_broker_whose_stages_are_ready_is_ready(broker):
    verdict = broker.verdict()
    assert (verdict.ready, verdict.lifeless, verdict.first) == (True, None, None)


@pytest.mark.parametrize("name", STAGES)
def test_a_silent_stage_is_neither_alive_nor_ready(broker, name):
    broker.page.rows[name].heartbeat = time.monotonic_ns() - 3_000_000_000
    verdict = broker.verdict()
    for reason in (verdict.lifeless, verdict.first):
        assert re.fullmatch(rf"dead: {name} has given no sign of life for 3\.\d s", str(reason))
    broker.page.rows[name].wipe()
    assert str(broker.verdict().lifeless) == f"down: {name} has not been started"


@pytest.mark.parametrize("state", sorted(set(STATES) - {"ready", "following", "stopped"}))
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_is_alive_but_not_ready_is_named(broker, name, state):
    broker.page.rows[name].state = STATES.index(state)
    verdict = broker.verdict()
    assert verdict.lifeless is None
    assert verdict.first.code == {"": "starting", "unled": "no_leader"}.get(state, state)
    assert name in verdict.first.processes and {*verdict.first.processes} <= {name, "replica"}


def test_a_change_of_readiness_is_one_log_line_however_it_flaps(broker):
    said, ingress, now = [], broker.page.rows["ingress"], 0.0
    log = SimpleNamespace(info=lambda event: said.append(event), warn=lambda event, **f: said.append(f["reason"]))
    changes = VerdictChanges(log)

    def follow(seconds, *admissions):
        """Look every quarter of a second; ingress says one thing after the other, again and again."""
        nonlocal now
        for number in range(int(seconds * 4)):
            ingress.admission = ADMISSIONS.index(admissions[number % len(admissions)])
            now += 0.25
            changes.follow(broker.verdict(), now)
        return [said.pop(0) for _ in range(len(said))]

    assert follow(5, "") == [], "a broker that starts"
    assert follow(0.25, "quota") == ["quota"], "at once"
    assert follow(10, "", "quota") == [], "it is no more than that"
    assert follow(5, "disk_full") == ["disk_full"]
    assert follow(5, "") == ["ready_again"]


def get(broker, path):
    async def run():
        core = Core(broker.settings, broker.page, FakeLogger())
        async with TestClient(TestServer(web.application(core, groups_of(core), metrics.Requests()))) as client:
            response = await client.get(path)
            return response.status, await response.text(), response.headers["Content-Type"]

    return within(PATIENCE_S, run())


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_reports_the_last_durable_write_and_the_reason(broker, path):
    row = broker.page.rows["durability"]
    row.seq, row.synced = 4711, 1_700_000_000_123_000_000
    status, text, _ = get(broker, path)
    assert status == 200
    assert '"last_durable_seq": 4711, "last_durable_write": "2023-11-14T22:13:20.123Z"' in text
    row.heartbeat = 1
    status, text, _ = get(broker, path)
    assert (status, '"ok": false, "reason": "dead: durability has given no sign of life' in text) == (503, True)


def test_the_page_of_the_shard_says_what_this_broker_knows_now_and_what_consul_said(broker):
    status, text, _ = get(broker, "/v1/cluster")
    assert (status, json.loads(text)["code"]) == (404, "not_found")
    ours = type(broker.settings)(vars(broker.settings) | {"shard": "s", "broker": "b"})
    shard, row = Broker(ours, broker.page), broker.page.rows["replica"]
    found = shard.shard()
    assert (found["role"], found["leader"], found["problem"], found["as_of"]) == ("waiting", None, "replica_down", None)
    row.begin(0)
    row.role, row.epoch, row.version, row.seq, row.last = stats.ROLES.index("following"), 8, 31, 70, 77
    known = {
        "leader": "a",
        "isr": ["a"],
        "problem": "no_leader",
        "as_of": 1.5,
        "brokers": {"a": {"role": "leading"}, "c": None},
    }
    path = f"{broker.settings.pipes}/cluster.json"
    os.mkdir(path)  # a disk that cannot be read, as far as the reader sees
    assert shard.shard()["leader"] is None and advertised(broker.settings.pipes, "lines") == []
    os.rmdir(path)
    for text in ("", "[]", '{"brokers": '):  # it is not synced: a power cut may leave this
        with open(path, "w") as file:
            file.write(text)
        assert shard.shard()["leader"] is None and advertised(broker.settings.pipes, "lines") == []
    with open(path, "w") as file:
        json.dump(known, file)
    found = shard.shard()
    assert found["brokers"] == {"a": {"role": "leader"}, "c": None} and (found["role"], found["as_of"]) == (
        "follower",
        1.5,
    )
    assert (found["epoch"], found["version"], found["hw"], found["end"]) == (8, 31, 70, 77)
    assert (found["broker"], found["problem"]) == ("b", "no_leader")
    row.problem = stats.PROBLEMS.index("register_went_back")
    assert shard.shard()["problem"] == "register_went_back"
    row.end(65)
    assert shard.shard()["problem"] == "replica_stopped"


def test_the_list_of_pages_leads_to_every_page(broker):
    status, text, kind = get(broker, "/pages")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    links = re.findall(r'href="([^"]+)"', text)
    assert links == list(web.PAGES)
    assert [get(broker, link)[0] for link in links] == [200] * len(links)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_every_metric_has_a_name_and_a_description_of_its_own():
    names, helps = [row[0] for row in metrics.DECLARED], [row[1] for row in metrics.DECLARED]
    assert len(set(names)) == len(names) and len(set(helps)) == len(helps)
    assert all(re.fullmatch(r"kmq_[a-z_]+", name) for name in names)
    assert all(text.endswith(".") for text in helps)


def test_a_scrape_shows_every_declared_metric_with_its_description(broker):
    broker.page.rows["durability"].synced = time.time_ns()
    ingress = broker.page.rows["ingress"]
    ingress.certificate_until = ingress.disk_size = ingress.inodes_total = ingress.quota_limit = 1
    broker.page.rows["agent"].pid = broker.page.rows["replica"].pid = broker.page.rows["replica"].seq = 1
    broker.page.rows["tier"].pid = 1
    broker.settings.tier = f"file://{broker.settings.data}/store"
    broker.page.publish_followers([("c", {"ack_delay_us": 1})])
    broker.settings.intakes = parse_intakes("5140=app")
    data = broker.settings.data
    for directory in ("t/0", ".compacted"):
        os.makedirs(f"{data}/topics/{directory}")
    topics.make(data, "t", topics.Declaration(1, 1, {"cleanup": "compact"}))
    passes.write(data, {("t", 0): passes.Pass(1, 0, 0, None, 1)})

    async def lags():
        return [("g", "t", 0, 3, 1.5, 2)]

    cold = ColdReads(broker.settings.data, lambda _: None, broker.settings.tier, 1 << 30)
    cold._open()
    requests = metrics.Requests(lags, cold)
    requests.count("Produce", "OK", 0.003)
    requests.count_egress("CONSUME", "OK")
    requests.count_kafka("produce", "OK")
    requests.count_batch("cache")
    requests.count_http("consume", "OK", 0.2)
    within(PATIENCE_S, requests.look())
    text = metrics.page(broker, requests).decode()
    for name, help, _ in metrics.DECLARED:
        assert f"# HELP {name} {help}\n" in text
        assert re.search(rf"(?m)^{name}(_count|_bucket)?[ {{]", text), f"{name} has no value"
    assert 'kmq_grpc_requests_total{code="OK",method="Produce"} 1.0' in text
    assert 'kmq_grpc_seconds_bucket{le="0.005",method="Produce"} 1.0' in text


def test_a_scrape_tells_what_the_stats_page_says(broker):
    numbers: dict[str, int] = {}
    for name in STAGES:
        row = broker.page.rows[name]
        for field in row.fields.keys() - {"pid", "state", "heartbeat"}:
            setattr(row, field, numbers.setdefault(field, 1000 + 10 * len(numbers)))
    agent = broker.page.rows["agent"]
    agent.pid, agent.epoch, agent.newest = 1, 2029, 2029 + 3000
    gateway = broker.page.rows["gateway"]
    gateway.groups, gateway.groups_stalled = 2001, 2002
    text = metrics.page(broker, metrics.Requests()).decode()
    assert "kmq_cluster_epoch 2029.0" in text and "kmq_cluster_lag 3000.0" in text
    shown = {field for field, number in numbers.items() if f" {number:.1f}" in text}
    others = {"clock_offset", "clock_suspect", "clock_trust", "admission", "certificate_from"}
    processes = {"supervisor", "started", "starts", "port", "synced", "exit_code"}
    shown |= {"disk_free"}  # the gateway looks by itself
    judged = {"damage_at", "oom_at", "oom_seen", "unclean", "last_record", "tokens_missing"}
    judged |= {"restart_streak", "waits_since", "waited_at", "full_since", "slow_syncs", "slow_sync_at", "clock_behind"}
    assert numbers.keys() - shown == processes | others | judged
    assert "kmq_groups 2001.0" in text and "kmq_groups_stalled 2002.0" in text
    starts = broker.page.rows["router"].starts
    assert f'kmq_restarts_total{{stage="router"}} {starts - 1:.1f}' in text
    assert 'kmq_clock_trusted{stage="router"} 0.0' in text


def test_a_scrape_tells_of_the_replica_and_without_a_shard_of_none(broker):
    assert not re.search(r"(?m)^kmq_replica_", metrics.page(broker, metrics.Requests()).decode())
    row = broker.page.rows["replica"]
    row.pid, row.role, row.epoch, row.version, row.isr = 1, stats.ROLES.index("following"), 8, 31, 2
    row.last, row.elections, row.cut_records = 1_000_900, 3, 12
    text = metrics.page(broker, metrics.Requests()).decode()
    assert 'kmq_replica_role{role="following"} 1.0' in text and 'kmq_replica_role{role="leading"} 0.0' in text
    for name, value in {"epoch": 8, "version": 31, "isr": 2, "elections_total": 3, "cut_records_total": 12}.items():
        assert f"\nkmq_replica_{name} {value:.1f}\n" in text
    assert "\nkmq_replica_hw_lag" not in text and "\nkmq_replica_behind_seconds 0.0\n" in text
    row.seq, row.behind_since = 1_000_000, time.monotonic_ns() - 7_000_000_000
    text = metrics.page(broker, metrics.Requests()).decode()
    assert "\nkmq_replica_hw_lag 900.0\n" in text and re.search(r"\nkmq_replica_behind_seconds 7\.\d", text)


def test_of_very_many_topics_only_some_are_shown_one_by_one(broker, monkeypatch):
    monkeypatch.setattr(metrics, "_rates", lambda data, most: rates)
    rates = topic_rates.BusiestTopics(broker.settings.data, 3)
    for number in range(9):
        os.makedirs(f"{broker.settings.data}/topics/t{number}/0")
    text = metrics.page(broker, metrics.Requests()).decode()
    assert re.findall(r'kmq_end_offset{partition="0",topic="(t\d)"} 0.0', text) == ["t0", "t1", "t2"]
    assert re.findall(r'kmq_topic_messages_total{topic="(\w+)"} 0.0', text) == ["t0", "t1", "t2", "other"]
    assert "\nkmq_topics 9.0\n" in text


def test_a_gateway_whose_groups_are_kept_by_nobody_ends(tmp_path, monkeypatch):
    """The supervisor starts it again; as it was, members would wait for ever."""

    async def fail(self):
        raise LookupError("a fault in the groups")

    async def serve(broker):
        async with asyncio.timeout(30):
            await Gateway(broker.settings, broker.page, FakeLogger()).run()

    async def nothing_is_open(self):
        self.may_serve_groups.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("kmq.gateway.kafka.transactions.Transactions.run", nothing_is_open)
    monkeypatch.setattr("kmq.gateway.groups.membership.Groups.run", fail)
    ports = dict.fromkeys(
        ("KMQ_GRPC_PORT", "KMQ_HTTP_PORT", "KMQ_METRICS_PORT", "KMQ_EGRESS_PORT", "KMQ_STATUS_PORT", "KMQ_KAFKA_PORT"),
        "0",
    )
    data = write_data(tmp_path / "d", [b"t|||1"])
    with up(data, 1, KMQ_PIPES=str(tmp_path), **ports) as broker, pytest.raises(LookupError, match="in the groups"):
        asyncio.run(serve(broker))
