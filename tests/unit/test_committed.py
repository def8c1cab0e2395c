"""What of the WAL is committed: records of epochs, where each begins, the file `committed`, the cut of the rest."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from fake_logger import FakeLogger
from made_up import FIRST_TS, block, no_room, stored, write_wal
from model import cluster_model

from kmq.deadletters import selection
from kmq.deadletters.redrive import BACK, back_digest
from kmq.errors import CorruptError
from kmq.log import checkpoint, committed, dedupe_file, identity, reader, segment, topic_changes, wal
from kmq.log.committed import EPOCH_KEY, Epochs, decode_epoch, encode_epoch
from kmq.repair.verify import Verifier
from kmq.router.queues import Queues
from kmq.spark.source import brokers

CHANGE = topic_changes.encode(topic_changes.TopicChange("create", "orders", 0, {"partitions": "3"}, "0001-2"), b"1.0")


@pytest.fixture
def data(tmp_path):
    identity.open_data(str(tmp_path / "data"))
    return str(tmp_path / "data")


def epoch(number):
    return encode_epoch(number, 0x0C1D << 48 | number, "b", 1, b"1.000000")


def mixed(*epochs_at, count=60):
    """Lines as sent; those at the seqs of `epochs_at` begin the epochs 1, 2, …"""
    lines = [b"t%d|1.0|%d|%b" % (n % 3, n, b"x" * (n % 50)) for n in range(1, count + 1)]
    for number, seq in enumerate(epochs_at, 1):
        lines[seq - 1] = epoch(number)
    return lines


def queues(data, **options):
    return Queues(data, no_room, FakeLogger(), are_recorded=True, **options)


def routed(data, high):
    """Route the WAL up to `high`, as a router does that is then stopped cleanly."""
    made = queues(data)
    made.recover(high)
    made.close()


# --- records ---------------------------------------------------------------------------------------------------------


def test_the_record_of_an_epoch_is_read_as_it_was_written():
    [line] = stored([encode_epoch(8, 0x0C1D2E3F, "b-1", 1, b"1.000000")], 31)
    assert line.endswith(b"|__kmq.epoch|1.000000||epoch=8 mark=000000000c1d2e3f broker=b-1 level=1\n")
    assert decode_epoch(line) == (8, 0x0C1D2E3F, "b-1", 1, 31)


@pytest.mark.parametrize(
    "sent",
    [
        CHANGE,
        b"t|1|1|epoch=8 mark=000000000c1d2e3f broker=b level=1",
        b"__kmq.epoch|1||epoch=8 mark=0c1d broker=b level=1",
        b"__kmq.epoch|1||epoch=x mark=000000000c1d2e3f broker=b level=1",
        b"__kmq.epoch|1||",
    ],
)
def test_no_other_record_begins_an_epoch(sent):
    with pytest.raises(ValueError, match="begins no epoch"):
        decode_epoch(stored([sent])[0])


def test_lines_are_cut_around_every_record_of_the_framers_own():
    lines = stored([b"a|1|1|x", epoch(1), CHANGE, b"a|1|1|x|__kmq.epoch|", b"a|1|1|y", epoch(2)], 10)
    assert list(topic_changes.parts(b"".join(lines))) == [
        (lines[0], b""),
        (lines[1], EPOCH_KEY),
        (lines[2], topic_changes.KEY),
        (lines[3] + lines[4], b""),
        (lines[5], EPOCH_KEY),
    ]


# --- the router ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ring", "wal"])
def test_the_router_puts_epochs_and_changes_into_the_queue_of_the_framers_own(data, way):
    lines = [epoch(1), b"a|1|1|x", CHANGE, b"orders.k|1|2|y", epoch(2)]
    write_wal(data, lines).close()
    log = FakeLogger()
    made = Queues(data, no_room, log, are_recorded=True)
    made.recover(0 if way == "ring" else 5)
    if way == "ring":
        made.route([block([line], seq) for seq, line in enumerate(lines, 1)])
    made.close()
    assert not [event for event, _ in log.events if event == "request_refused"]
    assert reader.partition(data, "__kmq", 0).read(0)[1] == b"".join(stored(lines)[i] for i in (0, 2, 4))
    assert [each.topic for each in topic_changes.changes(b"".join(stored(lines)))] == ["orders"]
    assert checkpoint.recorded_topics(data).keys() == {("orders", 3)}


# --- where epochs begin ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("high", [0, 1, 20, 35, 60])
def test_epochs_are_known_from_the_queue_and_the_end_of_the_wal(data, high):
    write_wal(data, mixed(1, 21, 22, 41)).close()
    if high:
        routed(data, high)
    assert checkpoint.routed_seq(data) == high
    assert list(Epochs.load(data, high)) == list(Epochs.load(data)) == [(1, 1), (2, 21), (3, 22), (4, 41)]


def test_of_what_is_routed_the_wal_is_not_read(data):
    write_wal(data, mixed(1, 21)).close()
    routed(data, 30)
    path = Path(f"{data}/append/{segment.name(1)}")
    text = path.read_bytes()
    path.write_bytes(text[:100] + b"?" * 20 + text[120:])
    with pytest.raises(CorruptError, match="damaged"):
        list(wal.read(data, 1, 60))
    assert list(Epochs.load(data, 60)) == [(1, 1), (2, 21)]


@pytest.mark.parametrize("harm", ["gone", "short", "torn"])
def test_what_the_queue_has_lost_is_read_from_the_wal(data, harm):
    write_wal(data, mixed(1, 21, 22, 41)).close()
    routed(data, 60)
    path = Path(f"{data}/topics/__kmq/0/{segment.name(0)}")
    text = path.read_bytes()
    if harm == "gone":
        path.unlink()
        path.with_suffix(".idx").unlink()
    else:
        first = text.index(b"\n") + 1
        path.write_bytes(text[:first] + (bytes(len(text) - first) if harm == "torn" else b""))
        path.with_suffix(".idx").unlink()
    assert list(Epochs.load(data, 60)) == [(1, 1), (2, 21), (3, 22), (4, 41)]
    os.unlink(f"{data}/append/{segment.name(1)}")
    with pytest.raises(CorruptError, match="nobody knows where the epochs begin"):
        Path(f"{data}/append/{segment.name(58)}").write_bytes(b"".join(stored(mixed()[57:], 58)))
        Epochs.load(data, 60)


def test_epochs_agree_with_the_model():
    choice = random.Random(30)
    for _ in range(300):
        epochs, log = Epochs(), []
        for number in sorted(choice.sample(range(1, 9), choice.randrange(5))):
            log += [16 * number] * choice.randrange(0 if log else 1, 5)
            if log and log[-1] == 16 * number:
                epochs.add(number, log.index(16 * number) + 1)
        for n in range(len(log) + 1):
            assert epochs.epoch_at(n) == cluster_model.epoch_at(tuple(log), n)
        for number in range(10):
            assert epochs.end_of(number, len(log)) == cluster_model.end_of_epoch(tuple(log), number)
        assert epochs.last == cluster_model.epoch_at(tuple(log), len(log))
        end = choice.randrange(len(log) + 1)
        epochs.cut(end)
        assert epochs.last == cluster_model.epoch_at(tuple(log[:end]), end)


def test_an_epoch_is_never_added_behind_a_later_one():
    epochs = Epochs()
    epochs.add(3, 10)
    epochs.add(5, 20)
    epochs.add(3, 10)
    for wrong in [(4, 30), (5, 21), (6, 20), (3, 11)]:
        with pytest.raises(ValueError, match="is not after epoch 5"):
            epochs.add(*wrong)
    epochs.cut(19)
    epochs.add(4, 20)
    assert list(epochs) == [(3, 10), (4, 20)] and epochs.last == 4


# --- the file `committed` --------------------------------------------------------------------------------------------


def test_what_is_not_whole_says_that_nothing_is_committed(data):
    assert committed.read_committed(data) == 0
    committed.write_committed(data, 1026770)
    assert committed.read_committed(data) == 1026770
    path = Path(f"{data}/committed")
    text = path.read_bytes()
    for harm in [b"", bytes(len(text)), text[:-1], text[:-4], b"2" + text[1:], text * 2, b"7 crc32=\n"]:
        path.write_bytes(harm)
        assert committed.read_committed(data) == 0
    committed.write_committed(data, 7)
    assert committed.read_committed(data) == 7 and not os.path.exists(f"{path}.new")


def test_what_any_reader_may_have_seen_is_shown_and_never_more_than_the_wal_has(data):
    assert committed.shown_seq(data) == 0
    write_wal(data, mixed()).close()
    assert committed.shown_seq(data) == 0
    committed.write_committed(data, 5)
    assert committed.shown_seq(data) == 5
    routed(data, 10)
    assert committed.shown_seq(data) == 10
    made = queues(data)
    made.recover(10)
    made.replay(11, 25)  # killed before the next checkpoint
    assert checkpoint.routed_seq(data) == 10 and committed.shown_seq(data) == 25
    committed.write_committed(data, 61)
    assert committed.shown_seq(data) == 60 == wal.last_stored(data)[0]


def shown(data, *arguments):
    argv = [sys.executable, "-m", "kmq", "log", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"KMQ_DATA": data}, timeout=60)
    return done.returncode, done.stdout


def test_readers_of_a_shards_wal_see_only_what_is_committed(data):
    write_wal(data, mixed()).close()
    assert len(shown(data, "cat", "append")[1].splitlines()) == 60
    assert brokers.Directory("a", data).bounds(["__append"]) == {("__append", 0): (1, 61)}
    Path(f"{data}/replica").write_text("")
    committed.write_committed(data, 41)
    lines = shown(data, "cat", "append", "--from-seq", "40")[1].splitlines()
    assert [line.partition("|")[0] for line in lines] == ["40", "41"]
    assert shown(data, "find", "append", "--seq", "41")[0] == 0
    assert shown(data, "find", "append", "--seq", "42") == (1, "")
    assert json.loads(shown(data, "stat", "append", "--json")[1])["logs"][0]["last"] == 41
    assert brokers.Directory("a", data).bounds(["__append"]) == {("__append", 0): (1, 42)}


def test_a_letter_whose_way_back_is_not_committed_has_not_gone_back(data):
    os.makedirs(f"{data}/topics/t.dlq/0")
    name = f"{BACK}{back_digest(identity.read(data, 'id'), 't.dlq', 0)}-1-x"
    write_wal(data, [b"t|1|%d;p=%b|x" % (number, name.encode()) for number in (1, 2, 3)]).close()

    def last(data):
        [names] = selection.went_back(data, "t.dlq", lambda: None)
        return names[name.encode()].last_id

    assert last(data) == 3
    Path(f"{data}/replica").write_text("")
    committed.write_committed(data, 2)
    assert last(data) == 2
    letter = selection.StoredRecord("t.dlq", 0, 0, "t", b"")
    before = [*selection.to_send([(letter, b"t")], data)]
    Path(f"{data}/id").write_text("0" * 32 + "\n")  # of another replica of the shard
    assert last(data) == 2 and [*selection.to_send([(letter, b"t")], data)] == before


# --- the cut ---------------------------------------------------------------------------------------------------------

ENDS = (20, 40, 41)  # of the sealed segments
COUNT = 60


def segments_of(data, ends=ENDS, lines=None):
    """A WAL with the last seqs `ends` of its sealed segments; return its stored lines."""
    text = stored(lines or mixed(1, 21, 30, count=COUNT))
    log = open_wal(data)
    for seq, line in enumerate(text, 1):
        log.append([(line, seq, 1, FIRST_TS + seq)])
        if seq in ends:
            log.roll()
    log.close()
    return text


def open_wal(data):
    return wal.Wal(data, no_room, 1 << 20)


def all_of(data):
    return list(b"".join(wal.read(data, 1, 1 << 40)).splitlines(keepends=True))


def go_on(data, seq, count=25):
    """Open the WAL, append `count` records after `seq`, roll among them; return what it has then."""
    log = open_wal(data)
    assert log.last_seq == seq and not log.misplaced and not log.restored
    more = stored([b"new|1|%d|%b" % (n, b"y" * 60) for n in range(count)], seq + 1)
    for number, line in enumerate(more, seq + 1):
        log.append([(line, number, 1, FIRST_TS + number)])
        if number == seq + 5:
            log.roll()
    log.close()
    return more


def findings(data):
    return [str(each) for each in Verifier(data, is_live=False).findings()]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seq", [0, 1, 19, 20, 21, 39, 40, 41, 42, 59])
def test_what_is_cut_lies_in_a_file_and_the_wal_goes_on_in_its_place(data, seq):
    text = segments_of(data)
    records, path = committed.cut_after(data, seq, 7)
    assert records == COUNT - seq and path == f"{data}/cut/{seq + 1:020d}-7.log"
    assert Path(path).read_bytes() == b"".join(text[seq:])
    first = max([1, *(end + 1 for end in ENDS if end < seq)])
    assert os.readlink(f"{data}/append.log") == f"append/{segment.name(first)}"
    assert [at for at, _ in segment.listing(f"{data}/append")][-1] == first and all_of(data) == text[:seq]
    assert findings(data) == []
    assert committed.cut_after(data, seq, 7) == (0, None)
    more = go_on(data, seq)
    assert all_of(data) == text[:seq] + more and findings(data) == []
    routed(data, seq + len(more))
    assert findings(data) == []


@pytest.mark.usefixtures("small_blocks")
def test_a_second_cut_goes_further_back_and_a_third_cuts_what_was_written_since(data):
    text = segments_of(data)
    committed.cut_after(data, 45, 2)
    committed.cut_after(data, 25, 2)
    more = go_on(data, 25)
    path = committed.cut_after(data, 25, 2)[1]
    assert all_of(data) == text[:25] and path == f"{data}/cut/{26:020d}-2.1.log"
    kept = {name: Path(f"{data}/cut/{name}").read_bytes() for name in os.listdir(f"{data}/cut")}
    assert kept == {
        f"{46:020d}-2.log": b"".join(text[45:]),
        f"{26:020d}-2.log": b"".join(text[25:45]),
        f"{26:020d}-2.1.log": b"".join(more),
    }


@pytest.mark.parametrize("tail", [b"", b"61|17", bytes(5000), b"61|1700000000.0003\0\0\n\0", b"no record\n"])
@pytest.mark.parametrize("seq", [30, 50, 60])
def test_a_torn_end_is_no_record_that_is_cut(data, tail, seq):
    text = segments_of(data)
    with open(f"{data}/append/{segment.name(42)}", "ab") as file:
        file.write(tail)
    records, path = committed.cut_after(data, seq, 1)
    assert records == COUNT - seq and (path is None) == (seq == COUNT)
    assert path is None or Path(path).read_bytes() == b"".join(text[seq:])
    go_on(data, seq)
    assert all_of(data)[:seq] == text[:seq] and findings(data) == []


@pytest.mark.parametrize("who", ["queue", "router.ckpt", "committed", "producers.ckpt"])
def test_nothing_that_was_shown_is_cut(data, who):
    text = segments_of(data)
    routed(data, 20)
    if who == "queue":
        made = queues(data)
        made.recover(20)
        made.replay(21, 31)
    elif who == "router.ckpt":
        routed(data, 31)
    elif who == "committed":
        committed.write_committed(data, 31)
    else:
        Path(dedupe_file.path(data)).write_bytes(b"31|%d|2\n" % dedupe_file.checksum(31, b""))
    with pytest.raises(CorruptError, match=r"append: cannot be cut after seq 30: \S+ has seq 31"):
        committed.cut_after(data, 30, 1)
    assert all_of(data) == text and not os.path.exists(f"{data}/cut")
    assert committed.cut_after(data, 31, 1)[0] == 29


def test_a_cut_before_the_first_record_or_at_one_that_is_missing_is_refused(data):
    text = segments_of(data)
    segment.remove(segment.survey(f"{data}/append")[:1])
    for seq in (0, 5, 19):
        with pytest.raises(CorruptError, match="it begins with seq 21"):
            committed.cut_after(data, seq, 1)
    path = Path(f"{data}/append/{segment.name(21)}")
    path.write_bytes(path.read_bytes().replace(text[24], b"?" * len(text[24])))
    with pytest.raises(CorruptError, match="ends with seq 24 before byte"):
        committed.cut_after(data, 25, 1)
    assert not os.path.exists(f"{data}/cut") and segment.last_seq(segment.survey(f"{data}/append")[-1]) == COUNT


@pytest.mark.usefixtures("small_blocks")
def test_a_log_that_was_begun_from_a_copy_may_lose_all_that_came_since(data):
    segments_of(data)
    routed(data, 20)
    segment.remove(segment.survey(f"{data}/append")[:1])
    assert committed.cut_after(data, 20, 1)[0] == 40
    assert segment.listing(f"{data}/append") == [(21, f"{data}/append/{segment.name(21)}")]
    assert all_of(data) == [] and findings(data) == [] and checkpoint.agreed_end(data, ask_queues=True)[0] == 20
    assert go_on(data, 20) == all_of(data) and findings(data) == []


def test_only_the_newest_cuts_are_kept(data):
    segments_of(data)
    for seq in range(COUNT - 1, COUNT - 21, -1):
        path = committed.cut_after(data, seq, 1)[1]
        os.utime(path, ns=(COUNT - seq, COUNT - seq))
    Path(f"{data}/cut/notes").touch()
    Path(f"{data}/cut/x.log.new").touch()
    committed.cut_after(data, 30, 1)
    assert sorted(os.listdir(f"{data}/cut")) == [*(f"{seq:020d}-1.log" for seq in [31, *range(41, 56)]), "notes"]


FILES = ("kmq/log/committed.py", "kmq/log/wal.py", "kmq/log/index.py", "kmq/log/segment.py", "kmq/files.py")


def cut_traced(data, seq, reached):
    """Cut, and call `reached` at each line that is about to run, with its number."""
    numbers = count(1)

    def trace(frame, event, _):
        if event == "line":
            reached(next(numbers))
        return trace if frame.f_code.co_filename.endswith(FILES) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        committed.cut_after(data, seq, 7)
    finally:
        sys.settrace(before)


def points(data, seq):
    """The numbers of the lines before which something on the disk has changed."""
    found, states = [], []

    def look(number):
        state = {path: path.read_bytes() for path in Path(data).rglob("*") if path.is_file()}
        state |= {"link": os.readlink(f"{data}/append.log")}
        if not states or state != states[-1]:
            states.append(state)
            found.append(number)

    cut_traced(data, seq, look)
    return found


def cut_killed(data, seq, nth):
    """Cut in a child that is killed before its nth line."""
    pid = os.fork()
    if not pid:
        cut_traced(data, seq, lambda number: number == nth and os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seq", [0, 30, 40])
def test_a_cut_that_is_killed_anywhere_leaves_a_valid_wal_and_is_finished_by_the_same_cut(data, tmp_path, seq):
    text, ends = segments_of(data), set()
    again, opened = str(tmp_path / "again"), str(tmp_path / "opened")
    shutil.copytree(data, again, symlinks=True)
    found = points(again, seq)
    for nth in found:
        shutil.rmtree(again)
        shutil.copytree(data, again, symlinks=True)
        cut_killed(again, seq, nth)
        shutil.copytree(again, opened, symlinks=True)
        log = open_wal(opened)
        assert log.last_seq >= seq and not log.misplaced
        ends.add(log.last_seq)
        log.close()
        assert all_of(opened) == text[: log.last_seq] and findings(opened) == []
        shutil.rmtree(opened)
        committed.cut_after(again, seq, 7)
        go_on(again, seq, 7)
        assert all_of(again)[:seq] == text[:seq] and findings(again) == []
        assert {name: Path(f"{again}/cut/{name}").read_bytes() for name in os.listdir(f"{again}/cut")} == {
            f"{seq + 1:020d}-7.log": b"".join(text[seq:])
        }
    assert len(found) > 10 and ends == {COUNT, *(end for end in ENDS if end > seq), seq}


def test_each_step_of_a_cut_is_on_disk_before_the_next(data, monkeypatch):
    segments_of(data)
    steps = []

    def noted(name):
        call = getattr(os, name)

        def wrapped(what, *rest):
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else what
            steps.append((name, os.path.relpath(rest[0] if name == "rename" else path, data)))
            return call(what, *rest)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("fsync", "fdatasync", "unlink", "rename", "ftruncate"):
            patch.setattr(os, name, noted(name))
        committed.cut_after(data, 30, 7)
    name = {first: segment.name(first) for first in (1, 21, 41, 42)}
    idx = f"append/{name[21]}".replace(".log", ".idx")
    wanted = [
        ("fsync", f"cut/{31:020d}-7.log.new"),
        ("rename", f"cut/{31:020d}-7.log"),
        ("fsync", "cut"),
        ("fsync", "."),
    ]
    wanted += [("rename", "append.log"), ("fsync", ".")]
    for first in (42, 41):
        removed = f"append/{name[first]}"
        wanted += [("unlink", removed), ("unlink", removed.replace(".log", ".idx")), ("fsync", "append")]
    wanted += [("rename", idx), ("fsync", idx), ("fsync", "append")]
    wanted += [("ftruncate", f"append/{name[21]}"), ("fdatasync", f"append/{name[21]}"), ("fsync", idx)]
    assert [step for step in steps if step[1] != "append.log.new"] == wanted
