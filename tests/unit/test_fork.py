"""`kmq tier fork` on a copy that was put back: no number comes twice, also if the command is killed at any step."""

import os
import shutil
import tarfile
from pathlib import Path

import pytest
from forked import forked, send
from made_data import write_data

from kmq.broker.data_directory import read_starts, write_starts
from kmq.errors import ConfigError, CorruptError
from kmq.log import checkpoint, gaps, identity, reader, segment, topics
from kmq.log.gaps import Gap
from kmq.repair import heal
from kmq.repair.verify import Verifier
from kmq.router import fork

LINES = [b"t.%d|0||payload %d" % (n % 7, n) for n in range(300)]


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def copy(tmp_path):
    """A directory as it was put back: two partitions, several segments, an upgraded gateway.starts."""
    data = write_data(tmp_path / "data", LINES, {"t": 2}, segment_bytes=2000, group=20)
    write_starts(data, 12)
    return data


def records(data):
    """Every record of every queue: (topic, partition) → offset → line."""
    found = {}
    for topic in ("t",):
        for number in (0, 1):
            mine = found[topic, number] = {}
            for first, lines in reader.partition(data, topic, number).chunks(0):
                mine |= dict(enumerate(lines.split(b"\n")[:-1], first))
    return found


def test_a_fork_keeps_the_records_and_jumps_over_every_number_that_was_given_out(copy):
    before, was = records(copy), identity.read(copy, "id")
    made, found = forked(copy)
    assert records(copy) == before
    assert {(row.topic, row.partition): row.end_offset for row in found} == {at: len(of) for at, of in before.items()}
    assert {row.next_offset for row in found} == {made.offset}
    assert made.last_seq == 300 and min(made.next_seq, made.offset) >= fork.LEAST
    assert checkpoint.agreed_end(copy, True)[0] == made.next_seq - 1, "the framer goes on there"
    assert identity.read(copy, "id") == identity.lineage(copy) == made.id != was
    assert identity.open_data(copy) == made.id and identity.version(copy)[0] == identity.FORKED
    assert read_starts(copy) == 12 + fork.STARTS
    assert not [finding for finding in Verifier(copy, False).findings() if finding.is_damage]
    assert [gaps.read(f"{copy}/topics/t/{n}") for n in (0, 1)] == [
        (Gap(len(before["t", n]), made.offset),) for n in (0, 1)
    ]


def test_the_jump_grows_with_the_age_of_the_copy(copy):
    ns = checkpoint.agreed_end(copy, True)[1] * 1000
    young, old = fork.plan(copy, lambda: ns), fork.plan(copy, lambda: ns + 86_400 * 10**9)
    assert young.next_seq == 301 + fork.LEAST and old.next_seq - young.next_seq == 86_400 * fork.RATE
    assert fork.plan(copy, lambda: ns - 10**12).next_seq == young.next_seq, "a clock that was set back"


def test_a_fork_that_is_killed_anywhere_is_refused_at_a_start_and_finished_by_another_one(copy, tmp_path, monkeypatch):
    made = fork.plan(copy)
    whole = str(tmp_path / "whole")
    shutil.copytree(copy, whole, symlinks=True)
    forked(whole, made)
    for number in range(1000):
        data = str(tmp_path / f"{number}")
        shutil.copytree(copy, data, symlinks=True)
        left = iter(range(number))

        def guarded(call, left=left):
            def change(*arguments):
                if next(left, None) is None:
                    raise Killed
                return call(*arguments)

            return change

        with monkeypatch.context() as patch:
            for name in ("rename", "unlink", "mkdir"):
                patch.setattr(os, name, guarded(getattr(os, name)))
            patch.setattr(checkpoint.Checkpointer, "start", checkpoint.Checkpointer.run)  # without a thread
            try:
                forked(data, made)
                break
            except Killed:
                pass
        if number > 1:  # before that nothing had begun
            assert fork.begun(data) == made
            with pytest.raises(ConfigError, match="run kmq tier fork --yes again"):
                identity.open_data(data)
        again, _ = forked(data, made if fork.begun(data) is None else None)
        assert again == made
        for name in ("id", "lineage", "format", gaps.NAME, "gateway.starts", "router.ckpt"):
            with open(f"{data}/{name}", "rb") as one, open(f"{whole}/{name}", "rb") as other:
                assert one.read() == other.read(), name
        assert records(data) == records(whole)
        assert [gaps.read(f"{data}/topics/t/{n}") for n in (0, 1)] == [
            gaps.read(f"{whole}/topics/t/{n}") for n in (0, 1)
        ]
        assert not [finding for finding in Verifier(data, False).findings() if finding.is_damage]
        shutil.rmtree(data)
    assert number > 20


def test_a_replica_and_files_of_different_ages_are_refused(copy):
    with open(f"{copy}/replica", "w") as file:
        file.write("x")
    with pytest.raises(ConfigError, match="replica of a shard"):
        fork.plan(copy)
    os.unlink(f"{copy}/replica")
    last = sorted(name for name in os.listdir(f"{copy}/append") if name.endswith(".log"))[-1]
    os.unlink(f"{copy}/append/{last}")
    with pytest.raises(CorruptError):
        fork.plan(copy)


FORMATS = sorted((Path(__file__).parents[1] / "formats").glob("*.tar.xz"))


@pytest.mark.parametrize("kept", FORMATS, ids=lambda path: path.name.split(".")[0])
def test_a_directory_of_an_older_release_is_forked(tmp_path, kept):
    data = str(tmp_path)
    with tarfile.open(kept) as archive:
        archive.extractall(data, filter="tar")
    names = [f"{topic}/{number}" for topic in topics.names(data) for number in range(topics.load(data, topic)[0])]
    before = {name: Path(f"{data}/topics/{name}") for name in names}
    before = {name: b"".join(path.read_bytes() for path in sorted(of.glob("*.log"))) for name, of in before.items()}
    made, _ = forked(data)
    assert identity.version(data)[0] == identity.FORKED and identity.open_data(data) == made.id
    for name, lines in before.items():
        topic, _, number = name.partition("/")
        log = reader.partition(data, topic, int(number))
        assert b"".join(text for _, text in log.chunks(0)) == lines
        assert log.end_offset() == made.offset or topic.startswith("__")
    assert not [finding for finding in Verifier(data, False).findings() if finding.is_damage]


@pytest.mark.parametrize("what", ["before", "after", "lost before", "lost after", "tier", "restored", "format", "wal"])
def test_a_repair_heals_both_sides_of_a_gap_and_writes_no_hole(copy, what):
    forked(copy)
    send(copy, LINES[:100])
    before, (fork_of,) = records(copy), gaps.forks(copy)
    directory = f"{copy}/topics/t/0"
    firsts = [first for first, _ in segment.listing(directory)]
    damaged = {"before": firsts[0], "after": fork_of.offset, "lost before": firsts[1], "lost after": fork_of.offset}
    if what in damaged:
        path = f"{directory}/{segment.name(damaged[what])}"
        if what.startswith("lost"):
            os.unlink(path)
            os.unlink(segment.index_path(path))
        else:
            with open(path, "r+b") as file:
                file.seek(100)
                file.write(b"~~~")
    elif what == "wal":
        with open(sorted(Path(copy, "append").glob("*.log"))[-1], "r+b") as file:
            file.seek(-200, os.SEEK_END)
            file.write(b"~~~")
    else:
        os.unlink({"tier": f"{directory}/tier", "restored": f"{copy}/restored", "format": f"{copy}/format"}[what])
    assert [finding for finding in Verifier(copy, False).findings() if finding.is_damage]
    heal.repair(copy)
    assert not [finding for finding in Verifier(copy, False).findings() if finding.is_damage]
    assert records(copy) == before
    assert identity.version(copy)[0] == identity.FORKED
    assert max(path.stat().st_size for path in Path(copy).rglob("*") if path.is_file()) < 1 << 20
    send(copy, LINES[:10])
    assert sum(map(len, records(copy).values())) == 410


@pytest.mark.parametrize("way", ["start", "repair"])
def test_a_damaged_tier_of_a_directory_without_rows_is_written_again(copy, way):
    made, _ = forked(copy)
    send(copy, [b"t.1|0||later"])
    directory = f"{copy}/topics/t/0"
    good, path = gaps.read(directory), Path(directory, "tier")
    before = path.read_bytes()
    path.write_bytes(b"odd\n")
    assert gaps.read(directory) == good and good[0].to == made.offset
    if way == "start":
        send(copy, [b"t.1|0||last"])
    else:
        heal.repair(copy)
    assert path.read_bytes() == before
