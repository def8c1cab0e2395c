"""Programs of others that write to Kafka or read from it, at their default settings: each line arrives once, in order."""

import json
import subprocess
from collections.abc import Callable

import pytest
from brokers import Broker
from kafka_readers import by_confluent
from shippers import Shipper
from zoo import program

LINES = [
    *(
        "accepted publickey for root from 192.0.2.7 port 22",
        "a|b|c=1;t=2",
        "!hello acks=1",
        '{"level": "info", "n": 1.50}',
    ),
    *("Grüße ✓ 日本", "%s %d 100%", "trailing blank ", "\\n is two characters", "x" * 4000),
    *(f"request {number} done in {number % 17} ms" for number in range(300)),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    broker = Broker(tmp_path_factory.mktemp("products"))
    broker.up()
    yield broker
    broker.close()


@pytest.fixture
def port(broker):
    return int((broker.pipes / "kafka.port").read_text())


@pytest.fixture
def run(port) -> Callable[..., list[str]]:
    """A function that runs a client program of this folder and returns the lines it prints."""

    def run(client: str, *arguments: str, lines: list[str] = ()) -> list[str]:
        words = [*program(client), f"127.0.0.1:{port}", *arguments]
        text = "".join(line + "\n" for line in lines)
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout.split("\n")[:-1]

    return run


def values(broker, port, topic):
    """The values of a topic of one partition."""
    return [record.value.decode() for record in by_confluent(port, topic, 0, 0, len(broker.lines(topic)))]


def wait_stored(broker, topic, number, shipper):
    """Wait until a topic has so many records."""
    broker.wait(lambda: len(broker.lines(topic)) >= number, f"{number} records of {topic}\n{shipper.said()}")


def test_rsyslog_writes_by_omkafka_and_reads_by_imkafka_what_a_shell_types(broker, port, tmp_path):
    read, typed = tmp_path / "rsyslog/read", []

    def type_in(lines):
        typed.extend(lines)
        assert broker.kmq("produce", "typed", text="".join(line + "\n" for line in lines)).returncode == 0

    def heard():
        return read.read_text().split("\n")[:-1] if read.exists() else []

    def has_joined():
        """Type a line; imkafka begins at the end of the topic, so that those before it has joined are not for it."""
        type_in([f"line {len(typed)}"])
        return heard()

    def has_read_all():
        return heard()[-1] == typed[-1]

    shipper = Shipper(
        "rsyslog",
        tmp_path / "rsyslog",
        f"""
module(load="omkafka")
module(load="imkafka")
template(name="as_it_came" type="string" string="%rawmsg%\\n")
ruleset(name="typed") {{ action(type="omfile" file="{read}" template="as_it_came") }}
input(type="imkafka" broker=["127.0.0.1:{port}"] topic="typed" consumergroup="rsyslog" ruleset="typed")
action(type="omkafka" broker=["127.0.0.1:{port}"] topic="rsyslog")
""",
    )
    try:
        for line in LINES:
            shipper.log(line.encode())
        wait_stored(broker, "rsyslog", len(LINES), shipper)
        broker.wait(has_joined, f"a line read by imkafka\n{shipper.said()}")
        type_in(LINES[:100])
        broker.wait(has_read_all, f"{typed[-1]} read by imkafka\n{shipper.said()}")
        shipper.end()
        type_in(LINES[100:200])
        shipper.start()
        broker.wait(has_read_all, f"{typed[-1]} read by imkafka after a restart\n{shipper.said()}")
        shipper.end()
        assert len(heard()) > 200 and heard() == typed[-len(heard()) :]
    finally:
        shipper.close()
    # Its format ends with a newline. The stored line is readable, and a reader gets it with its newline.
    stored = zip(broker.lines("rsyslog"), LINES, strict=True)
    assert all(line.endswith(b" app: " + text.encode()) for line, text in stored)
    assert [text.partition(" app: ")[2] for text in values(broker, port, "rsyslog")] == [line + "\n" for line in LINES]


def test_syslog_ng_writes_by_its_kafka_destination(broker, port, tmp_path):
    shipper = Shipper(
        "syslog-ng",
        tmp_path / "syslog-ng",
        f"""
destination d_kafka {{ kafka-c(bootstrap-servers("127.0.0.1:{port}") topic("syslog-ng")); }};
log {{ source(s_src); destination(d_kafka); }};
""",
    )
    try:
        for line in LINES:
            shipper.log(line.encode())
        wait_stored(broker, "syslog-ng", len(LINES), shipper)
        shipper.end()
    finally:
        shipper.close()
    assert [text.partition(" app: ")[2] for text in values(broker, port, "syslog-ng")] == LINES


def test_collectd_writes_by_write_kafka(broker, port, tmp_path):
    shipper = Shipper(
        "collectd",
        tmp_path / "collectd",
        f"""
LoadPlugin write_kafka
<Plugin write_kafka>
  Property "metadata.broker.list" "127.0.0.1:{port}"
  <Topic "collectd">
  </Topic>
</Plugin>
""",
    )
    given = [(f"g{number % 3}", 1_700_000_000 + number, number + 0.5) for number in range(300)]
    try:
        for name, time, value in given:
            shipper.put_value(f'PUTVAL "h1/tests/gauge-{name}" {time}:{value}')
        wait_stored(broker, "collectd", len(given), shipper)
        shipper.end()
    finally:
        shipper.close()
    found = [json.loads(text)[0] for text in values(broker, port, "collectd")]
    # collectd writes in five threads, so that it promises no order.
    assert sorted((each["type_instance"], each["time"], each["values"][0]) for each in found) == sorted(given)


@pytest.mark.timeout(900)  # it is fetched once
def test_a_queue_of_kombu_is_read_once_and_in_order_by_one_program_after_another(run):
    run("kombu", "jobs", "put", "0", lines=LINES[:60])
    assert run("kombu", "jobs", "get", "25") == LINES[:25]
    assert run("kombu", "jobs", "get", "35") == LINES[25:60]


@pytest.mark.timeout(900)
def test_a_stream_of_arroyo_goes_on_where_it_ended(broker, port, run):
    for lines in (LINES[:100], LINES[100:]):
        assert broker.kmq("produce", "events", text="".join(line + "\n" for line in lines)).returncode == 0
        run("arroyo", "stream", "events", "seen", str(len(lines)))
    assert values(broker, port, "seen") == [f"seen {line}" for line in LINES]
