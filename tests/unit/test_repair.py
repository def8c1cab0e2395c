"""One damage anywhere: it is found, and healed to the last byte, while one copy of each record is good."""

import os
import pathlib
import random
import shutil
import zlib

import pytest
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room, stored, write_wal

from kmq.errors import CorruptError
from kmq.log import dropped, identity, reader, show, topics
from kmq.log.damage import DamageError
from kmq.log.segment import SEQ, Limits, seqs_of
from kmq.log.wal import Wal
from kmq.message import record
from kmq.repair import heal, scan, verify
from kmq.repair.directory import DataDirectory
from kmq.router.queues import Queues

KEYS = [b"test.probe", b"test", b"jobs.k1", b"jobs.k2", b"jobs", b"jobs.k3", b"a.b.c", b"a.x"]
LIMITS = Limits(segment_bytes=10_000)


pytestmark = pytest.mark.usefixtures("small_blocks")
SEEDS = [*range(24), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(24, 60))]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return written(str(tmp_path_factory.mktemp("original")), LIMITS)


def written(data, limits):
    """A directory as a broker leaves it: topics, partitions, many segments, a clean stop."""
    identity.open_data(data)
    topics.declare(data, "jobs", 3)
    topics.declare(data, "a.b", 2)
    rng = random.Random(1)
    lines = [b"%b|%d|%d|%b" % (rng.choice(KEYS), n, n, b"x" * rng.randrange(90)) for n in range(900)]
    wal, queues = Wal(data, no_room, 1 << 20, limits), Queues(data, no_room, FakeLogger(), limits)
    queues.recover(0)
    for at in range(0, len(lines), 7):
        made = block(lines[at : at + 7], at + 1)
        wal.append([(made.data, at + 1, made.count, FIRST_TS + at)])
        wal.sync()
        queues.route([made])
        if at % 210 == 0:
            wal.note_open_block()
            queues.tick()
    wal.close()
    queues.close()
    return data


def files(data):
    found = {}
    for directory, _, names in os.walk(data):
        for name in names:
            path = f"{directory}/{name}"
            if not os.path.islink(path) and "quarantine" not in path:
                with open(path, "rb") as file:
                    found[os.path.relpath(path, data)] = file.read()
    return found


def findings(data):
    return [each for each in verify.Verifier(data, is_live=False).findings() if each.is_damage]


def damage(text, rng, kind=None):
    kind = kind or rng.choice(["flip", "zero", "cut"])
    at = rng.randrange(len(text))
    if kind == "flip":
        return text[:at] + bytes([text[at] ^ 1 << rng.randrange(8)]) + text[at + 1 :]
    if kind == "zero":
        size = rng.choice([100, 4096])
        return text[:at] + bytes(min(size, len(text) - at)) + text[at + size :]
    return text[:at]


def is_index_of_the_same(path, text, now):
    """Whether an index says the same, but for provisional lines."""
    entries = [{line.split(b"|")[0]: line for line in each.splitlines()} for each in (text, now)]
    return path.endswith(".idx") and entries[0] == entries[1]


def check_healed(before, data):
    after = files(data)
    for path, text in before.items():
        if path.endswith("router.ckpt") and path not in after:
            continue  # nothing but a copy of what the queues say
        assert after[path] == text or is_index_of_the_same(path, text, after[path]), path


def test_a_whole_directory_has_no_findings(original):
    assert findings(original) == []
    assert list(verify.Verifier(original, is_live=False).findings()) == []
    assert heal.repair(original) == []


@pytest.mark.parametrize("log", ["append", "test"])
def test_segments_that_retention_deletes_meanwhile_are_no_damage(tmp_path, monkeypatch, log):
    """The first is read, then it and the next one are deleted."""
    data, directory = written(str(tmp_path / "data"), Limits(2_000)), log if log == "append" else f"topics/{log}/0"
    first, second, third, *_ = sorted(pathlib.Path(data, directory).glob("*.log"))
    read = scan.scan_segment

    def meanwhile(*given):
        found = read(*given)
        if given[1] == str(first):
            for path in (first, second):
                path.unlink()
                path.with_suffix(".idx").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(verify, "scan_segment", meanwhile)
    assert third.exists() and [*verify.Verifier(data, is_live=True).findings([log])] == []
    assert not second.exists()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", SEEDS)
def test_one_damage_anywhere_is_found_and_healed(original, tmp_path, seed):
    rng = random.Random(seed)
    data = str(tmp_path / "data")
    shutil.copytree(original, data, symlinks=True)
    before = files(data)
    path = rng.choice(
        sorted(path for path, text in before.items() if text and path not in ("id", "format") and ".owner" not in path)
    )
    damaged = damage(before[path], rng)
    if damaged == before[path]:
        return
    with open(f"{data}/{path}", "wb") as file:
        file.write(damaged)
    found = findings(data)
    if not found:  # harmless: an index that is behind, as a kill leaves it, or a provisional line that counts no more
        assert path.endswith(".idx")
        assert before[path].startswith(damaged) or is_index_of_the_same(path, before[path], damaged)
    else:
        assert any(each.path in (path, path.replace(".idx", ".log"), path.replace(".log", ".idx")) for each in found), (
            found
        )
    done = heal.repair(data)
    assert not [each for each in done if each.lost], done
    assert findings(data) == []
    check_healed(before, data)


def go_on(data):
    """A broker starts on what is there, and takes another 100 messages."""
    wal = Wal(data, no_room, 1 << 20, LIMITS)
    queues = Queues(data, no_room, FakeLogger(), LIMITS)
    queues.recover(wal.last_seq)
    at = wal.last_seq
    more = block([b"%b|%d|%d|more" % (KEYS[n % len(KEYS)], n, n) for n in range(100)], at + 1)
    wal.append([(more.data, at + 1, more.count, FIRST_TS + at)])
    wal.sync()
    queues.route([more])
    wal.close()
    queues.close()


def everything(log):
    """All that readers get out of a log, going on behind what is damaged."""
    offset, found = 0, {}
    while True:
        try:
            first, text = log.read(offset)
        except DamageError as err:
            if err.next_offset <= offset:
                return found
            offset = err.next_offset
            continue
        if not text:
            return found
        lines = text.splitlines(keepends=True)
        found.update((record.seq_of(line), line) if log.by_seq else (first + n, line) for n, line in enumerate(lines))
        offset = record.seq_of(lines[-1]) + 1 if log.by_seq else first + len(lines)


@pytest.fixture(scope="module")
def truth(original, tmp_path_factory):
    """What each log holds when a broker has gone on with an undamaged directory."""
    data = str(tmp_path_factory.mktemp("truth") / "data")
    shutil.copytree(original, data, symlinks=True)
    go_on(data)
    return {name: everything(log) for name, log in show.logs(data, "")}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_start_on_damage_is_refused_or_makes_nothing_worse(original, truth, tmp_path, seed):
    rng = random.Random(seed)
    data = str(tmp_path / "data")
    shutil.copytree(original, data, symlinks=True)
    if seed % 2:  # killed before the first checkpoint: the start looks at every file, sealed ones too
        os.unlink(f"{data}/router.ckpt")
    before = files(data)
    path = rng.choice(sorted(path for path, text in before.items() if text and path not in ("id", "format")))
    if rng.randrange(2):  # where it hurts most: the files that the start goes on with
        path = rng.choice([os.path.relpath(log.segments()[-1][1], data) for _, log in show.logs(data, "")])
    with open(f"{data}/{path}", "wb") as file:
        file.write(damage(before[path], rng) if before[path] else b"")
    try:
        go_on(data)
        refused = False
    except CorruptError as err:
        assert "kmq verify --repair" in str(err)
        refused = True
    for name, log in show.logs(data, ""):
        for number, line in everything(log).items():
            assert truth[name][number] == line, f"{name} {number} after damage in {path}"
    assert not [each for each in heal.repair(data) if each.lost]
    if refused:
        go_on(data)
    assert findings(data) == []
    for name, log in show.logs(data, ""):
        assert everything(log) == truth[name], f"{name} after damage in {path}"


@pytest.mark.parametrize("length", [1, 2, 100, 1024, 70_000])
def test_a_flipped_bit_is_found_by_its_crc_alone(length):
    rng = random.Random(length)
    data = rng.randbytes(length)
    crc = zlib.crc32(data)
    for at in {0, length - 1, rng.randrange(length)}:
        flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        assert scan.one_bit(flipped, crc) == data
    if length > 99:
        torn = data[:-2] + bytes([data[-2] ^ 255, data[-1] ^ 255])
        assert scan.one_bit(torn, crc) is None


def overwrite(path, at, text):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(text)


@pytest.fixture
def data(original, tmp_path):
    shutil.copytree(original, tmp_path / "data", symlinks=True)
    return str(tmp_path / "data")


def spoil(log, seq, text=b"spoiled"):
    """Overwrite the payload of a record; returns it as it was."""
    found = log.find(seq, SEQ)
    overwrite(found.path, found.byte + len(found.line) - len(text), text)
    return found.line


def logs_of(data, seq):
    """The WAL, and the queue that holds record `seq`."""
    queues = [reader.partition(data, *at) for at in DataDirectory(data).queues()]
    return reader.wal(data), next(
        log for log in queues if (found := log.find(seq, SEQ)) and found.line.startswith(b"%d|" % seq)
    )


def test_different_records_of_a_block_damaged_in_both_copies_are_all_healed(data, original):
    wal, queue = logs_of(data, 200)
    others = (logs_of(data, seq)[1].find(seq, SEQ) for seq in range(201, 210))
    other = next(each for each in others if not each.path.startswith(queue.directory))
    for found in (wal.find(200, SEQ), other):
        overwrite(found.path, found.byte + len(found.line) - 2, b"?!")
    assert not [each for each in heal.repair(data) if each.lost]
    assert findings(data) == []
    check_healed(files(original), data)


def test_a_cut_end_has_no_last_seq_and_its_finding_names_none(data):
    path = max(reader.wal(data).segments())[1]
    os.truncate(path, os.path.getsize(path) - 100)
    said = [str(finding) for finding in findings(data)]
    assert any("crc mismatch" in text and " and later" in text for text in said), said
    assert not [text for text in said if " to 0:" in text]


def test_what_no_copy_has_is_kept_aside_and_named_and_the_rest_goes_on(data, original):
    wal, queue = logs_of(original, 300)
    offset = queue.find(300, SEQ).offset
    here = reader.LogReader(queue.directory.replace(original, data), by_seq=False)
    spoil(reader.wal(data), 300, b"spoiled")
    spoil(here, 300, b"ruined!")
    lost = [span for each in heal.repair(data) for span in each.lost]
    assert (300, 300) in lost
    assert findings(data) == [] and [(gone.first, gone.last) for gone in dropped.quarantined(data)] == [(300, 300)]
    assert b"spoiled" in b"".join(files_in_quarantine(data))
    after, before = everything(reader.wal(data)), everything(wal)
    assert after == {seq: line for seq, line in before.items() if seq != 300}
    healed = everything(here)
    assert healed[offset] == b"\n" and {n: line for n, line in healed.items() if n != offset} == {
        n: line for n, line in everything(queue).items() if n != offset
    }
    go_on(data)
    assert findings(data) == []


def files_in_quarantine(data):
    return [pathlib.Path(entry.path).read_bytes() for entry in os.scandir(f"{data}/quarantine") if entry.name != "log"]


def flip_in(path, line):
    """Flip one bit in the payload of `line`, and lose the index that would tell."""
    at = pathlib.Path(path).read_bytes().index(line) + len(line) - 3
    overwrite(path, at, bytes([line[len(line) - 3] ^ 1]))
    os.unlink(path.replace(".log", ".idx"))


@pytest.mark.parametrize("copy", ["WAL", "queue"])
@pytest.mark.parametrize("seq", [200, 897])  # in a sealed segment, and in the active one
def test_an_index_that_was_lost_is_made_anew_only_of_what_the_other_copy_says_too(data, original, copy, seq):
    log = logs_of(data, seq)[copy == "queue"]
    found = log.find(seq, SEQ)
    flip_in(found.path, found.line)
    assert not everything(log).keys() & {seq if copy == "WAL" else log.first_offset}, "a log without an index is served"
    done = heal.repair(data)
    assert not [each for each in done if each.lost or each.unwitnessed], done
    assert findings(data) == []
    check_healed(files(original), data)


def test_what_has_no_second_witness_is_kept_and_said_to_have_none(data):
    _, queue = logs_of(data, 200)
    path = queue.find(200, SEQ).path
    seqs = seqs_of(pathlib.Path(path).read_bytes())
    first, last = seqs[0], seqs[-1]
    for number, wal_path in reader.wal(data).segments():  # as retention does
        if number <= last:
            os.unlink(wal_path)
            os.unlink(wal_path.replace(".log", ".idx"))
    left = reader.first_seq(data)
    os.unlink(path.replace(".log", ".idx"))
    before = pathlib.Path(path).read_bytes()
    done = heal.repair(data)
    assert pathlib.Path(path).read_bytes() == before
    spans = [span for each in done for span in each.unwitnessed]
    assert (
        spans
        and min(spans)[0] == first
        and max(spans)[1] == min(last, left - 1)
        and not [each for each in done if each.lost]
    )
    assert findings(data) == []


def test_two_records_of_one_seq_are_both_kept(data, original):
    """As an older release left them: the WAL had lost its end, and its seqs were given out again."""
    lost = [line for at, line in everything(reader.wal(data)).items() if at > 850]
    for first, path in reader.wal(data).segments():
        lines = pathlib.Path(path).read_bytes().splitlines(keepends=True)
        if first > 850:
            os.unlink(path)
            os.unlink(path.replace(".log", ".idx"))
        elif record.seq_of(lines[-1]) > 850:
            pathlib.Path(path).write_bytes(b"".join(line for line in lines if record.seq_of(line) <= 850))
            os.unlink(path.replace(".log", ".idx"))
    wal = Wal(data, no_room, 1 << 20, LIMITS)
    others = block([b"%b|%d|%d|given out again" % (KEYS[n % len(KEYS)], n, n) for n in range(50)], 851)
    wal.append([(others.data, 851, others.count, FIRST_TS + 851)])
    wal.close()
    assert any("another record than the WAL has" in each.what for each in findings(data))
    files = {path: path.read_bytes() for path in pathlib.Path(data).rglob("*.log")}
    pathlib.Path(f"{data}/replica").write_text("")
    with pytest.raises(CorruptError, match="only the leader numbers: run kmq cluster reset"):
        heal.repair(data)
    os.unlink(f"{data}/replica")
    assert files == {path: path.read_bytes() for path in files}, "a shard's records were numbered anew"
    assert [each.what for each in heal.repair(data) if "could not keep their seqs" in each.what]
    assert findings(data) == []
    after = everything(reader.wal(data))
    assert [line for at, line in after.items() if 850 < at <= 900] == lost
    again = [line.split(b"|", 2)[2] for at, line in after.items() if at > 900]
    assert again == [line.split(b"|", 2)[2] for line in bytes(others.data).splitlines(keepends=True)]
    go_on(data)
    assert findings(data) == []
    for topic, number in DataDirectory(data).queues():
        name = f"{topic}/{number}"
        kept = everything(reader.partition(original, topic, number))
        assert kept.items() <= everything(reader.partition(data, topic, number)).items(), name


def test_a_flipped_bit_in_what_was_never_routed_is_healed_by_its_crc(tmp_path):
    data = str(tmp_path / "data")
    identity.open_data(data)
    wal = write_wal(data, [b"t|%d||payload %d" % (n, n) for n in range(500)])
    wal.close()
    with open(wal.path, "rb") as file:
        text = file.read()
    for at in (5, 700, len(text) - 1, len(text) // 2):
        overwrite(wal.path, at, bytes([text[at] ^ 4]))
        assert findings(data)
        assert [each.what for each in heal.repair(data)] == ["healed"]
        with open(wal.path, "rb") as file:
            assert file.read() == text


def test_a_damaged_line_of_dropped_log_is_mended_by_what_is_missing(tmp_path):
    data = str(tmp_path / "data")
    identity.open_data(data)
    wal = Wal(data, no_room, 1 << 20)
    for first, count in ((1, 40), (61, 40)):
        text = b"".join(stored([b"t|||x"] * count, first))
        wal.append([(text, first, count, FIRST_TS + first)])
    wal.sync()
    wal.close()
    dropped.append(data, "framed", 41, 60, no_room)
    good = files(data)["dropped.log"]
    assert findings(data) == []
    for at in (0, 7, 8, 11, 14):  # a letter of the ring, digits of first, last and count
        overwrite(f"{data}/dropped.log", at, bytes([good[at] ^ 1]))
        assert [each.path for each in findings(data)][-1] == "dropped.log"
        with pytest.raises(CorruptError, match=r"dropped\.log: damaged at byte 0"):
            dropped.read(data, "framed")
        heal.repair(data)
        assert files(data)["dropped.log"] == good
