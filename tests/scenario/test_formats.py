"""A data directory of each format that was ever released opens, with every record where it was, and is raised to the newest.

tests/formats/<version>.tar.xz were written by brokers of those releases: plain lines, a topic of two partitions, a
producer with the ids 1 to 100, and an orderly stop. 2-marks.tar.xz is of an early version 2, to which `.@` was a part of a key.
2-murmur2.tar.xz is of the last release of version 2: its topic `wide` is declared with murmur2, and has grown. 3.tar.xz is the
same, opened by the last release of version 3. 4.tar.xz is 3.tar.xz with a start: orders/0 begins with offset 40.
"""

import os
import re
import shutil
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import pytest
from made_up import no_room

from kmq.log import identity
from kmq.log.index import IndexWriter

KEPT = sorted((Path(__file__).parents[1] / "formats").glob("*.tar.xz"))
MARKS, MURMUR2, ROUTED, STARTED = (KEPT[0].with_name(f"{name}.tar.xz") for name in ("2-marks", "2-murmur2", "3", "4"))
WITH_ALL = [path for path in KEPT if path != STARTED]  # no record was deleted
WIDE = "topics/wide"


def lines_of(data: Path, directory: str) -> list[bytes]:
    return b"".join(path.read_bytes() for path in sorted((data / directory).glob("*.log"))).splitlines()


@pytest.mark.parametrize("kept", WITH_ALL, ids=lambda path: path.name.split(".")[0])
def test_a_data_directory_of_an_older_release_opens(broker, kept):
    with tarfile.open(kept) as archive:
        archive.extractall(broker.data, filter="tar")
    before = {path.parent: lines_of(path.parent, ".") for path in broker.data.glob("topics/*/*/*.log")}
    wal = broker.wal()
    assert len(wal) == 1000 and sum(map(len, before.values())) == 1000
    assert broker.kmq("verify").stdout.endswith("no damage\n")

    broker.gateway = False
    broker.up()
    again = broker.kmq("produce", "orders.us", "--producer", "import-7", text="\n".join(f"row {n}" for n in range(100)))
    assert again.stdout == "stored 0, 100 were stored before under this name, last seq 1000\n"
    broker.send_lines([b"wide.k%d|0|n%d|after" % (n, n) for n in range(20)])
    broker.wait_routed(1020)
    broker.down()

    # Only what an older release would misread raises the version: to go back is possible until then.
    is_rerouted = kept in (MURMUR2, ROUTED)
    assert identity.version(str(broker.data))[0] == (identity.ROUTED if is_rerouted else identity.LABELLED)
    assert broker.wal()[:1000] == wal
    for directory, lines in before.items():
        assert lines_of(directory, ".")[: len(lines)] == lines
    done = broker.kmq("verify")
    assert (done.returncode, done.stdout) == (0, "no damage\n")


def test_a_data_directory_in_which_a_partition_was_truncated_opens(broker):
    with tarfile.open(STARTED) as archive:
        archive.extractall(broker.data, filter="tar")
    before = {path.parent: lines_of(path.parent, ".") for path in broker.data.glob("topics/*/*/*.log")}
    assert broker.kmq("verify").stdout.endswith("no damage\n")
    broker.gateway = False
    broker.up()
    broker.send_lines([b"orders.k%d|0|n%d|after" % (n, n) for n in range(20)])
    broker.wait_routed(1021)
    broker.down()
    assert identity.version(str(broker.data))[0] == identity.STARTED
    assert (len(lines_of(broker.data, "topics/orders/0")), (broker.data / "orders.log").exists()) == (80, True)
    for directory, lines in before.items():
        assert lines_of(directory, ".")[: len(lines)] == lines


def test_a_line_stored_before_marks_keeps_its_place_and_a_later_line_has_its_own(broker):
    with tarfile.open(MARKS) as archive:
        archive.extractall(broker.data, filter="tar")
    broker.gateway = False
    broker.up()
    again = [b"%b|0||since" % line.split(b"|", 3)[2] for line in broker.wal()[:900]]
    broker.send_lines(again)
    broker.wait_routed(1900)
    broker.down()
    assert identity.marks_from(str(broker.data)) == 1001
    places = {path.parent: lines_of(path.parent, ".") for path in broker.data.glob("topics/*/*/*.log")}
    moved = {str(path.relative_to(broker.data / "topics")): len(lines) for path, lines in places.items()}
    assert moved["test.probe/0"] == moved["orders.eu/0"] == 100, "since then: by their marks"
    assert len(lines_of(broker.data, "topics/wide/1")) > 300
    assert b"unknown_partition" in b"".join(lines_of(broker.data, "topics/dead/0")), "orders.@3"

    for path in places:
        shutil.rmtree(path)
    broker.up()
    broker.wait_routed(1900)
    broker.down()
    assert {path: lines_of(path, ".") for path in places} == places
    done = broker.kmq("verify")
    assert (done.returncode, done.stdout) == (0, "no damage\n")


def test_one_of_each_format_is_kept():
    names = [f"{version}.tar.xz" for version in range(1, identity.FORMAT)]
    assert sorted(path.name for path in KEPT) == sorted([*names, MARKS.name, MURMUR2.name])


def version_of(broker) -> str:
    return (broker.data / "format").read_text()[:2]


@pytest.mark.parametrize("change", ["murmur2", "growth"])
def test_the_first_topic_that_an_older_release_would_misread_raises_the_version(broker, change):
    broker.gateway = False
    broker.up()
    broker.send_lines([b"orders.k%d|0||x" % n for n in range(50)])
    broker.wait_routed(50)
    assert version_of(broker) == "2 "
    command = ("create", "jobs") if change == "murmur2" else ("set", "orders", "--force")
    assert broker.kmq("topics", *command, "--partitions", "2").returncode == 0
    broker.wait_routed(51)
    assert version_of(broker) == "3 " and "event=format_raised to=3" in broker.log()
    broker.down()
    assert broker.kmq("verify").stdout == "no damage\n"


@pytest.mark.parametrize("repair", [False, True])
def test_verify_leaves_a_directory_of_a_later_release_alone_and_calls_it_no_damage(broker, repair):
    identity.open_data(str(broker.data))
    text = identity.format_text(1, 1, identity.FORMAT + 1)
    (broker.data / "format").write_text(f"{text}\n")
    before = sorted(path.name for path in broker.data.rglob("*"))
    done = broker.kmq("verify", *(["--repair"] if repair else []))
    assert done.returncode == 78 and not done.stdout
    assert f"of another release; {'repair' if repair else 'check'} it with that release" in done.stderr
    assert sorted(path.name for path in broker.data.rglob("*") if path.name != ".owner") == before


def partitions_of(data: Path) -> list[list[bytes]]:
    return [lines_of(data, f"{WIDE}/{number}") for number in range(4)]


def write_silent_checkpoint(data: Path) -> None:
    """Write router.ckpt as a release did that knew neither partitioners nor growth."""
    text, rows = "1000\n", Counter[str]()
    for path in sorted(data.glob("topics/*/*/*.log")):
        topic, number = path.parts[-3:-1]
        lines = path.read_bytes().split(b"\n")[:-1]
        rows[topic] += 1
        text += f"{topic}|{number}|{len(lines)}|{lines[-1].split(b'|')[0].decode()}|{path.stat().st_size}\n"
    for topic, count in rows.items():
        from_seq = re.search(r"from_seq = (\d+)", (data / f"topics/{topic}/topic.toml").read_text())[1]
        text += f"{topic}|{from_seq}|{','.join('0' * count)}\n"
    (data / "router.ckpt").write_text(f"{text}crc32|{zlib.crc32(text.encode())}\n")


def forget_routing(data: Path) -> None:
    """Write topic.toml as the release after it did: without the partitioner, and without growth."""
    toml = data / WIDE / "topic.toml"
    lines = toml.read_text().splitlines()
    toml.write_text("".join(f"{line}\n" for line in lines if not line.startswith(("partitioner", "grown"))))


@pytest.mark.parametrize("is_repaired", [False, True], ids=["started", "repaired"])
@pytest.mark.parametrize("is_forgotten", [False, True], ids=["declared", "recorded"])
def test_a_checkpoint_that_is_silent_about_a_topic_moves_none_of_its_records(broker, is_forgotten, is_repaired):
    with tarfile.open(MURMUR2) as archive:
        archive.extractall(broker.data, filter="tar")
    before, toml = partitions_of(broker.data), (broker.data / WIDE / "topic.toml").read_text()
    write_silent_checkpoint(broker.data)
    if is_forgotten:
        forget_routing(broker.data)
    found = broker.kmq("verify").stdout
    wrong = "damage: topics/wide/topic.toml: byte 0: says grown '', but it has grown '601:2'"
    assert found.splitlines()[0] == (wrong if is_forgotten else "no damage") and len(found.splitlines()) < 3
    if is_repaired:
        assert broker.kmq("verify", "--repair").returncode == 0
        assert partitions_of(broker.data) == before

    broker.gateway = False
    broker.up()
    broker.send_lines([b"wide.k%d|0|n%d|after" % (n, n) for n in range(20)])
    broker.wait_routed(1020)
    broker.down()
    after = partitions_of(broker.data)
    assert [lines[: len(old)] for lines, old in zip(after, before, strict=True)] == before
    assert sorted((broker.data / WIDE / "topic.toml").read_text().split("\n")) == sorted(toml.split("\n"))
    keys = [{line.split(b"|")[2] for line in lines if int(line.split(b"|")[0]) > 600} for lines in after]
    assert sum(map(len, keys)) == len(set.union(*keys)), "each key is in one partition"
    assert broker.kmq("verify").stdout == "no damage\n"


def write_queue(log: Path, lines: list[bytes]) -> None:
    log.write_bytes(b"".join(line + b"\n" for line in sorted(lines, key=lambda line: int(line.split(b"|")[0]))))
    index = log.with_suffix(".idx")
    index.write_bytes(b"")
    with log.open("rb") as file:
        writer = IndexWriter(str(index), no_room, by_seq=False, label_of=str(log))
        writer.resume(file.fileno(), log.stat().st_size, 0)
        writer.seal()


def seq_of(line: bytes) -> int:
    return int(line.split(b"|")[0])


def test_what_an_older_release_led_elsewhere_is_in_a_queue_once_or_the_repair_names_it(broker):
    with tarfile.open(MURMUR2) as archive:
        archive.extractall(broker.data, filter="tar")
    queues = partitions_of(broker.data)
    led = [line for line in queues[0] if seq_of(line) > 650][10:20]  # to partition 2 instead
    doubled, last = queues[1][-30:-15], queues[1][-3:]  # in partition 3 too, most of what it has; three at its end
    lost = queues[0][50:53]
    queues[0] = [line for line in queues[0] if line not in led and line not in lost]
    queues[2] += led
    queues[3] = sorted([*queues[3], *doubled], key=seq_of) + last
    for number, lines in enumerate(queues):
        write_queue(broker.data / f"{WIDE}/{number}/{0:020d}.log", lines)
    queues = partitions_of(broker.data)
    write_silent_checkpoint(broker.data)

    done = broker.kmq("verify", "--repair")
    assert done.returncode == 0, done.stdout
    assert "topics/wide/0: 3 records were in no queue" in done.stdout
    named = [row.split("|")[2] for row in (broker.data / "quarantine/log").read_text().splitlines()]
    assert named == [str(seq_of(line)) for line in lost] and os.listdir(broker.data / "quarantine") == ["log"]
    healed = partitions_of(broker.data)
    for number, lines in enumerate(queues):
        moved = {*led, *doubled, *last}
        assert len(healed[number]) == len(lines), "offsets stay"
        assert all(new == old or old in moved for new, old in zip(healed[number], lines, strict=True))
    assert [line.split(b"|", 3)[3] for line in healed[2]] == [line.split(b"|", 3)[3] for line in queues[2]]
    assert broker.kmq("verify").stdout == "no damage\n"
    assert broker.kmq("verify", "--repair").stdout == "nothing to heal\n"

    broker.gateway = False
    broker.up()
    end = len(broker.wal())
    broker.send_lines([b"wide.k%d|0|n%d|after" % (n, n) for n in range(20)])
    broker.wait_routed(end + 20)
    broker.down()
    stored = [line for path in broker.data.glob("topics/*/*/*.log") for line in path.read_bytes().split(b"\n") if line]
    has = Counter(map(seq_of, stored))
    assert {seq: has[seq] for seq in map(seq_of, broker.wal()) if has[seq] != 1} == dict.fromkeys(map(seq_of, lost), 0)
    payloads = [line.rsplit(b"|", 1)[1] for line in stored]
    assert all(line.rsplit(b"|", 1)[1] in payloads for line in lost), "under new seqs"
    assert [len(lines) >= len(old) for lines, old in zip(partitions_of(broker.data), healed, strict=True)] == [True] * 4
    assert broker.kmq("verify").stdout == "no damage\n"
