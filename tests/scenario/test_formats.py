"""A data directory of each format that was ever released opens, with every record where it was, and is raised to the newest.

tests/formats/<version>.tar.xz were written by brokers of those releases: plain lines, a topic of two partitions, a
producer with the ids 1 to 100, and an orderly stop.
"""

import tarfile
from pathlib import Path

import pytest

from kmq.log import identity

KEPT = sorted((Path(__file__).parents[1] / "formats").glob("*.tar.xz"))


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


def test_one_of_each_format_is_kept():
    assert [path.name for path in KEPT] == [f"{version}.tar.xz" for version in range(1, identity.FORMAT + 1)]
