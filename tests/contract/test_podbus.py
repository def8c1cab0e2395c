"""podbus.v1.PodBus as its .proto promises it, asked by a client that knows nothing but the .proto (podbus_client.py)."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path

import pytest
from brokers import Broker, remove_shared_memory
from waiting import until

from kmq.broker import stats

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

ROOT = Path(__file__).resolve().parents[2]
KIB = 1 << 10


class Bus(Broker):
    """A broker as `kmq up` starts it, and the client, which answers one call at a time."""

    def __init__(self, root, stubs, **settings):
        super().__init__(root)
        self.env |= settings
        self.stubs = stubs
        self.up()
        script = str(Path(__file__).with_name("podbus_client.py"))
        argv = [sys.executable, script, str(stubs), f"127.0.0.1:{self.port('grpc')}"]
        self.client = subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def port(self, name):
        return int((self.pipes / f"{name}.port").read_text())

    def call(self, call, **fields):
        fields = {name: _text(value) for name, value in fields.items()}
        self.client.stdin.write(json.dumps({"call": call} | fields) + "\n")
        self.client.stdin.flush()
        answer = json.loads(self.client.stdout.readline())
        return _bytes(answer)

    def produce(self, message_id, record=b"x", **fields):
        return self.call("Produce", message_id=message_id, record=record, **fields)

    def stored(self, message_id, record=b"x"):
        """Its offset; it must be stored."""
        answer = self.produce(message_id, record)
        assert answer["code"] == "OK", answer
        return answer["offset"]

    def row(self, name):
        return stats.peek(self.instance).rows[name]

    @contextlib.contextmanager
    def paused(self, name):
        os.kill(self.row(name).pid, 19)
        try:
            yield
        finally:
            os.kill(self.row(name).pid, 18)

    def close(self):
        self.client.stdin.close()
        code = self.client.wait(60)
        self.client.stdout.close()
        self.down()
        remove_shared_memory(self.instance)  # not its directory: a small disk may be mounted there
        assert code == 0, "the client failed, or it has loaded something of KMQ"


def _text(value):
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, list):
        return [{name: _text(field) for name, field in each.items()} for each in value]
    return value


def _bytes(answer):
    for found in (answer, *answer.get("records", ())):
        if "record" in found:
            found["record"] = b64decode(found["record"])
    return answer


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """The client's code, generated from the .proto and nothing else."""
    made = tmp_path_factory.mktemp("stubs")
    proto = ROOT / "kmq" / "gateway" / "podbus.proto"
    argv = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{proto.parent}",
        f"--python_out={made}",
        f"--grpc_python_out={made}",
    ]
    subprocess.run([*argv, proto.name], check=True, capture_output=True, cwd=made)
    return made


@pytest.fixture(scope="module")
def bus(tmp_path_factory, stubs):
    """One broker for all that leaves it whole."""
    running = Bus(tmp_path_factory.mktemp("bus"), stubs)
    yield running
    running.close()


@pytest.fixture
def new_bus(tmp_path, stubs):
    """A broker of the test's own."""
    running = []

    def make(**settings):
        running.append(Bus(tmp_path, stubs, **settings))
        return running[-1]

    yield make
    for one in running:
        one.close()


# --- produce and consume ---------------------------------------------------------------------------------------------


def test_an_answered_record_is_consumed_at_its_offset_at_once(bus):
    for number in range(20):
        offset = bus.stored(f"at once {number}", b"%d" % number)
        answer = bus.call("Consume", offset=offset)
        assert answer == {"code": "OK", "record": b"%d" % number, "next_offset": offset + 1}


def test_a_retry_with_the_same_id_gets_the_same_offset_and_stores_nothing(bus):
    first = bus.stored("retry", b"the record")
    assert [bus.stored("retry", b"the record") for _ in range(3)] == [first] * 3
    after = bus.stored("after the retries")
    assert after == first + 1
    assert bus.call("Consume", offset=first)["record"] == b"the record"


def test_an_id_that_comes_again_with_another_record_is_refused(bus):
    """It is no retry: answered with the offset of the first, it would be lost without a word."""
    first = bus.stored("reused", b"the record")
    assert bus.produce("reused", b"another record")["code"] == "ALREADY_EXISTS"
    assert bus.stored("reused", b"the record") == first
    assert bus.call("Consume", offset=first)["record"] == b"the record"
    assert bus.stored("after the reused one") == first + 1


def test_a_topic_with_a_dot_is_the_one_that_has_the_records(new_bus):
    bus = new_bus(KMQ_PODBUS_TOPIC="bus.eu")
    bus.send_lines([b"bus.k|0||not a record"])
    offset = bus.stored("one", b"the record")
    assert bus.call("Consume", offset=0) == {"code": "OK", "record": b"the record", "next_offset": offset + 1}
    assert bus.stored("empty", b"") == offset + 1 == bus.stored("empty", b"")
    assert bus.call("Consume", offset=offset + 1)["record"] == b""
    lines = (bus.data / "topics/bus.eu/0" / f"{0:020}.log").read_bytes().splitlines()
    assert [line.split(b"|")[2] for line in lines] == [b"bus.eu.@", b"bus.eu.@"]


RECORDS = {
    "empty": b"",
    "text": b"plain text",
    "separators": b"a|b|c;enc=b64|",
    "utf-8": "Grüße, 世界".encode(),
    "every byte": bytes(range(256)),
    "newlines": b"one\ntwo\r\n\n",
    "nul": b"\0",
    "looks like base64": b"AAEC",
    "terminal": b"\x1b[31mred\x07",
    "tab": b"a\tb\r",
    "not utf-8": b"\xff\xfe",
    "long text": b"x" * 1000 * KIB,
    "long binary": b"\0" * 700 * KIB,
}


@pytest.mark.parametrize("name", RECORDS)
def test_any_bytes_come_back_identical(bus, name):
    offset = bus.stored(f"bytes {name}", RECORDS[name])
    assert bus.call("Consume", offset=offset)["record"] == RECORDS[name]


@pytest.mark.parametrize(
    "message_id", ["|", ";p=evil", ";w=podbus;enc=b64", "%41", "\n", "ünï", " ", "\0", "!err", "+", "a" * 256]
)
def test_any_id_is_an_id_of_its_own(bus, message_id):
    offset = bus.stored(message_id, message_id.encode())
    assert bus.stored(message_id, message_id.encode()) == offset
    assert bus.call("Consume", offset=offset)["record"] == message_id.encode()


def test_consume_gives_the_first_podbus_record_at_the_offset_or_later(bus):
    first = bus.stored("first of two", b"first")
    bus.send_lines([b"other.topic|0|%d|x" % n for n in range(5)])
    second = bus.stored("second of two", b"second")
    assert second > first + 1
    assert bus.call("Consume", offset=first + 1) == {"code": "OK", "record": b"second", "next_offset": second + 1}


def test_lines_of_plain_producers_are_records_too(bus):
    before = bus.stored("before the line")
    bus.send_lines([b"podbus.any_key|0|7|a line"])
    until(lambda: bus.call("Consume", offset=before + 1)["code"] == "OK", "the line")
    assert bus.call("Consume", offset=before + 1)["record"] == b"a line"


# --- streams ---------------------------------------------------------------------------------------------------------


def requests(prefix, count):
    return [{"message_id": f"{prefix} {n}", "record": b"%d" % n} for n in range(count)]


def test_a_stream_of_records_is_answered_in_order_and_consumed_from_the_first(bus):
    answer = bus.call("ProduceStream", requests=requests("stream", 3000))
    offsets = answer["offsets"]
    assert offsets == list(range(offsets[0], offsets[0] + 3000))
    read = bus.call("ConsumeStream", offset=offsets[0])
    assert [r["record"] for r in read["records"]] == [b"%d" % n for n in range(3000)]
    assert [r["next_offset"] for r in read["records"]] == [offset + 1 for offset in offsets]


def test_a_stream_that_is_sent_again_gets_the_same_offsets(bus):
    sent = requests("again", 300)
    first = bus.call("ProduceStream", requests=sent)
    assert bus.call("ProduceStream", requests=sent) == first
    assert bus.call("ProduceStream", requests=[sent[7], sent[3]])["offsets"] == [
        first["offsets"][7],
        first["offsets"][3],
    ]


def test_a_stream_ends_with_the_status_of_the_first_record_that_is_refused(bus):
    sent = requests("until refused", 10)
    sent[4]["message_id"] = ""
    answer = bus.call("ProduceStream", requests=sent)
    assert (len(answer["offsets"]), answer["code"]) == (4, "INVALID_ARGUMENT")
    assert bus.call("Consume", offset=answer["offsets"][3])["record"] == b"3"


def test_a_stream_without_follow_ends_at_the_end(bus):
    offset = bus.stored("the last one", b"last")
    read = bus.call("ConsumeStream", offset=offset)
    assert read["records"] == [{"record": b"last", "next_offset": offset + 1}]
    assert bus.call("ConsumeStream", offset=offset + 1) == {"code": "OK", "records": []}


def test_a_stream_that_follows_gets_what_comes_later(bus):
    last = bus.stored("before following")
    argv = [sys.executable, str(Path(__file__).with_name("podbus_client.py")), str(bus.stubs)]
    argv.append(f"127.0.0.1:{bus.port('grpc')}")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as follower:
        call = {"call": "ConsumeStream", "offset": last + 1, "follow": True, "limit": 5}
        follower.stdin.write(json.dumps(call) + "\n")
        follower.stdin.flush()
        for number in range(5):
            bus.stored(f"while following {number}", b"%d" % number)
        answer = _bytes(json.loads(follower.stdout.readline()))
        assert [record["record"] for record in answer["records"]] == [b"%d" % number for number in range(5)]
        follower.stdin.close()
        assert follower.wait(30) == 0


def test_a_follower_that_finds_nothing_waits_until_its_deadline(bus):
    end = bus.stored("nothing follows")
    answer = bus.call("ConsumeStream", offset=end + 1, follow=True, timeout=0.3)
    assert answer["code"] == "DEADLINE_EXCEEDED"


# --- every error -----------------------------------------------------------------------------------------------------

LIMIT = 1 << 20  # KMQ_MAX_LINE
ERRORS = [
    ("Produce", {"message_id": "", "record": b"x"}, "INVALID_ARGUMENT", "empty_id: "),
    ("Produce", {"message_id": "a" * 257, "record": b"x"}, "INVALID_ARGUMENT", "bad_id: "),
    ("Produce", {"message_id": "ü" * 43, "record": b"x"}, "INVALID_ARGUMENT", "bad_id: "),
    ("Produce", {"message_id": "long text", "record": b"x" * LIMIT}, "RESOURCE_EXHAUSTED", "too_long: "),
    (
        "Produce",
        {"message_id": "long as base64", "record": b"\0" * (LIMIT * 3 // 4)},
        "RESOURCE_EXHAUSTED",
        "too_long: ",
    ),
    ("Produce", {"message_id": "huge", "record": b"x" * 2 * LIMIT}, "RESOURCE_EXHAUSTED", "larger than max"),
    ("Consume", {"offset": 1 << 40}, "NOT_FOUND", "not_found: nothing at offset 1099511627776 or later"),
    ("Consume", {"offset": (1 << 64) - 1}, "NOT_FOUND", "not_found: "),
]


@pytest.mark.parametrize(("call", "fields", "code", "words"), ERRORS, ids=[f"{e[0]} {e[3]}" for e in ERRORS])
def test_an_error_has_its_status_and_says_why(bus, call, fields, code, words):
    answer = bus.call(call, **fields)
    assert (answer["code"], words in answer["details"]) == (code, True), answer
    assert bus.produce(f"after {call} {words}")["code"] == "OK"  # nobody else is the worse for it


def test_the_longest_record_is_stored_and_one_byte_more_is_refused(bus):
    """Found by halving: where the limit is, is ingress' business."""
    low, high = LIMIT - KIB, LIMIT
    while high - low > 1:
        middle = (low + high) // 2
        answer = bus.produce(f"length {middle}", b"x" * middle)
        assert answer["code"] in ("OK", "RESOURCE_EXHAUSTED"), answer
        low, high = (middle, high) if answer["code"] == "OK" else (low, middle)
    offset = bus.stored(f"length {low}", b"x" * low)
    assert bus.call("Consume", offset=offset)["record"] == b"x" * low


def test_past_the_end_is_not_found_only_when_the_router_has_all_that_is_durable(bus):
    """A record that is on disk but not in its queue yet is waited for, not denied."""
    with bus.paused("router"):
        offset = bus.stored("waits for the router", b"late")
        assert bus.call("Consume", offset=offset, timeout=0.3)["code"] == "DEADLINE_EXCEEDED"
        answer = bus.call("Consume", offset=offset)
        assert (answer["code"], answer["details"].startswith("not_routed: ")) == ("UNAVAILABLE", True)
    assert bus.call("Consume", offset=offset)["record"] == b"late"


def test_without_an_answer_from_the_disk_the_deadline_passes_and_a_retry_stores_once(bus):
    with bus.paused("durability"):
        assert bus.produce("no answer", b"once", timeout=0.3)["code"] == "DEADLINE_EXCEEDED"
        answer = bus.produce("no answer", b"once")
        assert (answer["code"], answer["details"].startswith("not_answered: ")) == ("UNAVAILABLE", True)
    offset = bus.stored("no answer", b"once")
    assert bus.stored("after no answer") == offset + 1
    records = bus.call("ConsumeStream", offset=0)["records"]
    assert [record["record"] for record in records].count(b"once") == 1


def test_a_quota_that_is_reached_is_unavailable_with_the_reason(new_bus):
    bus = new_bus(KMQ_DATA_QUOTA="24 MiB", KMQ_MAX_LINE="64 KiB", RB_BYTES="256 KiB")
    answers = []
    while not answers or answers[-1]["code"] == "OK":
        assert len(answers) < 1000, "the quota never ends it"
        answers.append(bus.produce(f"fill {len(answers)}", b"x" * 60 * KIB))
    assert (answers[-1]["code"], answers[-1]["details"][:7]) == ("UNAVAILABLE", "quota: "), answers[-1]
    assert len(answers) > 10
    assert bus.call("Consume", offset=0)["record"] == b"x" * 60 * KIB  # reading goes on
    until(lambda: bus.call("Check", service="")["status"] == "NOT_SERVING", "not serving")


@pytest.fixture
def small_disk(tmp_path):
    """48 MiB for the data of a broker in `tmp_path`."""
    (tmp_path / "data").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(tmp_path / "data")]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root and mounts")
    yield tmp_path / "data"
    subprocess.run(["umount", "--lazy", str(tmp_path / "data")], check=True)


@pytest.mark.root
def test_a_full_disk_is_unavailable_with_the_reason_until_there_is_room(small_disk, new_bus):
    bus = new_bus()
    bus.stored("before")
    filler = small_disk / "filler"
    with contextlib.suppress(OSError):  # the broker has just taken some of it
        filler.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 64 * KIB))
    refused = "disk_full: the disk has no room for more"
    until(lambda: bus.produce("full").get("details", "").startswith(refused), "refused")
    assert bus.produce("full")["code"] == "UNAVAILABLE"
    filler.unlink()
    offset = until(lambda: bus.produce("at last", b"stored at last").get("offset"), "room")
    assert bus.call("Consume", offset=offset)["record"] == b"stored at last"


def test_under_drop_oldest_produce_says_that_nothing_can_be_promised(new_bus):
    bus = new_bus(RB_OVERFLOW_POLICY_FRAMED="drop_oldest")
    for number in range(2):
        answer = bus.produce(f"drop {number}")
        assert (answer["code"], answer["details"][:13]) == ("FAILED_PRECONDITION", "drop_oldest: ")


def test_a_damaged_record_is_data_loss_naming_file_and_seq_and_never_served(new_bus):
    bus = new_bus()
    offsets = [bus.stored(f"good {n}", b"record %d " % n + b"x" * KIB) for n in range(200)]
    path = bus.data / "topics" / "podbus" / "0" / f"{0:020d}.log"
    index = path.with_suffix(".idx")
    content = path.read_bytes()

    def is_indexed():
        last = index.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2] if index.exists() else b""
        return b"|" in last and int(last.split(b"|")[1]) > len(content) // 2

    until(is_indexed, "index lines")
    victim = content.index(b"record 50 ")
    with path.open("r+b") as file:
        file.seek(victim)
        file.write(b"R")
    answer = bus.call("Consume", offset=offsets[50])
    assert answer["code"] == "DATA_LOSS"
    assert str(path) in answer["details"] and f"seq {offsets[50]}" in answer["details"]
    assert bus.call("Consume", offset=offsets[199])["record"].startswith(b"record 199 ")
    answer = bus.call("ConsumeStream", offset=0)
    assert answer["code"] == "DATA_LOSS"
    assert all(b"record %d " % n in record["record"] for n, record in enumerate(answer["records"]))
    assert len(answer["records"]) <= 50


# --- health and reflection -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", "podbus.v1.PodBus", "kmq.v1.Kmq"])
def test_health_is_serving_exactly_while_a_write_can_be_made_durable(bus, service):
    def serving(wanted):
        return lambda: bus.call("Check", service=service)["status"] == wanted

    until(serving("SERVING"), "serving")
    with bus.paused("durability"):
        until(serving("NOT_SERVING"), "not serving")
    until(serving("SERVING"), "serving again")


def test_health_of_an_unknown_service_is_not_found(bus):
    assert bus.call("Check", service="podbus.v2.PodBus")["code"] == "NOT_FOUND"


def test_reflection_is_enough_to_produce(bus):
    answer = bus.call("Reflect", service="podbus.v1.PodBus", method="Produce", message_id="reflected", record=b"r")
    assert answer["services"] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "kmq.v1.Kmq",
        "podbus.v1.PodBus",
    ]
    assert bus.call("Consume", offset=answer["offset"])["record"] == b"r"
