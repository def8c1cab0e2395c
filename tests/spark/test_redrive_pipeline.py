"""The redrive pipeline against brokers that are up: by SQL, once, in order; and what drop_oldest took."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from kmq.deadletters import redrive as rules
from kmq.errors import ConfigError
from kmq.spark.pipelines import redrive

pytestmark = pytest.mark.sampled(0.4, group="file")  # none needs another: each run takes a part

FIRST = 2  # seq of the first message: record 1 is the declaration of a topic


def redriven(broker, topic="test"):
    """(routing key, id, headers but the producer, payload) of what was redriven, in the order in which it is stored."""
    found = []
    for line in broker.lines(topic):
        _, _, key, ts, id, payload = line.split(b"|", 5)
        own, *headers = id.split(b";")
        if headers and headers[0].startswith(b"p=redrive-"):
            found.append((key, ts, own, b";".join(headers[1:]), payload))
    return found


@pytest.fixture
def run(spark):
    """redrive.run from a broker's directory, or several ones', to the (first) broker's own lines."""

    def run(brokers, *args, **options):
        sources = brokers if isinstance(brokers, list) else [brokers]
        port = (sources[0].pipes / "ingress.port").read_text().strip()
        where = {"path": ",".join(str(each.data) for each in sources)}
        return redrive.run(spark, where, *args, producers=f"127.0.0.1:{port}", **options)

    return run


@pytest.fixture
def letters(broker):
    """A broker with 60 dead letters, half of which say why, in three partitions; one has a key that is not UTF-8."""
    broker.up()
    broker.kmq("topics", "create", "dead", "--partitions", "3")
    lines = [b"dead.k%d|%d.5|m%d%b|lost|%d" % (n % 7, n, n, b";reason=late" if n % 2 else b"", n) for n in range(59)]
    broker.send_lines([*lines, b"dead.\xff%2E|59.5|m59;reason=late;enc=b64|AAEC"])
    broker.wait_routed(FIRST + 59)
    return broker


@pytest.mark.sampled(1, group="long")
def test_letters_are_selected_and_renamed_by_sql_and_stored_once(letters, run):
    queue = letters.lines("dead")
    command = ("dead", "concat('test.', headers['reason'], '.', key)", "headers['reason'] = 'late' and seq > 11")
    shown = run(letters, *command, dry_run=True)
    assert (shown.records, shown.keys, shown.before) == (25, 8, 0)
    assert {(key.new, key.old) for key in shown.most} >= {(b"test.late.\xff%2E", b"dead.\xff%2E")}
    assert sum(key.records for key in shown.most) == 25
    assert int(letters.status()["framer"]["seq"]) == FIRST + 59
    assert run(letters, *command)._replace(most=[]) == shown._replace(most=[])
    letters.wait_routed(FIRST + 84)
    found = redriven(letters)
    chosen = {n for n in range(60) if (n % 2 or n == 59) and n + FIRST > 11}
    assert {(payload, headers) for _, _, _, headers, payload in found} == {
        (b"lost|%d" % n, b"reason=late;orig_id=m%d;orig_seq=%d" % (n, n + FIRST)) for n in chosen - {59}
    } | {(b"AAEC", b"reason=late;enc=b64;orig_id=m59;orig_seq=%d" % (FIRST + 59))}
    assert {key for key, *_ in found} == {b"test.late.k%d" % (n % 7) for n in chosen - {59}} | {b"test.late.\xff%2E"}
    assert letters.lines("dead") == queue
    assert run(letters, *command).before == 25  # again: nothing new
    letters.send_lines([b"dead.new|1||x", b"dead.new|1|;reason=late|x"])
    letters.wait_routed(FIRST + 86)
    assert (again := run(letters, *command)).records == 26 and again.before == 25
    assert run(letters, *command, name="b").before == 0
    letters.wait_routed(FIRST + 86 + 1 + 26)


def test_an_offset_that_another_selection_has_passed_is_not_taken_for_stored(letters, run):
    """Numbers rise within a producer: the late ones first must not hide the early ones."""
    assert run(letters, "dead", "concat('test.', key)", "seq > 31").before == 0
    assert run(letters, "dead", "concat('test.', key)", "seq <= 31").before == 0
    letters.wait_routed(FIRST + 119)
    assert len({headers for _, _, _, headers, _ in redriven(letters)}) == 60


def test_the_command_and_the_pipeline_rewrite_alike(letters, run):
    template = "test.{topic}.it's_{key}"
    assert letters.kmq("redrive", "dead", "--to", template, "--idempotent").returncode == 0
    letters.wait_routed(FIRST + 119)
    by_command = redriven(letters)
    run(letters, "dead", rules.to_sql(template))
    letters.wait_routed(FIRST + 179)
    by_pipeline = redriven(letters)[60:]
    assert sorted(by_command) == sorted(by_pipeline) and len(by_command) == 60


def test_letters_of_many_brokers_go_to_one_each_once(letters, new_broker, run):
    other = new_broker()
    other.gateway = False
    other.up()
    other.send_lines([b"dead.k%d|0||of the other" % n for n in range(20)])
    other.wait_routed(20)
    assert run([letters, other], "dead", "concat('test.', key)").records == 80
    assert run([letters, other], "dead", "concat('test.', key)").before == 80
    letters.wait_routed(FIRST + 139)
    found = redriven(letters)
    assert len(found) == 80 and sum(payload == b"of the other" for *_, payload in found) == 20


def test_letters_are_read_over_http_too(letters, spark):
    letters.down()
    letters.gateway = True
    letters.up()
    ports = {name: (letters.pipes / f"{name}.port").read_text().strip() for name in ("http", "ingress")}
    where = {"kmq.bootstrap.servers": f"127.0.0.1:{ports['http']}"}
    command = (spark, where, "dead", "concat('test.', key)", "seq <= 6")
    assert redrive.run(*command, producers=f"127.0.0.1:{ports['ingress']}").records == 5
    letters.wait_routed(FIRST + 64)
    assert redrive.run(*command, producers=f"127.0.0.1:{ports['ingress']}").before == 5


def test_order_within_a_partition_is_kept_and_a_rate_is_too(letters, run):
    run(letters, "dead", "concat('test.', key)", rate=50)
    letters.wait_routed(FIRST + 119)
    sent = letters.lines("test")
    of = {}
    for line in sent:
        _, _, _, _, id, _ = line.split(b"|", 5)
        number, producer = int(id.split(b";")[0]), re.search(rb";p=(redrive-[^;]+)", id)[1]
        of.setdefault(producer, []).append(number)
    assert len(of) == 3 and all(numbers == sorted(numbers) for numbers in of.values())
    times = [float(line.split(b"|")[1]) for line in sent]
    assert times[-1] - times[0] >= 55 / 50 - 0.1


@pytest.mark.sampled(1, group="long")
def test_what_was_dropped_comes_back_once_of_all_topics_or_of_one(broker, run):
    broker.up(RB_OVERFLOW_POLICY_DURABLE="drop_oldest", RB_SLOTS=1024)
    broker.kmq("topics", "create", "test.eu")
    os.kill(broker.pids()["router"], signal.SIGSTOP)
    broker.send_lines([b"test%b.k%d|0|%d|x" % (b".eu" * (n % 2), n % 7, n) for n in range(5000)])
    broker.wait(lambda: int(broker.status()["durability"]["seq"]) == FIRST + 4999, "all on disk")
    os.kill(broker.pids()["router"], signal.SIGCONT)
    broker.wait_routed(FIRST + 4999)
    text = (broker.data / "dropped.log").read_text()
    ranges = [tuple(map(int, line.split("|")[1:3])) for line in text.splitlines()]
    lost = {seq for first, last in ranges for seq in range(first, last + 1)}
    assert 0 < len(lost) < 5000
    more = ["durable|1|1|1|1700000000.000000\n", "framed|9001|9040|40|1700000000.000000\n"]  # 1: the declaration
    (broker.data / "dropped.log").write_text(text.join(more))
    command = ("", "routing_key")
    assert run(broker, *command, dropped=True, dry_run=True)[:2] == (len(lost), 14)
    of_one = run(broker, "test.eu", "concat(topic, '.', key)", dropped=True, dry_run=True)
    assert of_one.records == sum((seq - FIRST) % 2 for seq in lost) and of_one.never_stored == 40
    assert run(broker, *command, dropped=True).records == len(lost)
    broker.wait_routed(FIRST + 4999 + len(lost))
    assert run(broker, *command, dropped=True).before == len(lost)
    found = [headers for topic in ("test", "test.eu") for _, _, _, headers, _ in redriven(broker, topic)]
    assert {int(headers.rpartition(b"=")[2]) for headers in found} == lost and len(found) == len(lost)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nosuch", "key"), "topic 'nosuch' does not exist at"),
        (("dead", "nosuch(key)"), r"--to 'nosuch\(key\)': "),
        (("dead", "concat('test.',"), r"--to \"concat\('test.',\": "),
        (("dead", "seq"), "--to 'seq': must be a text"),
        (("dead", "key", "nosuch = 1"), "--where 'nosuch = 1': "),
        (
            ("dead", "if(seq = 41, '../x', 'test')"),
            r"gives '\.\./x' for 'dead.k4', which is no routing key: the topic's name must match",
        ),
        (("dead", "if(seq = 41, null, 'test')"), "gives None for .* is null"),
        (("dead", "if(seq = 41, 'a|b', 'test')"), r"which is no routing key: it must not hold \|"),
    ],
)
def test_what_gives_no_routing_key_is_named_and_nothing_is_sent(letters, run, arguments, words):
    with pytest.raises(ConfigError, match=words):
        run(letters, *arguments)
    assert int(letters.status()["framer"]["seq"]) == FIRST + 59


def test_letters_go_back_by_the_rules_of_kmq_dlq_and_each_once_by_either_way(broker, run):
    own = b"origin_topic=orders;origin_partition=0;origin_offset=%d;origin_seq=1;group=g;error=e;attempts=1"
    own += b";first_failure=1.000;last_failure=2.000"
    broker.up()
    lines = [b"orders.dlq.@.k%d|%d.5|g%d;a=b;%b|lost" % (n, n, n, own % n) for n in range(4)]
    lines += [b"orders.dlq.@|0|g4;replays=3;%b|often" % (own % 4), b"orders.dlq.@|0||no letter"]
    broker.send_lines([*lines, b"orders.dlq.@.k6|6.5|7;c=d;replays=1;reason=not_json;from=orders-0-6;id=m6|by spark"])
    broker.wait_routed(7)
    assert broker.kmq("dlq", "replay", "orders", "--filter", "key=k[12]").stdout == "replayed 2 of orders.dlq\n"
    found = run(broker, "orders.dlq", rules.to_sql("{origin}"))
    assert (found.records, found.before, found.stayed) == (5, 2, 2)
    assert "replayed 0 of orders.dlq; 5 were replayed before" in broker.kmq("dlq", "replay", "orders").stdout
    broker.wait_routed(7 + 5)
    sent = {(line.split(b"|")[2], line.split(b"|")[4].split(b";", 2)[2]) for line in broker.lines("orders")}
    assert sent == {(b"orders.@.k%d" % n, b"a=b;orig_seq=1;replays=1") for n in range(4)} | {
        (b"orders.@.k6", b"c=d;orig_id=m6;replays=2")
    }


def test_a_redrive_that_is_killed_and_run_again_sends_nothing_twice(letters, run, spark):
    command = (letters, "dead", "concat('test.', key)")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, *command, rate=3)  # far from its end when it is cancelled
        letters.wait(lambda: len(letters.lines("test")) >= 5, "the first letters")
        spark.sparkContext.cancelAllJobs()  # ends the task's Python in the middle of what it sends
        assert first.exception() is not None
    before = len(letters.lines("test"))
    assert before < 60
    again = run(*command)
    assert again.records == 60 and again.before >= before
    letters.wait_routed(FIRST + 59 + 60)
    assert len({headers for _, _, _, headers, _ in redriven(letters)}) == len(letters.lines("test")) == 60
