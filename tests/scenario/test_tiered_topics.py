"""A topic that is larger than the disk, as users have it: every door shows the same messages, whatever is killed or away."""

import contextlib
import json
import os
import signal
import subprocess

import pytest
from brokers import Broker
from cold_doors import DOORS, by_grpc, by_http, by_log, empty_cache, port
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from waiting import until

from kmq.log import reader, rows, segment

COUNT = 30_000
WORDS = [f"{n} {'x' * 150}" for n in range(COUNT)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A topic of five MiB, of which one or two lie on the disk."""
    root = tmp_path_factory.mktemp("tiered")
    made = Broker(root / "b")
    made.env |= {
        "KMQ_TIER": f"file://{root}/store",
        "KMQ_TIER_EVERY": "100ms",
        "KMQ_TIER_OBJECT": "1 MiB",
        "KMQ_TIER_CACHE": "4 MiB",
        "KMQ_SEGMENT_BYTES": "256 KiB",
    }
    made.up()
    said = made.kmq("topics", "create", "orders", "--set", "tier=on", "--set", "local_retention_bytes=1MiB")
    assert said.returncode == 0, said.stderr
    assert made.kmq("produce", "orders", text="".join(f"{word}\n" for word in WORDS)).returncode == 0, made.log()
    wait_until_cold(made)
    yield made
    made.close()


def directory(broker, topic="orders"):
    return f"{broker.data}/topics/{topic}/0"


def wait_until_cold(broker, topic="orders"):
    """What the local limit allows is all that is left on the disk."""
    until(
        lambda: segment.listing(directory(broker, topic))[0][0] > COUNT // 2, "old segments leave the disk", broker.log
    )


@pytest.mark.parametrize("door", DOORS)
def test_every_door_shows_the_same_messages_from_the_first_one_on(broker, door):
    empty_cache(broker)
    assert door(broker, "orders", COUNT) == WORDS


def test_ends_sizes_and_objects_are_shown(broker):
    shown = json.loads(broker.kmq("topics", "show", "orders", "--json").stdout)
    [log] = shown["logs"]
    assert (log["first_offset"], log["last_offset"], log["messages"]) == (0, COUNT - 1, COUNT)
    [row] = rows.of(f"{broker.data}/topics/orders/0").rows[-1:]
    assert 0 < log["local_start"] <= row.next == log["tier_end"] and log["tier_objects"] > 3
    [topic] = [
        each
        for each in json.loads(broker.kmq("topics", "list", "--json").stdout)["topics"]
        if each["topic"] == "orders"
    ]
    assert topic["tier_bytes"] == log["tier_bytes"] > 3 << 20
    assert f"{log['local_start']:,}" in broker.kmq("topics", "describe", "orders").stdout
    status = json.loads(broker.kmq("tier", "status", "--json").stdout)
    assert (status["partitions"], status["row_bytes"]) == (1, log["tier_bytes"])
    assert status["rows"] == log["tier_objects"] and status["behind_bytes"] < 2 << 20
    copy = json.loads(broker.kmq("status", "--json").stdout)["copy"]
    assert (copy["objects"], copy["bytes"]) == (log["tier_objects"], log["tier_bytes"])
    assert shown["limits"]["tier"]["value"] == "on" and shown["limits"]["local_retention_bytes"]["value"] == 1 << 20
    objects = json.loads(broker.kmq("tier", "ls", "orders", "--json").stdout)
    assert objects[0]["from"] == "0" and {each["what"] for each in objects} == {"add orders/0"}
    assert broker.kmq("tier", "verify", "--deep").returncode == 0
    done = broker.kmq("verify")
    assert done.returncode == 0, done.stdout


def test_the_cache_stays_within_its_bounds(broker):
    by_http(broker, "orders", COUNT)
    sizes = [
        os.path.getsize(f"{path}/{name}") for path, _, names in os.walk(f"{broker.data}/tier/cache") for name in names
    ]
    assert 0 < sum(sizes) <= 5 << 20


def test_a_restart_finds_the_same_and_new_messages_follow(broker):
    broker.down()
    broker.up()
    assert reader.partition(str(broker.data), "orders", 0).first_offset == 0
    assert by_grpc(broker, "orders", COUNT) == WORDS


def test_what_cannot_be_is_refused_by_name(broker):
    table = broker.kmq("topics", "set", "orders", "tier=off", "cleanup=compact")
    assert table.returncode != 0 and "old records lie in KMQ_TIER" in table.stderr
    assert broker.kmq("topics", "create", "table", "--set", "cleanup=compact").returncode == 0
    tiered = broker.kmq("topics", "set", "table", "tier=on")
    assert tiered.returncode != 0 and "cleanup=compact" in tiered.stderr
    said = broker.kmq("topics", "create", "plain")
    assert said.returncode == 0
    said = broker.kmq("topics", "set", "plain", "tier=on")
    assert said.returncode == 0 and "retention_bytes" in said.stdout and "as retention_age" in said.stdout


def test_kills_of_the_copy_and_of_the_router_lose_nothing(broker):
    words = [f"k{n} {'y' * 150}" for n in range(COUNT // 2)]
    assert (
        broker.kmq("topics", "create", "killed", "--set", "tier=on", "--set", "local_retention_bytes=1MiB").returncode
        == 0
    )
    for number, at in enumerate(range(0, len(words), 1500)):
        text = "".join(f"{word}\n" for word in words[at : at + 1500])
        assert broker.kmq("produce", "killed", text=text).returncode == 0
        victim = ("tier", "router")[number % 2]
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(broker.status()[victim]["pid"]), signal.SIGKILL)
    until(lambda: segment.listing(directory(broker, "killed"))[0][0] > 0, "old segments leave the disk", broker.log)
    done = broker.kmq("consume", "killed", "--from", "earliest")
    assert done.stdout.splitlines() == words
    assert broker.kmq("verify").returncode == 0


def test_old_records_come_back_to_the_disk(broker):
    refused = broker.kmq("tier", "fetch", "killed")
    assert refused.returncode == 78 and "kmq topics set killed local_retention_bytes=" in refused.stderr
    assert broker.kmq("tier", "fetch", "killed", "--partition", "1").returncode == 78
    assert broker.kmq("topics", "set", "killed", "tier=off").returncode == 0
    before = broker.kmq("consume", "killed", "--from", "earliest").stdout
    shown = json.loads(broker.kmq("topics", "show", "killed", "--json").stdout)["logs"][0]
    assert 0 == shown["first_offset"] < shown["local_start"]
    found = rows.of(directory(broker, "killed")).rows
    done = broker.kmq("tier", "fetch", "killed")
    assert done.returncode == 0 and done.stdout.endswith("bytes were fetched\n"), done.stderr
    assert json.loads(broker.kmq("topics", "show", "killed", "--json").stdout)["logs"][0]["local_start"] == 0
    assert rows.of(directory(broker, "killed")).rows == found
    empty_cache(broker)
    assert broker.kmq("consume", "killed", "--from", "earliest").stdout == before
    assert not os.path.exists(f"{broker.data}/tier/cache/killed") and broker.kmq("verify").returncode == 0
    assert broker.kmq("tier", "fetch", "killed").stdout == "topic killed: 0 bytes were fetched\n"


def test_a_kill_of_the_command_or_a_broker_that_is_down_changes_nothing_for_readers(broker):
    assert broker.kmq("topics", "set", "orders", "local_retention_bytes=").returncode == 0
    process = subprocess.Popen(["kmq", "tier", "fetch", "orders"], env=broker.env, cwd=broker.root)
    until(lambda: os.path.exists(f"{broker.data}/topics/.fetched/.owner"), "it has begun", broker.log)
    process.kill()
    process.wait()
    broker.down()
    done = broker.kmq("tier", "fetch", "orders")
    assert done.returncode == 0, done.stderr
    broker.up()
    until(lambda: segment.listing(directory(broker))[0][0] == 0, "all is on the disk", broker.log)
    empty_cache(broker)
    assert by_log(broker, "orders", COUNT) == WORDS and not os.path.exists(f"{broker.data}/tier/cache")
    assert broker.kmq("topics", "set", "orders", "local_retention_bytes=1MiB").returncode == 0
    wait_until_cold(broker)


def test_a_drill_with_all_records_is_read_without_the_store(broker, tmp_path):
    until(lambda: json.loads(broker.kmq("tier", "status", "--json").stdout)["age"] == 0, "the copy is not behind")
    done = broker.kmq("restore", "--drill", "--download", "--data", str(tmp_path / "drill" / "data"))
    assert done.returncode == 0 and "not downloaded" not in done.stdout, done.stderr
    drill = Broker(tmp_path / "drill")
    try:
        drill.up()
        assert drill.kmq("produce", "orders", text="new\n").returncode == 0
        assert drill.kmq("consume", "orders", "--from", "earliest").stdout.splitlines() == [*WORDS, "new"]
        assert drill.kmq("verify").returncode == 0
    finally:
        drill.close()


def test_the_objects_are_read_without_any_tool_of_kmq(broker):
    objects = f"{broker.env['KMQ_TIER'].removeprefix('file://')}/*/topics/orders/*/0/*.log.gz"
    done = broker.run("sh", "-c", f"cat {objects} | zcat | awk -F'|' '{{print $NF}}'")
    assert sorted(done.stdout.splitlines()) == sorted(WORDS[: rows.of(directory(broker)).end])


def test_deleting_records_up_to_the_middle_of_an_object_moves_the_start_at_once(broker):
    """By Kafka's DeleteRecords. The object of the new start stays whole, the one before it is dropped."""
    second = rows.of(directory(broker)).rows[1]
    start = second.base + 7
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port(broker, 'kafka')}"})
    [done] = admin.delete_records([TopicPartition("orders", 0, start)]).values()
    assert done.result(timeout=60).low_watermark == start
    assert reader.partition(str(broker.data), "orders", 0).first_offset == start
    until(lambda: rows.of(directory(broker)).rows[0] == second, "the row before the start is dropped", broker.log)
    empty_cache(broker)
    assert broker.kmq("consume", "orders", "--from", "earliest").stdout.splitlines() == WORDS[start:]


def test_new_partitions_begin_without_rows_beside_those_that_have_some(broker):
    start = reader.partition(str(broker.data), "orders", 0).first_offset
    assert broker.kmq("topics", "set", "orders", "--partitions", "3", "--force").returncode == 0
    words = [f"g{n}" for n in range(300)]
    assert broker.kmq("produce", "orders", text="".join(f"{word}\n" for word in words)).returncode == 0
    assert reader.partition(str(broker.data), "orders", 0).first_offset == start
    assert not any(os.path.exists(rows.path_of(f"{broker.data}/topics/orders/{number}")) for number in (1, 2))
    found = broker.kmq("consume", "orders", "--from", "earliest").stdout.splitlines()
    assert sorted(found) == sorted([*WORDS[start:], *words])


def test_after_the_loss_of_the_disk_history_is_read_from_the_store(broker):
    words = [f"r{n} {'z' * 150}" for n in range(COUNT // 2)]
    asked = "topics", "create", "lost", "--set", "tier=on", "--set", "local_retention_bytes=1MiB"
    assert broker.kmq(*asked).returncode == 0
    assert broker.kmq("produce", "lost", text="".join(f"{word}\n" for word in words)).returncode == 0
    until(lambda: segment.listing(directory(broker, "lost"))[0][0] > 0, "old segments leave the disk", broker.log)
    until(lambda: json.loads(broker.kmq("tier", "status", "--json").stdout)["age"] == 0, "the copy is not behind")
    broker.lose_disk()
    done = broker.kmq("restore", "--yes")
    assert done.returncode == 0, done.stderr
    broker.up()
    assert broker.kmq("produce", "lost", text="new\n").returncode == 0
    found = broker.kmq("consume", "lost", "--from", "earliest").stdout.splitlines()
    assert found == [*words, "new"]
    assert broker.kmq("verify").returncode == 0
