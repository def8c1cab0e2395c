"""A copy off the machine, as a user has it: a broker with KMQ_TIER, its status, a store that is away, kills."""

import contextlib
import gzip
import json
import os
import shutil
import signal
import tarfile
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from brokers import Broker
from waiting import until

import kmq
from kmq.log import reader, wal
from kmq.message import record
from kmq.tier.commits import CommitLog, lineages
from kmq.tier.store import open_store
from kmq.tier.turn import full_key


@pytest.fixture
def broker(tmp_path):
    made = Broker(tmp_path / "b")
    made.gateway = False
    made.env |= {"KMQ_TIER": f"file://{tmp_path}/store", "KMQ_TIER_EVERY": "100ms"}
    yield made
    made.close()


def copied(store):
    """The lines of the WAL that the commits in a store name, as zcat reads them, in the order of their seqs."""
    place, found = open_store(f"file://{store}"), {}
    for lineage in lineages(place):
        for row in CommitLog(place, lineage, "reader").read().wal:
            found[full_key(lineage, row.values["key"])] = row.number("first")
    paths = [Path(store, key) for key in sorted(found, key=found.__getitem__)]
    return b"".join(gzip.decompress(path.read_bytes()) for path in paths)


def local(broker):
    data = str(broker.data)
    return b"".join(reader.read(data, 1, wal.last_stored(data)[0]))


def tier(broker):
    return json.loads(broker.kmq("tier", "status", "--json").stdout)


def is_whole(broker, store):
    return copied(store) == local(broker)


def test_a_minute_later_the_copy_has_every_line_and_status_says_so(broker, tmp_path):
    broker.up()
    broker.kmq("produce", "orders", text="".join(f"{n}\n" for n in range(500)))
    until(lambda: is_whole(broker, tmp_path / "store"), "the copy is whole", broker.log)
    found = until(lambda: (shown := tier(broker))["age"] == 0 and shown, "the copy is not behind")
    assert found["last_seq"] == wal.last_stored(str(broker.data))[0] and found["problem"] == ""
    assert broker.status()["tier"]["state"] == "ready"
    assert broker.kmq("tier", "verify", "--deep").returncode == 0
    victim = next((tmp_path / "store").glob("*/wal/*.log.gz"))
    victim.unlink()
    done = broker.kmq("tier", "verify")
    assert done.returncode == 1 and "is missing" in done.stdout


def test_a_broker_whose_store_is_away_takes_messages_and_copies_them_later(broker, tmp_path):
    broker.up()
    until(lambda: "event=tier_claimed" in broker.log(), "it has the claim", broker.log)
    broker.down()
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("a file in the place of the directory")
    broker.up()
    assert broker.kmq("produce", "orders", text="1\n2\n3\n").returncode == 0
    until(lambda: "event=tier_store_away" in broker.log(), "it says that the store is away", broker.log)
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    until(lambda: is_whole(broker, tmp_path / "store"), "the copy is whole", broker.log)
    until(lambda: "event=tier_store_back" in broker.log(), "it says so", broker.log)


def test_a_killed_copy_goes_on_where_it_was_and_a_clone_writes_nothing(broker, tmp_path):
    broker.up()
    for round in range(5):
        broker.kmq("produce", "orders", text="".join(f"{round} {n}\n" for n in range(100)))
        with contextlib.suppress(ProcessLookupError):  # it has just ended, and is started again
            os.kill(int(broker.status()["tier"]["pid"]), signal.SIGKILL)
    until(lambda: is_whole(broker, tmp_path / "store"), "the copy is whole", broker.log)
    broker.down()
    shutil.copytree(broker.data, tmp_path / "clone", symlinks=True)
    broker.up()
    broker.kmq("produce", "orders", text="later\n")
    until(lambda: is_whole(broker, tmp_path / "store"), "the copy is whole", broker.log)
    number = tier(broker)["commits"]
    clone = Broker(tmp_path / "c", tmp_path / "clone")
    clone.gateway = False
    clone.env |= {name: broker.env[name] for name in ("KMQ_TIER", "KMQ_TIER_EVERY")}
    try:
        clone.up()
        until(lambda: "event=tier_stands" in clone.log(), "the clone says why it copies nothing", clone.log)
        assert "problem=fenced" in clone.log() and tier(broker)["commits"] == number
        assert clone.kmq("produce", "orders", text="x\n").returncode == 0
        refused = clone.kmq("tier", "claim", "--yes")
        assert refused.returncode == 65 and "than this directory" in refused.stderr
    finally:
        clone.close()


def test_without_the_setting_there_is_no_such_process(broker):
    del broker.env["KMQ_TIER"]
    broker.up()
    assert "tier" not in broker.status() and not (broker.data / "tier").exists()
    done = broker.kmq("tier", "status")
    assert done.returncode == 78 and "KMQ_TIER is not set" in done.stderr


def test_a_bundle_has_the_status_of_the_copy_and_no_credentials(broker, tmp_path):
    secrets = {
        "AWS_ACCESS_KEY_ID": "AKIAHIDDEN",
        "AWS_SECRET_ACCESS_KEY": "hidden/secret",
        "AWS_SESSION_TOKEN": "hidden.token",
    }
    broker.env |= secrets
    broker.up()
    broker.kmq("produce", "orders", text="1\n2\n3\n")
    until(lambda: is_whole(broker, tmp_path / "store"), "the copy is whole", broker.log)
    (broker.data / "tier/status").write_text(f"away: {' '.join(secrets.values())}\n")  # as if a store had repeated them
    done = broker.run("kmq", "bundle", str(tmp_path / "b.tar.gz"), "--no-verify")
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        texts = {entry.name: tar.extractfile(entry).read().decode() for entry in tar if entry.isfile()}
    found = json.loads(texts["kmq-bundle/tier.json"])
    assert found["last_seq"] >= 3 and found["problem"].startswith("away: ")
    assert not [name for name, text in texts.items() if any(secret in text for secret in secrets.values())]
    (check,) = [each for each in json.loads(texts["kmq-bundle/doctor.json"])["checks"] if each["check"] == "tier"]
    assert check["level"] == "ok"


# --- the way back ----------------------------------------------------------------------------------------------------


def queue_of(broker, topic="orders"):
    data = str(broker.data)
    log = reader.partition(data, topic, 0)
    return b"".join(lines for _, lines in log.chunks(log.first_offset)).splitlines()


def test_a_broker_whose_disk_is_lost_comes_back_with_all_that_was_copied(broker, tmp_path):
    broker.up()
    sent = "".join(f"orders|0|{n}|message {n}\n" for n in range(1, 2001))
    assert broker.kmq("produce", "--raw", "--producer", "p", text=sent).returncode == 0, broker.log()
    until(lambda: is_whole(broker, tmp_path / "store"), "the copy is whole", broker.log)
    before = queue_of(broker)
    broker.lose_disk()
    refused = broker.kmq("up", "--no-gateway")
    assert refused.returncode == 65 and "kmq restore --yes" in refused.stderr and not (broker.data / "id").exists()
    asked = broker.kmq("restore")
    assert asked.returncode == 69 and "gone for good" in asked.stderr
    assert broker.kmq("restore", "--dry-run").stdout.endswith("nothing was changed\n")
    done = broker.kmq("restore", "--yes")
    assert done.returncode == 0 and "restored up to seq" in done.stdout, done.stderr
    assert queue_of(broker) == before
    broker.up()
    again = broker.kmq("produce", "--raw", "--producer", "p", text=sent)  # each id is known
    assert again.returncode == 0, again.stderr
    broker.kmq("produce", "orders", text="new\n")
    until(lambda: any(b"|new" in line for line in queue_of(broker)), "the new message is there", broker.log)
    assert queue_of(broker)[: len(before)] == before and len(queue_of(broker)) == len(before) + 1
    log = reader.partition(str(broker.data), "orders", 0)
    assert log.end_offset() > 10**9, "the lost broker may have given out the offsets after the copy"
    until(lambda: tier(broker)["age"] == 0 and tier(broker)["commits"] >= 3, "the new lineage is copied", broker.log)
    verified = broker.kmq("verify")
    assert verified.stdout.endswith("no damage\n"), verified.stdout


def test_a_rehearsal_beside_the_living_broker(broker, tmp_path):
    broker.up()
    broker.kmq("produce", "orders", text="1\n2\n3\n")
    until(lambda: is_whole(broker, tmp_path / "store"), "the copy is whole", broker.log)
    done = broker.kmq("restore", "--drill", "--data", str(tmp_path / "drill"))
    assert done.returncode == 0, done.stderr
    broker.kmq("produce", "orders", text="4\n")
    until(lambda: is_whole(broker, tmp_path / "store"), "the copy goes on", broker.log)
    assert "tier_stands" not in broker.log()
    refused = broker.kmq("restore", "--drill", "--data", str(tmp_path / "drill"))
    assert refused.returncode == 73 and "is not empty" in refused.stderr


def test_with_the_setting_no_stage_makes_a_data_directory(broker):
    done = broker.run("python", "-m", "stages.durability")
    assert done.returncode == 78 and "kmq restore --if-empty" in done.stderr and not (broker.data / "id").exists()
    done = broker.kmq("restore", "--if-empty")
    assert done.returncode == 0 and (broker.data / "id").exists()


def test_the_part_of_the_wal_that_the_store_has_makes_room_on_a_full_quota(broker, tmp_path):
    """The WAL has no limits of its own."""
    broker.env |= {"KMQ_DATA_QUOTA": "64MiB", "KMQ_SEGMENT_BYTES": "1MiB"}
    broker.up()
    made = broker.kmq("topics", "create", "orders", "--set", "retention_bytes=1MiB")
    assert made.returncode == 0, made.stderr
    text = "".join(f"{n} {'x' * 990}\n" for n in range(5000))

    def produce(rounds):
        for _ in range(rounds):
            assert broker.kmq("produce", "orders", text=text).returncode == 0, broker.log()

    produce(3)
    broker.down()  # router.ckpt and producers.ckpt cover all of it
    assert "event=room_from_tier" not in broker.log()
    broker.up()
    produce(3)
    until(lambda: "event=room_from_tier" in broker.log(), "the WAL gives room", broker.log)
    assert "log=append" in broker.log()
    assert reader.first_seq(str(broker.data)) > 1
    until(lambda: tier(broker)["age"] == 0, "the copy is not behind", broker.log)
    assert copied(tmp_path / "store").count(b"|orders|") == 6 * 5000, "what left the disk for room is in the store"
    assert broker.kmq("verify").returncode == 0


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 20))])
def test_a_node_that_is_lost_under_load_comes_back_with_all_that_the_copy_said_it_had(broker, tmp_path, number):
    """The producer does not notice the loss: what it sends afterwards is stored, and nothing of it is taken for a repeat."""
    broker.up()
    port = broker.pipes / "ingress.port"
    deliveries, enough = [], threading.Event()

    def load():
        with kmq.Producer(port=lambda: int(port.read_text() or 0), producer="p", max_in_flight=500) as producer:
            while not enough.is_set():
                deliveries.append((b"m%d" % len(deliveries), producer.send("orders", b"m%d" % len(deliveries))))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        until(lambda: tier(broker)["last_seq"] > 2000 * (1 + number % 5), "the copy follows", broker.log)
        copied = tier(broker)["last_seq"]
        broker.lose_disk()
        last = len(deliveries) - 1
        acked = [(value, each) for value, each in deliveries[: last + 1] if each.done]
        done = broker.kmq("restore", "--yes")
        assert done.returncode == 0, done.stderr
        restored = wal.last_stored(str(broker.data))[0]
        assert len(acked) > 1000 and restored >= copied
        broker.up()
        until(
            lambda: len(deliveries) > last + 2000 and deliveries[last + 2000][1].done,
            "the producer goes on",
            broker.log,
        )
    finally:
        enough.set()
        thread.join()
    stored = defaultdict(list)
    for line in queue_of(broker):
        stored[line.rpartition(b"|")[2]].append(record.seq_of(line))
    for value, delivery in deliveries:
        assert delivery.error is None
        is_lost = (value, delivery) in acked and copied < delivery.seqs[0]
        assert stored[value] == [*delivery.seqs] or (is_lost and not stored[value]), value
    assert broker.kmq("verify").stdout.endswith("no damage\n")
