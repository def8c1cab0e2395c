"""Remote against gateways that break, stall, lie or are none: what it makes of it is the truth, or an error that says where."""

import json
import pickle
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from log_server import up
from made_data import FIRST_TS, append, write_data
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType
from waiting import PATIENCE_S, until

import kmq
from kmq.access import tokens
from kmq.errors import ConfigError, CorruptError, KmqError, RetryError
from kmq.log.damage import DamageError
from kmq.log.reader import WAL
from kmq.spark.connections import Access, ShardDoors
from kmq.spark.pipelines.archive import LetterWriter
from kmq.spark.sessions import check_master
from kmq.spark.sink.targets import Destination, WriteOptions
from kmq.spark.source import brokers, ends, planner
from kmq.spark.source.broker import Layout
from kmq.spark.source.brokers import Directory, open_broker, recognised
from kmq.spark.source.brokers import Remote as PatientRemote
from kmq.spark.source.options import ReadOptions
from kmq.spark.source.planner import QueryLogs
from kmq.spark.source.stream_reader import StreamReader
from kmq.spark.tables import TableSpec

LINES = [b"%d|1700000000.%06d|t|||%d\n" % (n + 1, n, n) for n in range(20)]


def Remote(name, **access):
    """One that does not give up because this machine is busy."""
    return PatientRemote(name, Access(**{"patience_s": PATIENCE_S} | access))


class Gateway:
    """Answers one connection after another with the next of its texts, and remembers what was asked."""

    def __init__(self, *answers):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.name = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked = []
        self._thread = threading.Thread(target=self._serve, args=(answers,))
        self._thread.start()

    def _serve(self, answers):
        for answer in answers:
            connection, _ = self._socket.accept()
            with connection:
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(4096)
                self.asked.append(request.split()[1].decode())
                connection.sendall(answer)
        self._socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "not all answers were asked for"


def answer(body, status=200, length=None, **headers):
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"KMQ-{name}-Offset: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def said(status, code, **fields):
    return answer(json.dumps({"code": code, "error": f"the {code} of it", **fields}).encode(), status)


def records(first, end, cut=None):
    """A response with the records first…end-1, broken off behind `cut` bytes."""
    body = b"".join(LINES[first:end])
    return answer(body[:cut], length=len(body), First=first, Next=end)


@pytest.fixture(autouse=True)
def quick_again(monkeypatch):
    monkeypatch.setattr(brokers, "_PAUSES_S", (0.001, 0.01))


# --- reading on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, len(LINES[0]) - 1, len(LINES[0]), len(LINES[0]) + 3, 200, 400])
def test_a_response_that_breaks_off_is_asked_for_again_behind_its_last_whole_line(cut):
    whole = sum(len(b"".join(LINES[:n])) <= cut for n in range(1, 21))
    with Gateway(records(0, 20, cut), records(whole, 20)) as gateway:
        got = list(Remote(gateway.name).read("t", 0, 0, 20))
    assert b"".join(lines for _, lines in got) == b"".join(LINES)
    assert [first for first, _ in got] == [0, whole] if whole else [0]
    assert [target.split("?")[1] for target in gateway.asked] == ["start=0&end=20", f"start={whole}&end=20"]


def test_a_response_that_ends_before_what_was_asked_for_is_followed_by_the_next(monkeypatch):
    monkeypatch.setattr(brokers, "BLOCK_BYTES", 50)
    with Gateway(records(0, 7), records(7, 15), records(15, 15)) as gateway:
        got = list(Remote(gateway.name).read("t", 0, 0, 20))
    assert b"".join(lines for _, lines in got) == b"".join(LINES[:15])
    assert all(lines.endswith(b"\n") and lines == b"".join(LINES[first:])[: len(lines)] for first, lines in got)


def test_what_retention_took_shows_in_the_offset():
    with Gateway(records(5, 8)) as gateway:
        assert list(Remote(gateway.name).read("t", 0, 0, 8)) == [(5, b"".join(LINES[5:8]))]


def test_of_the_wal_the_seqs_say_where_to_go_on():
    gap = answer(LINES[0] + LINES[4] + LINES[9], length=1000, First=1, Next=15)
    with Gateway(gap, answer(LINES[12], First=13, Next=15)) as gateway:
        got = list(Remote(gateway.name).read(WAL, 0, 1, 15))
    assert got == [(1, LINES[0] + LINES[4] + LINES[9]), (13, LINES[12])]
    assert gateway.asked[1].endswith("start=11&end=15")


def test_a_gateway_that_says_not_now_is_asked_again():
    with Gateway(said(503, "not_ready"), said(429, "too_many"), records(0, 20)) as gateway:
        assert [lines for _, lines in Remote(gateway.name).read("t", 0, 0, 20)] == [b"".join(LINES)]
    with Gateway(said(503, "stopping"), b"", answer(b'{"data_id": "me"}')) as gateway:
        assert Remote(gateway.name).identity() == "me"


@pytest.mark.parametrize("body", [b"<html>", b'{"code":4,"message":"no healthy upstream"}', b'{"error":"upstream"}'])
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_proxy_that_does_not_reach_the_gateway_is_asked_again(status, body):
    page = answer(body, status)
    with Gateway(page, page, answer(b'{"data_id": "me"}')) as gateway:
        assert Remote(gateway.name, patience_s=PATIENCE_S).identity() == "me"


@pytest.mark.parametrize("after", ["1", "date"])
def test_a_proxy_is_asked_again_when_it_says(after):
    begin = time.time()
    after = formatdate(int(begin) + 3, usegmt=True) if after == "date" else after
    page = answer(b"<html>", 429).replace(b"\r\n", f"\r\nRetry-After: {after}\r\n".encode(), 1)
    with Gateway(page, answer(b'{"data_id": "me"}')) as gateway:
        assert Remote(gateway.name, patience_s=PATIENCE_S).identity() == "me"
    assert time.time() >= begin + 1


def test_a_proxy_that_says_a_long_time_is_waited_for_within_the_patience(monkeypatch):
    pauses, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds)))
    page = answer(b"<html>", 429).replace(b"\r\n", b"\r\nRetry-After: 3600\r\n", 1)
    with Gateway(page) as gateway, pytest.raises(RetryError, match="nothing else for"):
        Remote(gateway.name, patience_s=1).identity()
    assert max(pauses) > 0.8
    with Gateway(page) as a, Gateway(answer(b'{"data_id": "me"}')) as b:  # each address has its turn before it
        assert PatientRemote(f"{a.name},{b.name}", Access(patience_s=3600)).identity() == "me"


def test_a_date_that_no_clock_has_is_no_date():
    page = answer(b"<html>", 429)
    page = page.replace(b"\r\n", b"\r\nRetry-After: Mon, 99999999999999 Jan 2024 00:00:00 GMT\r\n", 1)
    with Gateway(page, answer(b'{"data_id": "me"}')) as gateway:
        assert Remote(gateway.name, patience_s=PATIENCE_S).identity() == "me"


def test_a_proxy_says_when_with_json_of_the_form_of_a_gateway():
    page = answer(b'{"code":8,"message":"x"}', 429).replace(b"\r\n", b"\r\nRetry-After: 1\r\n", 1)
    begin = time.monotonic()
    with Gateway(page, answer(b'{"data_id": "me"}')) as gateway:
        assert Remote(gateway.name, patience_s=PATIENCE_S).identity() == "me"
    assert time.monotonic() >= begin + 1


def test_more_or_fewer_records_than_announced_are_an_error():
    body = b"".join(LINES[:5])
    for end in (4, 6):
        with (
            Gateway(answer(body, First=0, Next=end)) as gateway,
            pytest.raises(CorruptError, match=f"5 records came of {end}"),
        ):
            list(Remote(gateway.name).read("t", 0, 0, 20))


# --- addresses of one shard -------------------------------------------------------------------------------------------


def broker_page(identity, *doors):
    """What a gateway says of itself; with `doors`, of its shard too."""
    shard = {"shard": "s", "doors": [*doors]} if doors else {}
    return answer(json.dumps({"data_id": identity} | shard).encode())


@pytest.fixture
def silent():
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_the_addresses_of_a_shard_are_one_broker_also_one_that_is_silent(silent):
    with (
        Gateway(broker_page("l", silent, "b:8443")) as a,
        Gateway(broker_page("x")) as x,
        Gateway(broker_page("l", "b:8443")) as c,
    ):
        assert recognised([silent, x.name, a.name, c.name]) == [f"{silent},{a.name},{c.name}", x.name]


def test_one_address_is_not_asked_who_it_is(silent):
    assert recognised([silent]) == [silent]


def test_an_address_that_no_shard_names_is_waited_for(silent):
    """Its broker may be another one, whose records would be missing."""
    with Gateway(broker_page("l", "a:8082")) as a, pytest.raises(RetryError, match=f"broker {silent}: .*kmq.patience"):
        recognised([silent, a.name], Access(patience_s=0.2))
    with Gateway(broker_page("l", "a:8082")) as a:
        assert recognised([silent, a.name], waits=False) == [silent, a.name]
    with Gateway(said(503, "no_leader"), broker_page("l", "x:1")) as a, Gateway(broker_page("l", "x:1")) as b:
        assert recognised([a.name, b.name]) == [f"{a.name},{b.name}"]


def test_shards_of_copied_records_are_two_brokers():
    """Of a copied directory each copy may have become a shard: one lineage, and other brokers."""
    with (
        Gateway(broker_page("l", "a:1", "b:1")) as a,
        Gateway(broker_page("l", "c:1")) as c,
        Gateway(broker_page("l", "b:1")) as b,
    ):
        assert recognised([a.name, c.name, b.name]) == [f"{a.name},{b.name}", c.name]


def test_copies_of_a_directory_that_is_no_shards_stay_two_brokers_and_are_refused():
    logs = answer(b'{"data_id": "l", "logs": []}')
    with Gateway(broker_page("l"), logs) as a, Gateway(broker_page("l"), logs) as b:
        options = ReadOptions({"kmq.bootstrap.servers": f"{a.name},{b.name}", "subscribe": "t"})
        with pytest.raises(ConfigError, match=f"{a.name} and {b.name} are the same data directory, or copies of one"):
            QueryLogs(options).survey()


@pytest.mark.parametrize(
    ("spelt", "is_it"),
    [
        (("kmq-0.kmq", 8082), True),
        (("KMQ-0.kmq.ns.svc.cluster.local", 8082), True),
        (("kmq-0.kmq.ns", 8083), False),
        (("kmq-0.k", 8082), False),
        (("kmq-1.kmq.ns", 8082), False),
        (("[::1]", 8443), True),
    ],
)
def test_a_door_may_be_spelt_without_its_domain(spelt, is_it):
    doors = ShardDoors()
    assert doors.add("l", ["kmq-0.kmq.ns:8082", "[::1]:8443", "no address"]) == "l"
    assert doors.shard_at(*spelt) == "l" * is_it


class Shards:
    """Brokers of shards. One that is not up ends each connection without an answer."""

    def __init__(self, brokers_of):
        """`brokers_of`: shard → number of its brokers."""
        self.up = set()
        shards = self

        class Page(BaseHTTPRequestHandler):
            def do_GET(self):
                port = self.server.server_port
                if (shard := shards.of[port]) not in shards.up:
                    return
                doors = [f"127.0.0.1:{number}" for number, other in shards.of.items() if other == shard]
                body = json.dumps({"data_id": shard, "shard": shard, "doors": doors, "logs": []}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), Page) for count in brokers_of.values() for _ in range(count)
        ]
        names = [shard for shard, count in brokers_of.items() for _ in range(count)]
        self.of = {server.server_port: shard for server, shard in zip(self.servers, names, strict=True)}
        for server in self.servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()

    def addresses(self, shard):
        return ",".join(f"127.0.0.1:{port}" for port, name in self.of.items() if name == shard)

    def logs(self, **options):
        given = {"kmq.bootstrap.servers": ",".join(map(self.addresses, dict.fromkeys(self.of.values())))}
        return QueryLogs(ReadOptions(given | {"subscribePattern": ".*", "onUnreachable": "hold"} | options))


@pytest.fixture
def shards(monkeypatch):
    monkeypatch.setattr(planner, "HOLD_S", 0.3)
    made = []

    def make(**brokers_of):
        made.append(Shards(brokers_of))
        return made[-1]

    yield make
    for each in made:
        each.up |= {*each.of.values()}  # so that the threads of its queries end
        for server in each.servers:
            server.shutdown()
            server.server_close()


def test_a_shard_that_was_away_is_one_broker_whatever_others_are_doing(shards):
    """Its addresses were looked at when all of another shard was away again, which was one broker by then."""
    both = shards(a=2, b=2)
    logs = both.logs()

    def there():
        return sorted(logs.planned(lambda: logs.survey()[0]))

    assert there() == []
    both.up = {"a"}
    until(lambda: there() == [both.addresses("a")])
    both.up = set()
    assert there() == []
    both.up = {"b"}
    until(lambda: there() == [both.addresses("b")])
    both.up = {"a", "b"}
    until(lambda: there() == sorted(map(both.addresses, "ab")))


def test_who_waits_for_a_broker_is_woken_and_does_not_poll(shards, monkeypatch):
    one = shards(a=1)
    logs, slept = one.logs(), []
    assert logs.planned(logs.bounds) == {} and len(logs.away) == 1
    monkeypatch.setattr(planner, "time", SimpleNamespace(sleep=slept.append))
    waiting = threading.Thread(target=logs.wait, daemon=True)
    waiting.start()
    one.up = {"a"}
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive() and slept == []


def test_reading_goes_on_at_the_next_address_of_a_shard(silent):
    with Gateway(records(0, 20, 100)) as a, Gateway(said(503, "no_leader")) as b, Gateway(records(3, 20)) as c:
        remote = PatientRemote(f"{a.name},{b.name},{silent},{c.name}", Access(patience_s=PATIENCE_S))
        assert b"".join(lines for _, lines in remote.read("t", 0, 0, 20)) == b"".join(LINES)
    assert c.asked[0].endswith("start=3&end=20")


def test_every_address_has_its_turn_before_the_patience_ends(silent):
    with socket.create_server(("127.0.0.1", 0)) as hung, Gateway(broker_page("l", "x:1")) as a:
        name = f"127.0.0.1:{hung.getsockname()[1]},{silent},{a.name}"
        assert PatientRemote(name, Access(timeout_s=0.2, patience_s=0.1)).identity() == "l"


def test_offsets_by_broker_may_name_any_address_of_a_shard():
    given = {"startingOffsets": '{"b:1": {"t": {"0": 7}}, "x:1": {"t": {"0": 8}}}'}
    start = ends.parse({name.lower(): text for name, text in given.items()}, "starting", ["a:1", "b:1", "x:1"])
    found = ends.of_brokers(start, ["a:1,b:1", "x:1"])
    assert (found.value(("a:1,b:1", "t", 0)), found.value(("x:1", "t", 0))) == (7, 8)
    with pytest.raises(ConfigError, match="startingOffsets: b:1 and x:1 are one shard; name one of them"):
        ends.of_brokers(start, ["a:1,b:1,x:1"])


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [lambda it: it.topics(), lambda it: list(it.read("t", 0, 0, 9))])
def test_a_gateway_that_stays_away_is_named_with_what_was_asked(ask):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        name = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(
        RetryError, match=rf"broker {name}: http://{name}/v1/\S+: .*refused; nothing else for 0.5 s \(kmq.patience\)"
    ):
        ask(Remote(name, patience_s=0.5))


def test_damage_is_the_error_that_a_local_reader_raises_behind_all_that_is_good():
    fields = {
        "path": "/d/append/1.log",
        "byte": 7,
        "end": 9,
        "first_offset": 3,
        "next_offset": 5,
        "what": "crc mismatch",
    }
    with Gateway(records(0, 20, 100), said(500, "damaged", **fields)) as gateway:
        source = Remote(gateway.name).read("t", 0, 0, 20)
        assert next(source) == (0, b"".join(LINES[:3]))
        with pytest.raises(DamageError) as raised:
            next(source)
    damage = raised.value
    assert damage.path == f"{gateway.name}:/d/append/1.log"
    assert (damage.byte, damage.end, damage.first_offset, damage.next_offset) == (7, 9, 3, 5)


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        (said(401, "unauthorized"), ConfigError, "kmq.token: the unauthorized of it"),
        (said(404, "not_found"), ConfigError, "/v1/broker: not_found: the not_found of it"),
        (said(400, "bad_request"), ConfigError, "bad_request"),
        (said(500, "internal"), RetryError, "internal"),
        (answer(b"<html>", 404), ConfigError, "HTTP 404; this is no gateway of KMQ"),
        (answer(b"[]", 500), ConfigError, "HTTP 500; this is no gateway of KMQ"),
    ],
)
def test_a_refusal_is_said_with_broker_and_url_and_not_tried_again(reply, kind, text):
    with Gateway(reply) as gateway, pytest.raises(KmqError) as raised:
        Remote(gateway.name).identity()
    assert type(raised.value) is kind
    assert str(raised.value).startswith(f"broker {gateway.name}: http://{gateway.name}/v1/broker") and text in str(
        raised.value
    )


@pytest.mark.parametrize("page", [b"<html>", b"{}", b"[]", b'"up"'])
def test_another_service_at_the_address_of_a_planned_read_is_named_at_once(page):
    """As by the planner, which does not wait for it either."""
    read, identify = lambda it: list(it.read("t", 0, 0, 9)), PatientRemote.identity
    for ask, data_id in ((read, "me"), (identify, "me"), (identify, "")):
        with Gateway(answer(page)) as gateway, pytest.raises(ConfigError) as raised:
            ask(PatientRemote(gateway.name, Access(patience_s=0.5), data_id))
        text = f"broker {gateway.name}: http://{gateway.name}/v1/broker: HTTP 200; this is no gateway of KMQ"
        assert str(raised.value).startswith(text)


@pytest.mark.parametrize("page", [b"{}", b'{"status":"ok"}', b'[{"name":"t"}]', b"7"])
def test_another_service_that_answers_a_plan_with_json_is_named_with_what_was_expected(page):
    for ask, expected in (
        (lambda it: QueryLogs(ReadOptions({"kmq.bootstrap.servers": it.name, "subscribe": "t"})).survey(), "data_id"),
        (PatientRemote.topics, "name, partitions"),
        (lambda it: it.bounds(["t"]), "data_id"),
        (lambda it: it.offset_of_seq("t", 0, 1), "offset"),
        (lambda it: it.cuts("t", 0, 0, 9, 9), "cuts"),
        (PatientRemote.ledger, "routed_seq"),
        (lambda it: list(it.read("t", 0, 0, 9)), "KMQ-First-Offset"),
    ):
        with Gateway(answer(page)) as gateway, pytest.raises(ConfigError) as raised:
            ask(PatientRemote(gateway.name, Access(patience_s=0.5)))
        assert str(raised.value).startswith(f"broker {gateway.name}: http://{gateway.name}/v1/")
        assert "this is no gateway of KMQ, or one too old to read from; expected " in str(raised.value)
        assert expected in str(raised.value)


@pytest.mark.parametrize(
    "name", ["", ":8082", "host:port", "host:99999", "ftp://host:1", "host/path", "a b@c:1", "::1"]
)
def test_a_name_that_is_no_address_is_refused_and_its_login_not_shown(name):
    with pytest.raises(ConfigError, match=r"kmq\.bootstrap\.servers: .* is not host:port"):
        Remote(name)


@pytest.mark.parametrize("names", ["http://me:secret@h", "a,me:secret@h:1", "me:secret,secret@h", "a:b@h,,secret"])
def test_a_login_is_never_shown(names):
    topic, table = {"subscribe": "t"}, json.dumps({names: {"t": {"0": 1}}})
    for ask in (
        lambda: ReadOptions({"kmq.bootstrap.servers": names, **topic}),
        lambda: ReadOptions({"kmq.bootstrap.server": names, **topic}),
        lambda: ReadOptions({"kmq.bootstrap.servers": "h", **topic, "startingOffsets": table}),
        lambda: ReadOptions({"kmq.bootstrap.servers": "h", **topic, "startingOffsets": table[:-1]}),
        lambda: ReadOptions({"path": f"{names},", **topic}),
        lambda: Directory(names).identity(),
        lambda: WriteOptions({"kmq.producers": "h", "kmq.bootstrap.servers": names}),
        lambda: WriteOptions({"kmq.producers": names}),
        lambda: LetterWriter(ReadOptions({"path": "d", **topic}), Destination(names)),
        lambda: LetterWriter(ReadOptions({"path": "d,e", **topic}), Destination(names)),
        lambda: recognised(names.split(",")) and Remote(names),
        lambda: TableSpec(f"jdbc://{names}/t").open(),
        lambda: TableSpec(f"s3://{names}/t").open("checkpoint"),
        lambda: kmq.Producer(names),
    ):
        with pytest.raises(ConfigError, match="not shown because of a login") as raised:
            ask()
        assert "secret" not in str(raised.value)


def test_a_master_that_does_not_answer_is_named_without_its_login():
    with pytest.raises(RetryError, match="not shown because of a login") as raised:
        check_master("spark://me:secret@127.0.0.1:1")
    assert "secret" not in str(raised.value)


def test_a_directory_may_have_an_at_sign_in_its_name():
    with pytest.raises(ConfigError, match="path='/nope/me@work': no data directory"):
        Directory("/nope/me@work").identity()


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("pod-1", "http://pod-1:8082"),
        ("pod-1:9", "http://pod-1:9"),
        ("https://pod-1", "https://pod-1:8443"),
        ("[::1]:9", "http://[::1]:9"),
    ],
)
def test_a_name_may_leave_out_the_port_and_ask_for_tls(name, url):
    assert Remote(name).describe() == f"broker {name}: {url}"


def test_a_silent_gateway_is_given_up_after_timeout_and_patience():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(RetryError, match=r"timed out; nothing else for 0\.3 s \(kmq\.patience\)"):
            Remote(name, timeout_s=0.2, patience_s=0.3).topics()
    assert 0.2 <= time.monotonic() - begin < PATIENCE_S


# --- against the gateway ---------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data", [b"t.k|||%d" % n for n in range(100)])


def test_it_goes_to_another_process_without_its_connection(data, tmp_path):
    path = f"{tmp_path}/tokens"
    token = tokens.new(path, "spark")
    with up(data, synced=100, KMQ_TOKENS=path) as broker:
        broker.serve()
        name = f"127.0.0.1:{broker.port}"
        first = open_broker(name, False, Access(token))
        assert first.topics() == {"t": Layout(1, "crc32")}
        second = pickle.loads(pickle.dumps(first))
        assert second.bounds(["t", WAL]) == {("t", 0): (0, 100), (WAL, 0): (1, 101)}
        assert second.name == name
        with pytest.raises(ConfigError, match=r"option kmq\.token"):
            open_broker(name, False).topics()


def test_a_gateway_that_is_restarted_between_two_questions_is_not_noticed(data):
    with up(data, synced=100) as broker:
        broker.serve()
        access = PatientRemote(f"127.0.0.1:{broker.port}")
        assert access.topics() == {"t": Layout(1, "crc32")}
        broker.stop()
        starting = threading.Timer(0.2, broker.serve)
        starting.start()
        assert access.topics() == {"t": Layout(1, "crc32")}
        starting.join()


# --- several brokers -------------------------------------------------------------------------------------------------


@contextmanager
def fleet(path, count):
    """Brokers that are up, and the requests to them, by (broker, path and query)."""
    asked = []
    with ExitStack() as stack:
        names = []
        for number in range(count):
            made = write_data(
                path / str(number), [b"t.k%d|0|%d|x" % (n, n) for n in range(100)], {"t": 3}, closed=False
            )
            broker = stack.enter_context(up(str(path / str(number)), synced=200))
            broker.serve()
            names.append((made, f"127.0.0.1:{broker.port}"))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        ask = PatientRemote._ask

        def counted(remote, connection, target):
            asked.append((remote.name, target))
            return ask(remote, connection, target)

        patch.setattr(PatientRemote, "_ask", counted)
        yield [made for made, _ in names], [name for _, name in names], asked


def stream_of(names):
    options = {"kmq.bootstrap.servers": ",".join(names), "subscribePattern": "t", "startingOffsets": "earliest"}
    return StreamReader(StructType([]), ReadOptions(options))


# More records are cut into tasks: two looks at the index of each of three partitions.
@pytest.mark.parametrize(("records", "most"), [(30, 10), (4500, 40)])
def test_a_micro_batch_asks_each_broker_twice_and_all_of_them_at_once(tmp_path, monkeypatch, records, most):
    with fleet(tmp_path, 5) as (made, names, asked):
        stream = stream_of(names)
        first = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
        stream.partitions({}, first)
        for each in made:
            append(each, [b"t.k%d|0|%d|y" % (n, n) for n in range(100, 100 + records)])
        asked.clear()
        meeting, ask = threading.Barrier(5), PatientRemote._ask

        def together(remote, connection, target):
            meeting.wait(PATIENCE_S)
            return ask(remote, connection, target)

        monkeypatch.setattr(PatientRemote, "_ask", together)
        second = stream.latestOffset(first, ReadAllAvailable())
        tasks = stream.partitions(first, second)
        assert len(asked) <= most and sum(len(span) for task in tasks for span in task.spans) == 5 * records
        assert any("/cuts" in target for _, target in asked) == (records > 30)
        assert all(len(second[name]["__last"]["t"]) == 3 for name in names)


def test_a_broker_without_stamps_is_asked_one_by_one_and_named_once(tmp_path, monkeypatch, capfd):
    with fleet(tmp_path, 2) as (_, names, _):
        expected = stream_of(names)
        end = expected.latestOffset(expected.initialOffset(), ReadAllAvailable())
        logs = PatientRemote._logs

        def older(remote, topics, **query):
            found = logs(remote, topics, **query)
            rows = found["logs"] if isinstance(found, dict) else found
            return [{name: row[name] for name in row if name not in ("last", "offset")} for row in rows]

        monkeypatch.setattr(PatientRemote, "_logs", older)
        capfd.readouterr()
        stream = stream_of(names)
        assert stream.latestOffset(stream.initialOffset(), ReadAllAvailable()) == end
        micros = FIRST_TS + 50
        keys = [(name, "t", number) for name in names for number in range(3)]
        assert QueryLogs(stream._options).offsets_of_time(keys, micros) == {
            key: Directory(str(tmp_path / str(names.index(key[0])))).offset_of_time(*key[1:], micros) for key in keys
        }
        assert capfd.readouterr().err.count("older_broker") == 4, "two brokers, two queries"


def test_ranges_of_a_task_are_read_on_one_connection(tmp_path, monkeypatch):
    with fleet(tmp_path, 1) as (_, names, _):
        opened, connect = [], PatientRemote.connect
        monkeypatch.setattr(PatientRemote, "connect", lambda remote: opened.append(1) or connect(remote))
        remote = PatientRemote(names[0])
        found = [lines for number in range(3) for _, lines in remote.read("t", number, 0, 1000)]
        assert b"".join(found).count(b"\n") == 100 and len(opened) == 1
        part = remote.read("t", 0, 0, 1000)
        next(part)
        remote.bounds(["t"])
        assert remote.bounds(["t"]) and len(opened) == 2, "records that are being read have their connection"
