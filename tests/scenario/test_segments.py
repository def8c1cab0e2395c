"""A log for years, in small: segments of 64 KiB, followed by `tail -F`, cut by retention, under load and over kills."""

import contextlib
import subprocess
from pathlib import Path

import pytest
from chaos.hurry import saving

SEGMENT = 64 << 10
BATCH = 450  # messages of ~130 bytes as stored: less than a segment, so no log rolls twice while `tail` looks away


def batch(number, count=BATCH):
    return [b"test.k|%d|%d|%b" % (n, n, b"x" * 70) for n in range(number * count, (number + 1) * count)]


def seqs(lines):
    return [int(line.split(b"|", 1)[0]) for line in lines]


def segments(directory):
    return sorted(Path(directory).glob("*.log"))


@pytest.fixture
def follow(broker):
    """Starts `tail -F` on a log of the broker; returns the file where its output goes."""
    running = []

    def start(name):
        path = broker.root / f"tail-{name}"
        # tail looks at the name of a file only when it has not grown for so many looks; 5, one second apart, by default
        command = ["tail", "-n", "+1", "-s", "0.02", "--max-unchanged-stats=1", "-F", str(broker.data / name)]
        with path.open("wb") as out:
            running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL))
        return path

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_tail_follows_append_log_and_test_log_across_rolls_and_sees_every_line_once(broker, follow):
    broker.up(KMQ_SEGMENT_BYTES=SEGMENT)
    seen = {name: follow(name) for name in ("append.log", "test.log")}
    batches = 20
    for number in range(batches):
        broker.send_lines(batch(number))
        for name, path in seen.items():
            total = (number + 1) * BATCH
            broker.wait(lambda p=path, n=total: p.read_bytes().count(b"\n") >= n, f"{total} lines of {name}")
    for name, path in seen.items():
        assert seqs(path.read_bytes().splitlines()) == list(range(1, batches * BATCH + 1)), name
    broker.down()
    for directory, link in (("append", "append.log"), ("topics/test/0", "test.log")):
        found = segments(broker.data / directory)
        assert len(found) >= batches // 2
        assert (broker.data / link).resolve() == found[-1].resolve()
        assert all(path.with_suffix(".idx").exists() for path in found)
    sizes = [path.stat().st_size for path in segments(broker.data / "topics/test/0")[:-1]]
    assert all(SEGMENT <= size < SEGMENT + 200 for size in sizes), "a queue's segment ends with the line that fills it"


def test_retention_keeps_both_logs_small_under_load_and_over_a_kill(broker):
    limit = 1 << 20
    settings = {"KMQ_SEGMENT_BYTES": SEGMENT, "KMQ_RETENTION_BYTES": limit, "PYTHONPATH": saving(broker.root)}
    broker.up(**settings)
    directories = [broker.data / "append", broker.data / "topics/test/0"]

    def used(directory):
        total = 0
        for path in segments(directory):
            with contextlib.suppress(FileNotFoundError):  # retention may take it meanwhile
                total += path.stat().st_size
        return total

    sent = 0
    for number in range(30):
        broker.send_lines(batch(number, 1000))
        sent += 1000
    broker.wait_routed(sent)
    for directory in directories:
        broker.wait(lambda d=directory: used(d) <= limit, f"no more than {limit} bytes in {directory}")

    def deletions():
        return broker.log().count(f"event=segment_deleted file={directories[1]}/")

    broker.wait(lambda: deletions() >= 36, "the lines that tell of them come after them")
    broker.kill()
    for directory in directories:  # what a kill between a log and its index leaves
        (directory / f"{1:020}.idx").write_bytes(segments(directory)[0].with_suffix(".idx").read_bytes())
    broker.up(**settings)
    broker.send_lines(batch(30, 1000))
    sent += 1000
    broker.wait_routed(sent)
    broker.down()
    for directory in directories:
        found = segments(directory)
        assert int(found[0].stem) > 1
        kept = [seq for path in found for seq in seqs(path.read_bytes().splitlines())]
        assert kept == list(range(kept[0], sent + 1))
        offset = 1 if directory.name == "append" else 0  # the WAL counts seqs, from 1; a queue counts records, from 0
        assert int(found[0].stem) == kept[0] - 1 + offset
        assert {path.stem for path in directory.glob("*.idx")} == {path.stem for path in found}
    assert used(directories[1]) > limit // 2, "no more than had to go"  # the WAL rolls between group commits only
    assert deletions() == 38  # of the WAL's as many as there are, which depends on how much comes with a group commit
    assert "event=unrecoverable" not in broker.log() and "event=queue_short" not in broker.log()
    listed = broker.kmq("topics", "list", "--logfmt").stdout
    assert f"topic=test partition=0 messages={sent} " in listed


@pytest.mark.parametrize("fsync", ["interval:50", "never"])
def test_a_lax_fsync_survives_every_kill_and_says_what_is_on_disk(broker, fsync):
    broker.up(KMQ_SEGMENT_BYTES=SEGMENT, KMQ_FSYNC=fsync)
    for number in range(12):
        broker.send_lines(batch(number))
        if number % 4 == 1:
            broker.kill("durability")
        if number == 6:
            broker.wait_routed(7 * BATCH)  # what is in the FIFO dies with all
            broker.kill()
            broker.up(KMQ_SEGMENT_BYTES=SEGMENT, KMQ_FSYNC=fsync)
    broker.wait_routed(12 * BATCH)
    broker.down()
    everything = list(range(1, 12 * BATCH + 1))
    assert seqs(broker.wal()) == everything and seqs(broker.lines("test")) == everything


LONG = 20 << 20  # more than three group commits with the default RB_BYTES


@pytest.mark.parametrize("half", [b"", b"9|1700000000.000301|test.k|1|9|to"], ids=["nothing", "half a line"])
def test_nuls_of_any_length_after_the_last_record_are_a_torn_end_for_verify_and_start(broker, half):
    broker.up()
    broker.send_lines(batch(0, 8))
    broker.wait_routed(8)
    broker.down()
    log = broker.data / "append.log"
    whole = log.read_bytes()
    with log.open("ab") as file:
        file.write(half + bytes(LONG))
    looked = broker.kmq("verify")
    assert looked.returncode == 0 and f"byte {len(whole)}: a torn end, which the next start cuts" in looked.stdout
    assert broker.kmq("verify", "--repair").returncode == 0
    broker.up()
    broker.send_lines(batch(1, 8))
    broker.wait_routed(16)
    broker.down()
    assert log.read_bytes().startswith(whole) and seqs(broker.lines("test")) == list(range(1, 17))
    assert broker.kmq("verify").stdout == "no damage\n"


def test_what_a_start_refuses_after_the_last_record_is_damage_and_a_repair_sets_it_aside(broker):
    broker.up()
    broker.send_lines(batch(0, 8))
    broker.wait_routed(8)
    broker.down()
    strange = b"no record\n" * (8 << 17)  # more than one
    with (broker.data / "append.log").open("ab") as file:
        file.write(strange)
    assert broker.kmq("up", "--no-gateway").returncode != 0 and "no good record in the last" in broker.log()
    broker.down()
    looked = broker.kmq("verify")
    assert looked.returncode == 1 and "not a stored line in order of seq" in looked.stdout
    assert broker.kmq("verify", "--repair").returncode == 0
    assert [path.read_bytes() for path in (broker.data / "quarantine").iterdir()] == [strange]
    broker.up()
    broker.send_lines(batch(1, 8))
    broker.wait_routed(16)
    broker.down()
    assert seqs(broker.lines("test")) == list(range(1, 17)) and broker.kmq("verify").stdout == "no damage\n"
