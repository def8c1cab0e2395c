"""A data directory of each format that was ever released opens, with every record where it was, and is raised to the newest.

tests/formats/<version>.tar.xz were written by brokers of those releases: plain lines, a topic of two partitions, a
producer with the ids 1 to 100, and an orderly stop. 2-marks.tar.xz is of an early version 2, to which `.@` was a part of a key.
"""

import shutil
import tarfile
from pathlib import Path

import pytest

from kmq.log import identity

KEPT = sorted((Path(__file__).parents[1] / "formats").glob("*.tar.xz"))
MARKS = KEPT[0].with_name("2-marks.tar.xz")


def lines_of(data: Path, directory: str) -> list[bytes]:
    return b"".join(path.read_bytes() for path in sorted((data / directory).glob("*.log"))).splitlines()


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name.split(".")[0])
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
    assert again.stdout == "stored 100, last seq 1000\n", "the producer's ids are known"
    broker.send_lines([b"wide.k%d|0|n%d|after" % (n, n) for n in range(20)])
    broker.wait_routed(1020)
    broker.down()

    assert identity.version(str(broker.data))[0] == identity.FORMAT
    assert broker.wal()[:1000] == wal
    for directory, lines in before.items():
        assert lines_of(directory, ".")[: len(lines)] == lines
    done = broker.kmq("verify")
    assert (done.returncode, done.stdout) == (0, "no damage\n")


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
    names = [f"{version}.tar.xz" for version in range(1, identity.FORMAT + 1)]
    assert sorted(path.name for path in KEPT) == sorted([*names, "2-marks.tar.xz"])
