"""`kmq ship`: each line of log files is stored once, in the order of its file, whatever is killed and rotated meanwhile."""

import bz2
import contextlib
import errno
import gzip
import itertools
import lzma
import os
import random
import re
import signal
import threading
import time

import psutil
import pytest
from ships import decoded, shipping
from waiting import until

from kmq.access import tokens
from kmq.cli.produce import open_producer
from kmq.cli.ship import _judge
from kmq.client.lines import Patience
from kmq.errors import KmqError
from kmq.shipping import finding
from kmq.shipping.files import LogFile
from kmq.shipping.finding import FollowedFiles
from kmq.shipping.process import Shipment, run
from kmq.shipping.state import load_state, save_state

CORRUPT, BUSY, CONFIG, KILLED = 65, 69, 78, -9
SEEDS = (1, 2, 3)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A broker for the tests that leave it as it is; each has a topic of its own."""
    from brokers import Broker

    made = Broker(tmp_path_factory.mktemp("shared"))
    made.gateway = False
    made.up()
    yield made
    made.close()


@pytest.fixture
def ship(shared, tmp_path):
    yield from shipping(shared, tmp_path, f"app{next(_numbers)}")


# --- kills -----------------------------------------------------------------------------------------------------------


class Writer:
    """A service that writes numbered lines into a log, and rotates it in every way."""

    def __init__(self, ship, rng, name):
        self.ship, self.rng, self.name, self.number, self.archived = ship, rng, name, 0, 0
        self.file = (ship.logs / name).open("ab", buffering=0)

    def write(self):
        for _ in range(self.rng.choice([1, 5, 400])):
            self.number += 1
            text = b"%b %d %b\n" % (self.name.encode(), self.number, b"x" * self.rng.choice([0, 10, 300]))
            cut = self.rng.randrange(len(text))
            self.file.write(text[:cut])
            self.file.write(text[cut:])

    def wait_known(self):
        """Until ship has seen this file: what comes and gets a name that no pattern has between two looks is nobody's."""
        inode = f":{os.fstat(self.file.fileno()).st_ino:x}:"
        self.ship.broker.wait(lambda: inode in self.ship.state.read_text(), f"{inode} in the state")

    def rename(self):
        self.archived += 1
        (self.ship.logs / self.name).rename(self.ship.logs / f"{self.name}.{self.archived}")
        self.write()  # as a service does that has not heard of it yet
        self.file.close()
        self.file = (self.ship.logs / self.name).open("ab", buffering=0)

    def truncate(self):
        """As copytruncate, but when all is sent: what it cuts off unread is lost by its nature."""
        self.ship.wait_sent(self.name)
        os.truncate(self.ship.logs / self.name, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_line_is_stored_once_over_kills_of_ship_and_broker_and_rotations(new_broker, tmp_path, seed):
    broker, rng = new_broker(), random.Random(seed)
    broker.gateway = False
    broker.up()
    for ship in shipping(broker, tmp_path, "app"):
        ship.start("--from-start")
        ship.wait_state()
        writers = [Writer(ship, rng, "a.log")]
        blows = [*["ship"] * 5, *["rename"] * 5, *["truncate"] * 2, "framer", "ingress", "all", "file", "file"]
        rng.shuffle(blows)
        for blow in blows:
            for writer in writers:
                writer.write()
            victim = rng.choice(writers)
            if blow in ("rename", "ship"):
                victim.wait_known()
            if blow == "ship":
                time.sleep(rng.random() ** 2 * 1.5)  # the instant of the kill is what is tried
                assert ship.end(signal.SIGKILL) == KILLED, ship.said()
                for writer in writers:
                    writer.write()
                if rng.random() < 0.5:
                    victim.rename()
                ship.start()
            elif blow == "file":
                writers.append(Writer(ship, rng, f"{len(writers)}.log"))
            elif blow in ("rename", "truncate"):
                getattr(victim, blow)()
            elif blow == "all":
                broker.kill()
                broker.up()
            else:
                broker.kill(blow)
        for writer in writers:
            writer.write()
            ship.wait_sent(writer.name)
            writer.file.close()
        assert ship.end() == 0, ship.said()
        found, expected = {}, {writer.name: list(range(1, writer.number + 1)) for writer in writers}
        for line in ship.stored():
            name, number, _ = line.split(b" ")
            found.setdefault(name.decode(), []).append(int(number))
        lacking = {name: sorted({*numbers} - {*found.get(name, [])})[:9] for name, numbers in expected.items()}
        assert found == expected, f"lacking: {lacking}\n{ship.said()}"
        assert "Traceback" not in ship.said()


# --- where it begins, and its end --------------------------------------------------------------------------------------


def test_a_first_start_begins_at_the_end_and_a_later_one_where_the_last_ended(ship):
    (ship.logs / "a.log").write_bytes(b"old\nbegun ")
    ship.start()
    ship.wait_state()
    with (ship.logs / "a.log").open("ab") as log:
        log.write(b"here\nnew\n")
    (ship.logs / "b.log").write_bytes(b"of a new file\n")
    for name in ("a.log", "b.log"):
        ship.wait_sent(name)
    assert ship.end() == 0
    with (ship.logs / "a.log").open("ab") as log:
        log.write(b"while it was down\n")
    (ship.logs / "c.log").write_bytes(b"appeared meanwhile\n")
    ship.start()
    for name in ("a.log", "c.log"):
        ship.wait_sent(name)
    assert ship.end(signal.SIGINT) == 0
    expected = [b"begun here", b"new", b"of a new file", b"while it was down", b"appeared meanwhile"]
    assert sorted(ship.stored()) == sorted(expected)


def test_from_start_sends_what_was_there(ship):
    (ship.logs / "a.log").write_bytes(b"old\n")
    ship.start("--from-start")
    ship.wait_sent("a.log")
    assert ship.end() == 0
    assert ship.stored() == [b"old"]
    assert "1 files, sent 1 lines, 4 bytes" in ship.said()


def test_once_leaves_half_a_line_says_so_and_sends_it_when_its_newline_came(ship):
    (ship.logs / "a.log").write_bytes(b"one\nha")
    done = ship.once()
    assert (done.returncode, done.stdout) == (0, "1 files, sent 1 lines, 4 bytes\n")
    assert "a.log ends without a newline; 2 bytes of 1 files wait for theirs" in done.stderr
    with (ship.logs / "a.log").open("ab") as log:
        log.write(b"lf\n")
    assert ship.once().returncode == 0
    assert ship.stored() == [b"one", b"half"]


def test_it_waits_for_a_broker_that_is_down_and_says_so(new_broker, tmp_path):
    broker = new_broker()
    broker.gateway = False
    for ship in shipping(broker, tmp_path, "app"):
        (ship.logs / "a.log").write_bytes(b"one\n")
        ship.start("--from-start")
        nothing = "waiting: the broker accepts nothing"
        until(lambda ship=ship, nothing=nothing: nothing in ship.said(), nothing, ship.said, process=ship.process)
        broker.up()
        ship.wait_sent("a.log")
        assert ship.end() == 0
        assert ship.stored() == [b"one"]


def test_a_broker_that_starts_anew_with_a_smaller_limit_gets_a_longer_line_as_a_letter(new_broker, tmp_path):
    broker = new_broker()
    broker.gateway = False
    broker.up()
    for ship in shipping(broker, tmp_path, "app"):
        ship.start("--from-start")
        for line in (b"1\n", b"2\n", b"x" * 100_000 + b"\n3\n"):
            append(ship, line)
            ship.wait_sent("a.log")
            if line == b"1\n":
                broker.down()
                broker.up(KMQ_MAX_LINE=65_536)
        assert ship.end() == 0, ship.said()
        assert ship.stored() == [b"1", b"2", b"3"]
        assert [b"reason=too_long;len=100000" in line for line in broker.lines("dead")] == [True]


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self):
        self.now, self.asked = 1000.0, 0

    def __call__(self):
        self.asked += 1
        return self.now


class Stop(threading.Event):
    """What tells ship to stop. It waits for it after each look; before it is connected it does not."""

    def __init__(self):
        super().__init__()
        self.waits = 0

    def wait(self, timeout=None):
        self.waits += 1
        return super().wait(timeout)


@pytest.fixture
def shipment(ship, monkeypatch):
    """A run of ship in this process, by a Clock; the test starts it."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name in ship.broker.env:
        if name.startswith("KMQ_"):
            monkeypatch.setenv(name, ship.broker.env[name])
    watched, stop = FollowedFiles([f"{ship.logs}/*.log"], set(), print), Stop()
    return Shipment(
        *(str(ship.state), "", ship.topic, 1, watched, False, stop, Patience(str), open_producer), clock=Clock()
    )


@pytest.fixture
def running(ship, shipment):
    """A ship that runs, from the start of the files, and has looked at them once; ended by the test."""
    work = shipment
    thread = threading.Thread(target=run, args=(work, True))

    def end(then=work.stop.set):
        then()
        thread.join(60)
        assert not thread.is_alive()

    thread.start()
    try:
        ship.broker.wait(lambda: work.stop.waits > 0, "the look after which it waits")  # it counts from when that began
        yield work, end
    finally:
        work.ends_at = 0.0
        end()


def append(ship, data, name="a.log"):
    with (ship.logs / name).open("ab") as log:
        log.write(data)


def test_where_no_terminal_is_it_reports_once_a_minute(ship, running, capsys):
    work, end = running
    said = ""

    def has_said(count):
        nonlocal said
        said += capsys.readouterr().err
        return said.count("bytes behind") >= count

    for number, step in enumerate([0.25, 59.0, 1.0, 59.0], 1):
        append(ship, b"%d\n" % number)
        work.clock.now += step
        ship.broker.wait(
            lambda sent=number: work.lines == sent, "the line sent"
        )  # what there is to say was said before
        if number == 2:
            assert not has_said(1)
    assert has_said(1) and said.count("bytes behind") == 1
    assert re.search(r"kmq: 1 files, sent 2 lines, 4 bytes, 1 lines/s, 2 bytes behind", said), said
    work.clock.now += 1.0
    ship.broker.wait(lambda: has_said(2), "the second report")
    end()
    assert "1 files, sent 4 lines, 8 bytes\n" in capsys.readouterr().out


@pytest.mark.parametrize("is_back", [True, False], ids=["in time", "too late"])
def test_told_to_stop_it_sends_for_five_seconds_more(ship, running, is_back):
    work, end = running
    append(ship, b"one\n")
    work.clock.now += 0.25
    ship.broker.wait(lambda: work.lines >= 1, "the first line sent")
    durability = psutil.Process(ship.broker.pids()["durability"])
    durability.suspend()
    try:
        append(ship, b"two\n")
        work.clock.now += 0.25
        ship.broker.wait(lambda: "offset=4 end=8 lines=1" in ship.state.read_text(), "a plan")
        work.stop.set()
        ship.broker.wait(lambda: work.ends_at < 1e9, "its end noted")
        work.clock.now = work.ends_at - 0.125
        asked = work.clock.asked
        ship.broker.wait(lambda: work.clock.asked > asked + 2, "two looks at the clock")
        assert work.ends_at == work.clock.now + 0.125 and work.lines == 1
        end(durability.resume if is_back else lambda: setattr(work.clock, "now", work.ends_at))
    finally:
        durability.resume()
    assert work.lines == (2 if is_back else 1)
    assert ship.once().returncode == 0
    assert ship.stored() == [b"one", b"two"]


def test_told_to_stop_as_the_broker_answers_it_sends_what_is_there(ship, shipment, monkeypatch):
    monkeypatch.setattr(shipment.patience, "moved", shipment.stop.set)
    append(ship, b"one\n")
    run(shipment, True)
    assert shipment.lines == 1 and ship.stored() == [b"one"]


def test_over_tls_with_a_token_each_line_is_stored_once_and_a_wrong_token_sends_nothing(
    new_broker, authority, tmp_path
):
    broker, holders = new_broker(), tmp_path / "tokens"
    cert, key = map(str, authority.issue("server"))
    (tmp_path / "good").write_text(tokens.new(str(holders), "shipper"))
    (tmp_path / "wrong").write_text("kmq_" + "x" * 40)
    broker.gateway = False
    broker.env |= {"KMQ_TLS_HOST": "127.0.0.1", "KMQ_TLS_PORT": "0", "KMQ_TLS_CERT": cert, "KMQ_TLS_KEY": key}
    broker.up(KMQ_TOKENS=holders)
    port = (broker.pipes / "tls.port").read_text().strip()
    for ship in shipping(broker, tmp_path, "app"):

        def once(token, ship=ship):
            where = ["--url", "https://localhost", "--token", f"@{tmp_path / token}"]
            command = ship.command("--once")[1:]
            return broker.run("kmq", *where, *command, KMQ_TLS_PORT=port, SSL_CERT_FILE=authority.path)

        append(ship, b"one\n")
        done = once("wrong")
        assert done.returncode == CONFIG and "unauthorized" in done.stderr and "x" * 40 not in done.stderr, done.stderr
        for line in (b"two\n", b"three\n"):
            append(ship, line)
            done = once("good")
            assert done.returncode == 0, done.stderr
        assert ship.stored() == [b"one", b"two", b"three"]


# --- odd files and lines ---------------------------------------------------------------------------------------------


def test_bytes_of_every_kind_arrive_as_they_are_and_long_lines_are_letters(ship):
    lines = [b"\0\x01binary\xff", b"", b"crlf\r", b"p|i|p|e|s", b"\xc3\x28", b"k" * 1_048_000, b"end"]
    long = [b"z" * 3_000_000, b"y" * 1_048_570, bytes(900_000)]
    (ship.logs / "a.log").write_bytes(b"\n".join([*lines[:-1], *long, lines[-1], b""]))
    done = ship.once()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"1 files, sent {len(lines + long)} lines, {(ship.logs / 'a.log').stat().st_size:,} bytes" + (
        ", 3 too long, 2 with NUL\n"
    )
    assert "has lines with NUL bytes" in done.stderr and "too long for KMQ_MAX_LINE" in done.stderr
    assert ship.stored() == lines
    letters = [line for line in ship.broker.lines("dead") if b"reason=too_long" in line]
    assert [re.search(rb"len=(\d+)", line)[1] for line in letters] == [b"3000000", b"1048570", b"900000"]
    starts = [decoded(line) for line in letters]
    assert [line.startswith(start) for line, start in zip(long, starts, strict=True)] == [True] * 3
    assert min(map(len, starts)) > 700_000


def test_a_directory_a_fifo_and_an_unreadable_path_are_named_and_the_others_go_on(ship):
    (ship.logs / "dir.log").mkdir()
    os.mkfifo(ship.logs / "fifo.log")
    (ship.logs / "loop.log").symlink_to("loop.log")
    (ship.logs / "a.log").write_bytes(b"good\n")
    done = ship.once()
    assert done.returncode == 1
    assert "dir.log is not read: it is a directory" in done.stderr
    assert "fifo.log is not read: it is no regular file" in done.stderr
    assert "loop.log is not read: Too many levels of symbolic links" in done.stderr
    assert "not all was sent: 3 that the patterns match" in done.stderr
    assert ship.stored() == [b"good"]


def test_an_unreadable_file_is_not_said_to_end_without_a_newline(ship, shipment, monkeypatch, capsys):
    def open_or_refuse(file, path, real=LogFile.open):
        if path.endswith("secret.log"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # the tests may run as root
        return real(file, path)

    monkeypatch.setattr(LogFile, "open", open_or_refuse)
    append(ship, b"good\n")
    append(ship, b"not read\n", "secret.log")
    shipment.is_once = True
    run(shipment, True)
    with pytest.raises(KmqError, match="not all was sent: 1 that"):
        _judge(shipment, was_interrupted=False)
    said = capsys.readouterr()
    assert "secret.log is not read: Permission denied" in said.out and "newline" not in said.err, said
    assert ship.stored() == [b"good"]


def test_lines_of_a_topic_that_nobody_declared_are_named_and_sent_when_it_is_there(new_broker, tmp_path):
    broker = new_broker()
    broker.up(KMQ_AUTO_CREATE_TOPICS="off")
    for ship in shipping(broker, tmp_path, "app"):
        (ship.logs / "a.log").write_bytes(b"1\n2\n3\n")
        done = ship.once()
        assert done.returncode == CONFIG
        assert "a.log, line 1 after byte 0: refused by the broker: unknown_topic" in done.stderr
        assert "3 lines refused; the next start sends them again" in done.stderr
        assert broker.kmq("topics", "create", "app").returncode == 0
        port = (broker.pipes / "ingress.port").read_text().strip()
        done = broker.run("kmq", "--host", "127.0.0.1", *ship.command("--once")[1:], KMQ_PORT=port)  # as one elsewhere
        assert done.returncode == 0, done.stderr
        assert ship.stored() == [b"1", b"2", b"3"]


def test_a_pattern_without_files_is_an_error_of_once(ship):
    done = ship.once(pattern="*.txt")
    assert done.returncode == 1 and "no file matches" in done.stderr


def test_a_file_cut_while_ship_is_down_is_read_from_its_start(ship):
    log = ship.logs / "a.log"
    log.write_bytes(b"first\nsecond\n")
    assert ship.once().returncode == 0
    log.write_bytes(b"third\nfourth, and longer than before\n")  # the same inode
    done = ship.once()
    assert "a.log has new content, so it is read from its start" in done.stderr
    assert "1 files with new content" in done.stdout
    assert ship.stored() == [b"first", b"second", b"third", b"fourth, and longer than before"]


def test_a_file_overwritten_with_as_many_bytes_is_read_anew_and_one_that_was_touched_is_not(ship):
    for first in (b"aaaa\nbbbb\n", b"cccc\ndddd\n", b"cccc\neeee\n"):
        (ship.logs / "a.log").write_bytes(first)
        assert ship.once().stdout.startswith("1 files, sent 2 lines, 10 bytes")
    (ship.logs / "a.log").touch()
    assert ship.once().stdout == "1 files, sent 0 lines, 0 bytes\n"
    assert ship.stored() == [b"aaaa", b"bbbb", b"cccc", b"dddd", b"cccc", b"eeee"]


def test_a_file_renamed_while_ship_is_down_is_read_to_its_end_first(ship):
    log = ship.logs / "a.log"
    log.write_bytes(b"1\n2\n")
    assert ship.once().returncode == 0
    with log.open("ab") as file:
        file.write(b"3\n")
    log.rename(ship.logs / "a.log.1")
    log.write_bytes(b"4\n")
    assert ship.once().returncode == 0
    assert ship.stored() == [b"1", b"2", b"3", b"4"]
    assert list(ship.rows()) == ["a.log"]


def test_a_renamed_file_is_read_to_its_end_first_also_if_a_pattern_has_both_names(ship):
    log = ship.logs / "a.log"
    log.write_bytes(b"0\n")
    assert ship.once(pattern="a.log*").returncode == 0
    lines = [b"%d %b" % (number, b"x" * 1000) for number in range(3000)]  # more than one block
    with log.open("ab") as file:
        file.write(b"\n".join([*lines, b""]))
    log.rename(ship.logs / "a.log.1")
    log.write_bytes(b"new\n")
    assert ship.once(pattern="a.log*").returncode == 0
    assert ship.stored() == [b"0", *lines, b"new"]


def test_an_older_file_is_read_first_also_by_a_ship_that_has_its_new_name_from_the_state(ship):
    append(ship, b"1\n")
    assert ship.once(pattern="a.log*").returncode == 0
    append(ship, b"2\n")
    rotate(ship)
    append(ship, b"3\n")
    state = load_state(str(ship.state))
    [old] = state.files
    found = os.stat(ship.logs / "a.log")
    new = LogFile(old.path, found.st_dev, found.st_ino, origin=old.path, born=old.born + 1, real=old.path)
    old.path = old.real = f"{old.path}.1"
    state.files[:] = [new, old]  # as at the end of a round that had lines of the old file alone
    save_state(str(ship.state), state)
    assert ship.once(pattern="a.log*").returncode == 0
    assert ship.stored() == [b"1", b"2", b"3"]


def test_half_a_line_of_a_renamed_file_is_sent_although_a_pattern_has_its_new_name(ship, running, monkeypatch):
    work, end = running
    work.watched.patterns[:] = [f"{ship.logs}/a.log*"]
    append(ship, b"a\nhalf")
    work.clock.now += 0.25
    ship.broker.wait(lambda: work.lines >= 1, "the first line sent")
    (ship.logs / "a.log").rename(ship.logs / "a.log.1")
    append(ship, b"new\n")
    work.clock.now += 0.25
    ship.broker.wait(lambda: work.lines == 2, "the line of the new file sent")
    monkeypatch.setattr(finding.has_ended, "__defaults__", (0.0,))
    work.clock.now += 0.25
    ship.broker.wait(lambda: work.lines == 3, "the end of the old file sent")
    end()
    assert ship.stored() == [b"a", b"new", b"half"]


def test_a_file_deleted_while_ship_is_down_is_named(ship):
    (ship.logs / "a.log").write_bytes(b"1\n")
    (ship.logs / "b.log").write_bytes(b"2\n")
    assert ship.once().returncode == 0
    (ship.logs / "a.log").unlink()
    done = ship.once()
    assert done.returncode == 0 and "a.log is gone; what came after byte 2, if anything, is not sent" in done.stderr


def test_a_renamed_file_that_is_deleted_while_ship_is_down_is_named(ship):
    append(ship, b"1\n")
    assert ship.once().returncode == 0
    rotate(ship)
    assert ship.once().returncode == 0  # it has a.log.1 now
    append(ship, b"of a writer that has not heard of the rotation\n", "a.log.1")
    (ship.logs / "a.log.1").unlink()
    done = ship.once()
    assert "a.log is gone; what came after byte 2, if anything, is not sent" in done.stderr, done.stderr
    assert "gone" not in ship.once().stderr


def test_files_whose_directory_was_away_go_on_where_they_were(ship):
    (ship.logs / "a.log").write_bytes(b"1\n")
    assert ship.once().returncode == 0
    away = ship.root / "not" / "found"
    away.parent.mkdir()
    ship.logs.rename(away)
    for make in (lambda: None, ship.logs.mkdir):  # not there, and then as the place of a volume that is not mounted
        make()
        done = ship.once()
        assert done.returncode == 1 and "no file matches" in done.stderr
        assert "a.log is away with its directory; when it is back, it goes on at byte 2" in done.stderr
    ship.logs.rmdir()
    away.rename(ship.logs)
    with (ship.logs / "a.log").open("ab") as log:
        log.write(b"2\n")
    assert ship.once().returncode == 0
    assert ship.stored() == [b"1", b"2"]


def test_what_no_pattern_names_any_more_is_not_read_and_goes_on_when_one_does(ship):
    for name in ("a.log", "b.log"):
        (ship.logs / name).write_bytes(b"%b 1\n" % name.encode())
    assert ship.once().returncode == 0
    with (ship.logs / "b.log").open("ab") as log:
        log.write(b"b.log 2\n")
    assert ship.once(pattern="a.log").stdout == "1 files, sent 0 lines, 0 bytes\n"
    assert ship.once().returncode == 0
    assert sorted(ship.stored()) == [b"a.log 1", b"b.log 1", b"b.log 2"]


# --- while nothing can be sent, and what rotations do meanwhile --------------------------------------------------------


def rotate(ship):
    """As logrotate with `rotate 1` and `create`: the file before the last one is deleted."""
    (ship.logs / "a.log").rename(ship.logs / "a.log.1")
    (ship.logs / "a.log").touch()


def wait_seen(ship, count):
    """Until ship has seen that a.log has so many bytes."""
    inode = f":{os.stat(ship.logs / 'a.log').st_ino:x}: "
    rows = rf"size={count} file=\w+{inode}"
    ship.broker.wait(lambda: re.search(rows, ship.state.read_text()), f"{count} bytes of {inode} in the state")


def test_rotations_while_the_broker_is_down_take_no_line_away(new_broker, tmp_path):
    broker = new_broker()
    broker.gateway = False
    for ship in shipping(broker, tmp_path, "app"):
        ship.start("--from-start")
        lines = [b"%d" % number for number in range(290)]
        for at in range(0, 290, 58):
            append(ship, b"\n".join([*lines[at : at + 58], b""]))
            wait_known(ship)
            rotate(ship)
        broker.up()
        append(ship, b"last\n")
        ship.wait_sent("a.log")
        assert ship.end() == 0, ship.said()
        assert ship.stored() == [*lines, b"last"]
        assert "lost" not in ship.said()


def wait_known(ship):
    """Until ship has a.log open, so that it can be deleted."""
    inode = os.stat(ship.logs / "a.log").st_ino

    def is_held():
        assert ship.process.poll() is None, ship.said()
        with contextlib.suppress(psutil.Error, OSError):
            return any(os.stat(f"/proc/{ship.process.pid}/fd/{fd}").st_ino == inode for fd in descriptors(ship))
        return False

    ship.broker.wait(is_held, "a.log held open")


def descriptors(ship):
    return os.listdir(f"/proc/{ship.process.pid}/fd")


def test_rotations_while_a_round_waits_for_its_acknowledgement_take_no_line_away(ship):
    ship.start()
    ship.wait_state()
    append(ship, b"0\n")
    ship.wait_sent("a.log")
    durability = psutil.Process(ship.broker.pids()["durability"])
    durability.suspend()
    try:
        append(ship, b"1\n")
        ship.broker.wait(lambda: "offset=2 end=4 lines=1" in ship.state.read_text(), "a plan")
        for number in range(2, 5):
            append(ship, b"%d\n" % number)
            rotate(ship)
            append(ship, b"%d.\n" % number)
            wait_known(ship)
    finally:
        durability.resume()
    ship.wait_sent("a.log")
    assert ship.end() == 0, ship.said()
    assert ship.stored() == [b"0", b"1", b"2", b"2.", b"3", b"3.", b"4", b"4."]


def test_what_is_cut_off_unread_is_counted_and_named_and_the_exit_code_says_so(new_broker, tmp_path):
    broker = new_broker()
    broker.gateway = False
    for ship in shipping(broker, tmp_path, "app"):
        append(ship, b"one\ntwo\n")
        ship.start("--from-start")
        ship.wait_state()
        wait_known(ship)
        os.truncate(ship.logs / "a.log", 0)
        ship.broker.wait(
            lambda ship=ship: "a.log was cut off: 8 bytes after byte 0 were not read" in ship.said(), "the loss named"
        )
        broker.up()
        append(ship, b"three\n")
        ship.wait_sent("a.log")
        assert ship.end() == 1
        assert "8 bytes lost" in ship.said() and "8 bytes that were not read are lost" in ship.said()
        assert ship.stored() == [b"three"]


def test_what_a_rotation_has_deleted_unread_is_lost_with_the_end_of_ship_and_named(new_broker, tmp_path):
    broker = new_broker()
    broker.gateway = False
    for ship in shipping(broker, tmp_path, "app"):
        append(ship, b"one\ntwo\n")
        ship.start("--from-start")
        ship.wait_state()
        wait_known(ship)
        (ship.logs / "a.log").unlink()
        assert ship.end() == 1
        assert "a.log is deleted: 8 bytes after byte 0 are lost with this end" in ship.said()


@pytest.fixture
def planned(ship):
    """What a kill leaves when the broker has none of the two lines of a first plan, made by hand; a.log grew since then."""
    append(ship, b"one\ntwo\n")
    assert ship.once().returncode == 0
    state = load_state(str(ship.state))
    append(ship, b"first\nsecond\n", "b.log")
    found = os.stat(ship.logs / "b.log")
    file = LogFile(f"{ship.logs}/b.log", found.st_dev, found.st_ino, size=found.st_size, real=f"{ship.logs}/b.log")
    assert file.open(file.path) and len(file.read(1000, is_final=False).lines) == 2
    state.files.append(file)
    save_state(str(ship.state), state)
    file.close()
    return ship


def test_lines_on_their_way_that_are_cut_off_while_ship_is_down_are_counted_and_named(planned):
    (planned.logs / "b.log").write_bytes(b"new\n")
    done = planned.once()
    assert done.returncode == 1, done.stderr
    assert "b.log was cut off: up to 13 bytes after byte 0 were on their way, and are lost" in done.stderr
    assert "13 bytes lost" in done.stdout
    assert planned.stored() == [b"one", b"two", b"new"]


def test_lines_on_their_way_that_are_deleted_while_ship_is_down_are_counted_and_named(planned):
    (planned.logs / "b.log").unlink()
    done = planned.once()
    assert done.returncode == 1, done.stderr
    assert (
        "b.log is gone: 13 bytes after byte 0 are lost, and what came after the last look, if anything" in done.stderr
    )
    assert planned.stored() == [b"one", b"two"]


def test_an_inode_that_a_file_of_another_name_has_got_is_not_the_file_that_had_it(ship):
    """Rotated, compressed and deleted while ship is down; the next file that is made gets its inode."""
    append(ship, b"1\n2\n")
    assert ship.once().returncode == 0
    append(ship, b"3\n")
    (ship.logs / "a.log").unlink()
    append(ship, b"first\nsecond\nthird\n", "b.log")
    state = load_state(str(ship.state))
    [file] = state.files
    file.inode, file.size = os.stat(ship.logs / "b.log").st_ino, 6
    save_state(str(ship.state), state)
    done = ship.once()
    assert done.returncode == 1, done.stderr
    assert "a.log is gone: 2 bytes after byte 4 are lost" in done.stderr and "b.log" not in done.stderr
    assert "2 files" not in done.stdout
    assert ship.stored() == [b"1", b"2", b"first", b"second", b"third"]


def test_an_inode_that_the_next_file_of_the_same_name_has_got_is_not_the_file_that_had_it(ship):
    """The older of two rotated files is deleted while ship is down, and the new a.log gets its inode: it is read last."""
    append(ship, b"1\n2\n")
    assert ship.once().returncode == 0
    append(ship, b"3\n")
    rotate(ship)
    append(ship, b"4\n")
    state = load_state(str(ship.state))
    [former] = state.files
    gone = LogFile(
        former.path, former.device, os.stat(ship.logs / "a.log").st_ino, 9, 9, 0, 0x5EED, size=20, real=former.path
    )
    gone.gone_at, gone.origin, former.born = 0.0, former.origin, 1
    state.files[:] = [gone, former]
    save_state(str(ship.state), state)
    done = ship.once()
    assert done.returncode == 1, done.stderr
    assert "a.log is gone: 11 bytes after byte 9 are lost" in done.stderr and "new content" not in done.stderr
    assert ship.stored() == [b"1", b"2", b"3", b"4"]


def test_while_sending_waits_the_state_has_how_far_the_files_have_grown(ship, running):
    work, end = running
    durability = psutil.Process(ship.broker.pids()["durability"])
    durability.suspend()
    try:
        append(ship, b"1\n")
        work.clock.now += 0.25
        ship.broker.wait(lambda: "offset=0 end=2 lines=1" in ship.state.read_text(), "a plan")
        append(ship, b"2\n")

        def is_saved():
            work.clock.now += 5.0
            return "offset=0 end=2 lines=1" in (text := ship.state.read_text()) and " size=4 " in text

        ship.broker.wait(is_saved, "4 bytes in the state")
    finally:
        durability.resume()
    ship.broker.wait(lambda: work.lines >= 1, "the first line sent")
    end()
    assert ship.stored() == [b"1", b"2"]


# --- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rotated", "re-pointed", "directory renamed", "moved below"])
def test_the_rest_of_a_file_that_a_link_led_to_is_found_at_its_real_place(ship, how):
    """As /var/log/containers/*.log, whose targets the kubelet rotates."""
    pods, link = ship.root / "pods" / "web", ship.logs / "a.log"
    pods.mkdir(parents=True)
    link.symlink_to("../pods/web/0.log")
    (pods / "0.log").write_bytes(b"1\n")
    assert ship.once().returncode == 0
    with (pods / "0.log").open("ab") as log:
        log.write(b"2\n")
    if how == "rotated":
        (pods / "0.log").rename(pods / "0.log.20261129")
    elif how == "re-pointed":
        link.unlink()
        link.symlink_to("../pods/web/1.log")
    elif how == "directory renamed":
        pods.rename(ship.root / "pods" / "web.old")
        pods.mkdir()
    else:
        (pods / "old").mkdir()
        (pods / "0.log").rename(pods / "old" / "any.name")
    (pods / ("1.log" if how == "re-pointed" else "0.log")).write_bytes(b"3\n")
    done = ship.once()
    assert done.returncode == 0 and "gone" not in done.stderr, done.stderr
    assert ship.stored() == [b"1", b"2", b"3"]


def test_a_file_that_was_only_seen_is_found_after_its_rename_too(ship):
    """It came, and was renamed while ship was down, before anything of it was sent."""
    ship.start()
    ship.wait_state()
    append(ship, b"0\n", "b.log")
    ship.wait_sent("b.log")
    durability = psutil.Process(ship.broker.pids()["durability"])
    durability.suspend()
    try:
        append(ship, b"1\n", "b.log")
        ship.broker.wait(lambda: "offset=2 end=4 lines=1" in ship.state.read_text(), "a plan")
        append(ship, b"2\n3\n")
        wait_seen(ship, 4)
        assert ship.end(signal.SIGKILL) == KILLED
    finally:
        durability.resume()
    rotate(ship)
    append(ship, b"4\n")
    done = ship.once()
    assert done.returncode == 0, done.stderr
    assert ship.stored() == [b"0", b"1", b"2", b"3", b"4"]


# --- compressed files, and NUL bytes -----------------------------------------------------------------------------------


def test_the_pattern_of_all_rotations_sends_no_compressed_file_and_no_excluded_one(ship):
    text = b"".join(b"%d of a file that was rotated\n" % number for number in range(100))
    made = {"gz": gzip.compress(text), "xz": lzma.compress(text), "bz2": bz2.compress(text)}
    made |= {"zst": b"\x28\xb5\x2f\xfd" + text, "lz4": b"\x04\x22\x4d\x18" + text, "zip.txt": gzip.compress(b"")}
    for name, data in made.items():
        append(ship, data, f"a.log.{name}")
    for name in ("a.log", "a.log.1", "a.log.swp", "a.log.bak"):
        append(ship, b"%b\n" % name.encode(), name)
    done = ship.once("--exclude", "*.swp", "--exclude", f"{ship.logs}/*.bak", pattern="a.log*")
    assert done.returncode == 0, done.stderr
    assert "sent 2 lines" in done.stdout and "6 compressed files left out" in done.stdout
    assert sorted(ship.stored()) == [b"a.log", b"a.log.1"]


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "down"])
def test_nul_bytes_after_copytruncate_are_skipped_where_the_writer_does_not_append(ship, is_running):
    lines = [b"x" * 100 + b"%d" % number for number in range(12_000)]  # over KMQ_MAX_LINE
    if is_running:
        ship.start("--from-start")
        ship.wait_state()
    with (ship.logs / "a.log").open("wb", buffering=0) as log:
        log.write(b"\n".join([*lines, b""]))
        size = log.tell()
        assert is_running or ship.once().returncode == 0
        ship.wait_sent("a.log")
        os.truncate(ship.logs / "a.log", 0)
        log.write(b"after\n")
        if is_running:
            ship.wait_sent("a.log")
            assert ship.end() == 0
            said = ship.said()
        else:
            said = ship.once().stdout
    assert f"{size:,} NUL bytes skipped" in said and "too long" not in said and "with NUL" not in said
    assert ship.stored() == [*lines, b"after"]


# --- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (lambda text: text[: len(text) // 2], CORRUPT, "damaged, and nothing was sent"),
        (lambda text: b"", CORRUPT, "damaged, and nothing was sent"),
        (lambda text: text.replace(b"offset=4", b"offset=0"), CORRUPT, "damaged, and nothing was sent"),
        (lambda text: bytes(len(text)), CORRUPT, "damaged, and nothing was sent"),
        (lambda text: text.replace(b"kmq-ship 2 ", b"kmq-ship 3 "), CONFIG, "its version is not 2"),
    ],
    ids=["cut", "empty", "changed", "zeroed", "version"],
)
def test_a_state_that_cannot_be_read_is_refused_and_nothing_is_sent(ship, damage, code, words):
    (ship.logs / "a.log").write_bytes(b"one\n")
    assert ship.once().returncode == 0
    damaged = damage(ship.state.read_bytes())
    ship.state.write_bytes(damaged)
    done = ship.once()
    assert (done.returncode, done.stdout) == (code, "") and words in done.stderr
    assert ship.state.read_bytes() == damaged
    assert ship.stored() == [b"one"]


def test_an_old_copy_of_the_state_is_refused(ship):
    (ship.logs / "a.log").write_bytes(b"one\n")
    assert ship.once().returncode == 0
    old = ship.state.read_bytes()
    (ship.logs / "a.log").write_bytes(b"one\ntwo\n")
    assert ship.once().returncode == 0
    ship.state.write_bytes(old)
    done = ship.once()
    assert done.returncode == CORRUPT and "is an old copy" in done.stderr and "1 lines more" in done.stderr
    assert ship.stored() == [b"one", b"two"]


def test_a_state_belongs_to_one_topic(ship):
    (ship.logs / "a.log").write_bytes(b"one\n")
    assert ship.once().returncode == 0
    done = ship.once("--topic", "other")
    assert done.returncode == CONFIG and f"belongs to topic {ship.topic}" in done.stderr


@pytest.fixture
def half_sent(ship):
    """What a kill leaves when the broker has one line of the two of a plan, made by hand."""
    log = ship.logs / "a.log"
    log.write_bytes(b"one\n")
    assert ship.once().returncode == 0
    log.write_bytes(b"one\ntwo\nthree\n")
    state = load_state(str(ship.state))
    [file] = state.files
    assert file.open(str(log)) and len(file.read(1000, is_final=False).lines) == 2
    save_state(str(ship.state), state)
    sent = ship.broker.run("kmq", "produce", "--raw", "--producer", state.name, text=f"{ship.topic}|0|2|two\n")
    assert sent.returncode == 0, sent.stderr
    return ship


def test_a_plan_is_sent_as_far_as_the_broker_does_not_have_it(half_sent):
    assert half_sent.once().returncode == 0
    assert half_sent.stored() == [b"one", b"two", b"three"]


def test_a_plan_waits_for_a_file_whose_directory_is_away(half_sent):
    ship, away = half_sent, half_sent.root / "not" / "found"
    away.parent.mkdir()
    ship.logs.rename(away)
    done = ship.once()
    assert done.returncode == CONFIG and "a.log: cannot be read, and a part of its lines was sent" in done.stderr
    away.rename(ship.logs)
    (ship.logs / "b.log").write_bytes(b"of b\n")
    assert ship.once().returncode == 0
    assert sorted(ship.stored()) == sorted([b"one", b"two", b"three", b"of b"])


def test_a_plan_does_not_wait_for_a_file_that_was_deleted(half_sent):
    (half_sent.logs / "b.log").write_bytes(b"of b\n")
    (half_sent.logs / "a.log").unlink()
    assert half_sent.once().returncode == 0
    assert half_sent.stored() == [b"one", b"two", b"of b"]


def test_two_ships_with_one_state_are_one_too_many(ship):
    ship.start()
    ship.wait_state()
    done = ship.once()
    assert done.returncode == BUSY
    assert f"--state {ship.state} is held by pid={ship.process.pid} " in done.stderr
    assert ship.end() == 0


def test_a_state_where_nothing_can_be_written_names_the_option(ship):
    ship.state = ship.root / "none" / "a.state"
    done = ship.once()
    assert done.returncode == CONFIG and f"--state {ship.state}: No such file or directory" in done.stderr


def test_a_broker_that_was_reset_gets_what_is_new(new_broker, tmp_path):
    broker = new_broker()
    broker.gateway = False
    broker.up()
    for ship in shipping(broker, tmp_path, "app"):
        (ship.logs / "a.log").write_bytes(b"one\n")
        assert ship.once().returncode == 0
        broker.down()
        for path in sorted(broker.data.rglob("*"), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        broker.up()
        (ship.logs / "a.log").write_bytes(b"one\ntwo\n")
        done = ship.once()
        assert done.returncode == 0 and "it is another one, or was reset" in done.stderr
        assert ship.stored() == [b"two"]


def test_ids_rise_at_an_emptied_broker_so_that_the_first_one_takes_lines_again(new_broker, tmp_path):
    """As when an address leads to another broker for a while."""
    first, second = new_broker(), new_broker()
    for broker in (first, second):
        broker.gateway = False
        broker.up()
    for ship in shipping(first, tmp_path, "app"):
        for broker, line in ((first, b"1\n2\n3\n"), (second, b"4\n"), (first, b"5\n"), (second, b"6\n")):
            append(ship, line)
            ship.broker = broker
            done = ship.once()
            assert done.returncode == 0, done.stderr
        assert ship.stored() == [b"4", b"6"]
        ship.broker = first
        assert ship.stored() == [b"1", b"2", b"3", b"5"]
