"""`kmq ship` beside logrotate, with every fault in turn: each line is stored once, or in a range that ship has named.

Judged by line: a writer notes in which file, and at which byte of it, each line began. A gap is in order only if ship has
named the byte where it begins, or a range around it. Lines that copytruncate cut off are lost by its nature, and named.
"""

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from typing import NamedTuple

import psutil
import pytest
from brokers import Broker
from chaos.loopfs import disk_of
from ships import Ship

MIB = 1 << 20
ROTATIONS = {  # log → how logrotate rotates it
    "renamed": "rotate 3\ncreate",
    "copied": "rotate 2\ncopytruncate",
    "packed": "rotate 2\ncreate\ncompress",
    "dated": "rotate 3\ncreate\ndateext\ndateformat -%Y%m%d-%s\ncompress\ndelaycompress",
    "deleted": "rotate 0\ncreate",
}
_NAMED = re.compile(
    r"/(\w+)\.log\S* (?:was cut off: (?:up to )?([\d,]+) bytes after byte ([\d,]+)|is gone: ([\d,]+) bytes after byte ([\d,]+)"
    r"|is deleted: ([\d,]+) bytes after byte ([\d,]+)|is gone; what came after byte ([\d,]+)"
    r"|has new content, so it is read from its start; byte ([\d,]+) was next).*"
)
_CREATED = 0o644


class Written(NamedTuple):
    """A line: the file it is in, by a number, and the bytes it takes there."""

    file: int
    start: int
    length: int
    at: float


class Named(NamedTuple):
    """A range that ship said is lost. `length` None: what came after it, if anything."""

    log: str
    start: int
    length: int | None
    text: str


class Writer(threading.Thread):
    """A service that appends numbered lines, some 200 a second, and hears of a rotation a little late."""

    def __init__(self, path, name, seed, stop):
        super().__init__()
        self.path, self.name, self.rng, self.stop, self.lines = path, name, random.Random(seed), stop, []

    def run(self):
        number, files = 0, itertools.count()
        log, file = self.path.open("ab", buffering=0), next(files)
        last = 0
        while not self.stop.wait(0.02):
            for _ in range(self.rng.choice([1, 7])):
                number += 1
                line = b"%b %d %b\n" % (self.name.encode(), number, b"x" * self.rng.choice([0, 50, 200]))
                log.write(line)
                start = os.lseek(log.fileno(), 0, os.SEEK_CUR) - len(line)
                file = file if start >= last else next(files)  # cut off
                last = start
                self.lines.append(Written(file, start, len(line), time.monotonic()))
            if self.rng.random() < 0.2 and not self.is_in_place(log):
                log.close()
                log, file, last = self.path.open("ab", buffering=0), next(files), 0
        log.close()

    def is_in_place(self, log):
        try:
            return os.stat(self.path).st_ino == os.fstat(log.fileno()).st_ino
        except FileNotFoundError:
            return False


class Soak:
    """A broker on a small disk, a ship, five writers, logrotate; and the faults, a method each."""

    def __init__(self, root, cleanup):
        self.disk = disk_of("ext4", 256 * MIB, root, cleanup)
        self.broker = Broker(root / "broker", self.disk.path / "data")
        self.broker.gateway = False
        cleanup.callback(self.broker.close)
        self.ship, self.rotated, self.rotated_at, self.events = Ship(self.broker, root, "app"), 0, 0.0, []
        cleanup.callback(self.ship.close)
        self.config = root / "logrotate.conf"
        rules = [f"{self.ship.logs}/{name}.log {{\nmissingok\n{how}\n}}\n" for name, how in ROTATIONS.items()]
        self.config.write_text("".join(rules))
        self.config.chmod(_CREATED)

    def start(self):
        self.broker.up()
        self.ship.start("--from-start")
        self.ship.wait_state()

    def note(self, what):
        self.events.append((time.monotonic(), what))

    def is_known(self):
        """Return True if the state has the files of all logs: a file that comes and goes unseen is nobody's."""
        state = self.ship.state.read_text()
        for name in ROTATIONS:
            status = os.stat(self.ship.logs / f"{name}.log")
            if not re.search(rf" file=\w+:{status.st_ino:x}: ", state):
                return False
        return True

    def wait_known(self):
        self.broker.wait(self.is_known, f"all files in the state\n{self.ship.said()[-2000:]}")

    def rotate(self, *, is_seen=True):
        if is_seen:
            self.wait_known()
        self.rest(max(0.0, self.rotated_at + 1.1 - time.monotonic()))  # dateext has one name a second
        self.rotated_at = time.monotonic()
        command = ["logrotate", "-f", "-s", self.ship.root / "logrotate.state", self.config]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.rotated += 1
        self.note("rotated")

    def rest(self, seconds):
        """Let writers and rotations go on for a while."""
        time.sleep(seconds)

    def rotate_often(self, count=4):
        for _ in range(count):
            self.rotate()

    def wait_sending(self):
        """Until ship has sent something that came just now."""
        before = self.ship.rows().get("renamed.log", 0), os.stat(self.ship.logs / "renamed.log").st_ino

        def has_sent():
            inode = os.stat(self.ship.logs / "renamed.log").st_ino
            return inode != before[1] or self.ship.rows().get("renamed.log", 0) > before[0]

        self.broker.wait(has_sent, f"lines sent\n{self.ship.said()[-2000:]}")

    def wait_refusing(self):
        size = len(self.ship.said())
        self.broker.wait(lambda: "waiting: " in self.ship.said()[size:], "ship waits for room")

    def kill(self):
        self.end(signal.SIGKILL)
        self._restart()

    def term(self):
        self.end(signal.SIGTERM)
        self._restart()

    def end(self, number):
        self.wait_known()
        assert self.ship.end(number) in (0, 1, -number), self.ship.said()

    def _restart(self):
        self.rest(0.3)
        self.rotate(is_seen=False)
        self.rest(0.3)
        self.ship.start()

    def pause(self):
        self.wait_known()
        self.ship.process.send_signal(signal.SIGSTOP)
        self.rest(1)
        self.rotate(is_seen=False)
        self.rest(1)
        self.ship.process.send_signal(signal.SIGCONT)

    def stuck(self):
        durability = psutil.Process(self.broker.pids()["durability"])
        durability.suspend()
        self.rotate_often()
        durability.resume()

    def stuck_kill(self):
        """The plan of a ship that is killed while no line of it is acknowledged."""
        durability = psutil.Process(self.broker.pids()["durability"])
        durability.suspend()
        self.rotate_often(2)
        self.end(signal.SIGKILL)
        durability.resume()
        self._restart()

    def down(self):
        self.broker.down()
        self.rotate_often()
        self.broker.up()

    def down_kill(self):
        self.broker.down()
        self.rotate_often(2)
        self.end(signal.SIGKILL)
        self._restart()
        self.rotate_often(2)
        self.broker.up()

    def crash(self):
        self.broker.kill()
        self.rotate_often(2)
        self.broker.up()

    def quota(self):
        self.broker.down()
        self.broker.up(KMQ_DATA_QUOTA=128 * MIB)
        ballast = self.disk.path / "data" / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 100 * MIB)
        self.wait_refusing()
        self.rotate_often()
        ballast.unlink()
        self.wait_sending()
        self.broker.down()
        self.broker.up()

    def disk_full(self):
        ballast = self.disk.fill(0)
        self.wait_refusing()
        self.rotate_often()
        ballast.unlink()


def ranges_of(said):
    """Return the ranges that ship named, in their order."""
    found = []
    for match in _NAMED.finditer(said):
        log, *numbers = match.groups()
        values = [None if each is None else int(each.replace(",", "")) for each in numbers]
        for length, start in ((values[0], values[1]), (values[2], values[3]), (values[4], values[5])):
            if start is not None:
                found.append(Named(log, start, length, match[0]))
        found += [Named(log, start, None, match[0]) for start in values[6:] if start is not None]
    return found


def gaps_of(lines, stored):
    """Return the runs of lines of one file that are not stored, as first and last number."""
    gaps = []
    for number, line in enumerate(lines, 1):
        if number in stored:
            continue
        if gaps and gaps[-1][1] == number - 1 and lines[gaps[-1][0] - 1].file == line.file:
            gaps[-1][1] = number
        else:
            gaps.append([number, number])
    return gaps


def judge(log, lines, stored, named):
    """Return the gaps that ship did not name, and how many lines are counted, and named without a count."""
    ranges, unnamed, counted, uncounted = [each for each in named if each.log == log], [], 0, 0
    follows = None  # the last number of a gap that is named, and has no end
    for first, last in gaps_of(lines, stored):
        start = lines[first - 1].start
        exact = [each for each in ranges if each.start == start]
        around = [each for each in ranges if each.length and each.start <= start < each.start + each.length]
        here = exact or around
        room = max((each.start + each.length - start for each in here if each.length), default=0)
        within = sum(line.start + line.length - start <= room for line in lines[first - 1 : last])
        has_no_end = any(each.length is None or "after the last look" in each.text for each in here)
        rest = last - first + 1 - within
        if rest and not (has_no_end or (log == "copied" and (here or follows == first - 1))):
            unnamed.append((first, last, within, lines[first - 1], [each.text for each in here]))
            continue
        counted, uncounted, follows = counted + within, uncounted + rest, last
    return unnamed, counted, uncounted


@pytest.mark.soak
@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("logrotate"), reason="logrotate is not installed")
def test_soak_beside_logrotate_each_line_is_stored_once_or_named(tmp_path):
    seed = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    with ExitStack() as cleanup:
        soak, stop = Soak(tmp_path, cleanup), threading.Event()
        soak.start()
        writers = [Writer(soak.ship.logs / f"{name}.log", name, f"{seed} {name}", stop) for name in ROTATIONS]
        cleanup.callback(stop.set)
        for writer in writers:
            writer.start()
        soak.wait_sending()
        faults = [*["kill"] * 2, *["term"] * 2, *["pause"] * 2, "stuck", "stuck_kill", "down", "down_kill", "crash"]
        faults += ["quota", "disk_full"]
        rng.shuffle(faults)
        for fault in faults:
            soak.note(fault)
            getattr(soak, fault)()
            soak.wait_sending()
            soak.rotate()
            soak.rest(rng.random())
        stop.set()
        for writer in writers:
            writer.join()
        for name in ROTATIONS:
            soak.ship.wait_sent(f"{name}.log")
        assert soak.ship.end() in (0, 1)
        report(soak, writers)


def report(soak, writers):
    stored = defaultdict(list)
    for line in soak.ship.stored():
        log, number, _ = line.split(b" ")
        stored[log.decode()].append(int(number))
    said, wrong = soak.ship.said(), []
    named = ranges_of(said)
    for writer in writers:
        numbers = stored[writer.name]
        twice = [number for number, count in Counter(numbers).items() if count > 1]
        unnamed, counted, uncounted = judge(writer.name, writer.lines, {*numbers}, named)
        out_of_order = sum(after < before for before, after in itertools.pairwise(numbers))
        print(
            f"log={writer.name} written={len(writer.lines)} stored={len(numbers)} twice={len(twice)}"
            f" out_of_order={out_of_order} lost_counted={counted} lost_named={uncounted}"
            f" unnamed={sum(last - first + 1 for first, last, *_ in unnamed)}"
        )
        wrong += [f"{writer.name}: {number} is stored twice" for number in twice[:9]]
        for first, last, within, line, texts in unnamed:
            events = [f"{at - line.at:+.1f} s {what}" for at, what in soak.events if -8 < at - line.at < 8]
            wrong.append(f"{writer.name}: {first} to {last}, byte {line.start}, {within} counted: {events} {texts}")
    faults = Counter(what for _, what in soak.events)
    print(f"rotations={soak.rotated} faults={dict(faults)} named={len(named)}")
    assert "Traceback" not in said
    assert not wrong, "\n".join([*wrong, said[-6000:]])
