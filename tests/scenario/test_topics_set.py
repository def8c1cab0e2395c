"""`kmq topics set` and `show`: what a person changes of a topic while the broker runs, and sees of it."""

import contextlib
import json
from pathlib import Path

SEGMENT = 64 << 10
LINE = b"orders.k|0|%d|" + b"x" * 100


def send(broker, count):
    before = len(broker.wal())
    broker.send_lines([LINE % n for n in range(count)])
    broker.wait_routed(before + count)


def segments(broker, topic="orders"):
    return sorted((broker.data / "topics" / topic / "0").glob("*.log"))


def size(broker):
    """Bytes of all segments; one that retention takes while we look counts nothing."""
    found = 0
    for path in segments(broker):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def toml(broker, topic="orders"):
    return Path(broker.data / "topics" / topic / "topic.toml")


def shown(broker, topic="orders"):
    return json.loads(broker.kmq("topics", "show", topic, "--json").stdout)


def test_lower_retention_deletes_segments_of_a_live_topic_and_stays_after_a_restart(broker):
    broker.up(KMQ_SEGMENT_BYTES=SEGMENT)
    send(broker, 12_000)
    with toml(broker).open("a") as file:
        file.write('# ours: ask Mia\nowner = "mia"\n')
    before = [path.name for path in segments(broker)]
    assert size(broker) > 1 << 20
    done = broker.kmq("topics", "set", "orders", "retention_bytes=1 MiB", "segment_age=1d")
    assert (done.returncode, done.stdout) == (
        0,
        "topic orders: retention_bytes=1 MiB segment_age=1d, in force\n",
    ), done.stderr
    broker.wait(lambda: size(broker) <= (1 << 20), "old segments deleted")
    assert segments(broker)[0].name in before[1:]
    found = shown(broker)
    assert found["limits"]["retention_bytes"] == {"value": 1 << 20, "from": "topic.toml"}
    assert found["limits"]["segment_bytes"]["from"] == "KMQ_SEGMENT_BYTES"
    (log,) = found["logs"]
    assert (log["first_offset"], log["last_offset"]) == (int(segments(broker)[0].stem), 11_999)
    text = toml(broker).read_text()
    broker.kill()
    broker.up(KMQ_SEGMENT_BYTES=SEGMENT)
    assert toml(broker).read_text() == text
    assert '# ours: ask Mia\nowner = "mia"\n' in text and "from_seq = 1\n" in text
    send(broker, 6_000)
    broker.wait(lambda: size(broker) <= (1 << 20) + SEGMENT, "still limited")
    assert broker.kmq("verify").returncode == 0


def test_smaller_segments_seal_what_a_living_topic_has_without_another_message(broker):
    broker.up()
    send(broker, 1_500)
    assert len(segments(broker)) == 1
    assert broker.kmq("topics", "set", "orders", "segment_bytes=64KiB").returncode == 0
    assert len(segments(broker)) == 2
    send(broker, 1_000)
    assert [line.split(b"|")[4] for line in broker.lines("orders")] == [b"%d" % n for n in [*range(1500), *range(1000)]]
    broker.kill()
    broker.up()
    assert broker.kmq("verify").returncode == 0


def test_limits_set_while_the_broker_is_down_or_killed_are_in_force_after_its_start(broker):
    broker.up()
    send(broker, 1)
    broker.kill()
    done = broker.kmq("topics", "set", "orders", "retention_age=30d", "cleanup=compact")
    assert done.stdout == (
        "topic orders: retention_age=30d cleanup=compact, in force when the router has adopted it\n"
    ), done.stderr
    assert shown(broker)["limits"]["retention_age"] == {
        "value": 30 * 86400.0,
        "from": "topic.toml, when the router has adopted it",
    }
    broker.kmq("topics", "set", "orders", "--unset", "cleanup")
    broker.up()
    assert shown(broker)["limits"]["retention_age"]["from"] == "topic.toml"
    assert 'retention_age = "30d"' in toml(broker).read_text() and "cleanup" not in toml(broker).read_text()
    assert not list((broker.data / "topics").glob(".request-*"))


def test_a_topic_declared_a_moment_ago_keeps_its_partitions_and_takes_limits(broker):
    broker.up()
    broker.kmq("topics", "create", "jobs.eu", "--partitions", "3", "--set", "retention_age=1d")
    done = broker.kmq("topics", "set", "jobs.eu", "retention_age=2d", "retention_bytes=2GiB")
    assert done.returncode == 0, done.stderr
    assert toml(broker, "jobs.eu").read_text() == (
        'partitions = 3\npartitioner = "murmur2"\nfrom_seq = 1\nretention_age = "2d"\nretention_bytes = "2GiB"\n'
    )
    text = broker.kmq("topics", "show", "jobs.eu").stdout
    assert "3 partition(s), in force from seq 1" in text
    assert [line.split() for line in text.splitlines() if line.startswith("retention")] == [
        ["retention_age", "2d", "topic.toml"],
        ["retention_bytes", "2", "GiB", "topic.toml"],
    ]


def test_what_cannot_be_set_is_refused_with_what_can(broker):
    broker.up()
    send(broker, 1)
    before = toml(broker).read_text()
    for arguments, expected in (
        (["partitions=8"], "partitions is no limit; write --partitions 8"),
        (["--partitions", "0"], "can never have fewer"),
        (["--partitions", "2000"], "must be between 1 and 1024"),
        (["retention=1d"], "unknown limit; expected one of segment_bytes, segment_age, retention_age"),
        (["retention_bytes=lots"], "retention_bytes = 'lots': expected a number of bytes"),
        (["cleanup=never"], "must be delete or compact"),
        (["retention_age"], "expected <limit>=<value>"),
        ([], "nothing to change"),
    ):
        refused = broker.kmq("topics", "set", "orders", *arguments)
        assert refused.returncode == 78 and expected in refused.stderr, refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    refused = broker.kmq("topics", "set", "order", "retention_age=1d")
    assert refused.returncode == 78 and "did you mean orders?" in refused.stderr
    assert toml(broker).read_text() == before


def test_a_topic_gets_more_partitions_live_and_at_the_next_start(broker):
    broker.up()
    send(broker, 1)
    refused = broker.kmq("topics", "set", "orders", "--partitions", "2")
    assert refused.returncode == 78 and "records have keys" in refused.stderr and "--force" in refused.stderr
    done = broker.kmq("topics", "set", "orders", "retention_age=30d", "--partitions", "2", "--force")
    assert done.returncode == 0 and "2 partition(s), in force" in done.stdout, done.stderr
    assert 'grown = "3:1"' in toml(broker).read_text() and 'retention_age = "30d"' in toml(broker).read_text()
    broker.kill()
    done = broker.kmq("topics", "set", "orders", "--partitions", "3", "--force")
    assert done.returncode == 0 and "when the router has adopted it" in done.stdout
    broker.up()
    assert "3 partition(s)" in broker.kmq("topics", "show", "orders").stdout
    assert sorted(path.name for path in broker.data.glob("orders*.log")) == [f"orders-{n}.log" for n in range(3)]
    assert broker.kmq("verify").returncode == 0
