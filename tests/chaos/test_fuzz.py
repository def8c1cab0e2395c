"""Bad input: whatever is thrown at the socket, the broker stays up, keeps its memory, and accounts for every line.

What must be stored of each line is worked out here, with nothing of kmq's own code for lines: a message as it
was sent (padded), or dead.malformed with a reason that applies, its length and the original. Beside the attackers a
well-behaved producer sends lines like those of real logs, which must all come out byte for byte and in order.
"""

import base64
import contextlib
import os
import pathlib
import random
import re
import resource
import select
import socket
import struct
from collections import Counter, defaultdict

import pytest
from fake_logger import FakeLogger
from waiting import attempts

from chaos.pod import Pod
from kmq.broker import stats
from kmq.framing import blocks, parser
from kmq.framing.dedupe import DedupeTable
from kmq.framing.parser import ReceivedLines
from kmq.links import layout, received

STAGES = ("ingress", "framer", "durability", "router")
MIB = 1 << 20
MAX_LINE = MIB
TOPIC = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9_-]{0,199}")
DOTTED = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")  # before a mark
# A stage holds a few copies of what a ring holds (4 MiB); ingress also up to 64 MiB of unfinished lines.
RSS_LIMIT = {"ingress": 110 * MIB, "framer": 64 * MIB, "durability": 64 * MIB, "router": 96 * MIB}
CONNECTIONS = 24  # at a time, beside the well-behaved one


# --- what must become of a line ------------------------------------------------------------------------------------


def reasons(line, finished=True):
    """Every reason that applies; none: it is a message."""
    found = set() if finished else {"no_newline"}
    key, bar, _ = line.partition(b"|")
    topic = key.partition(b".")[0]
    if len(line) > MAX_LINE:
        found.add("too_long")
    if not line:
        found.add("empty_line")
    if line[:1] in (b"!", b"+", b"-"):
        found.add("control_byte")
    if b"\0" in line:
        found.add("nul")
    if not bar:
        found.add("no_separator")
    elif not key:
        found.add("empty_routing_key")
    elif topic in (b"append", b"dropped") or topic.startswith(b"__"):
        found.add("reserved_topic")
    elif not TOPIC.fullmatch(topic):
        found.add("bad_topic")
    elif mark := re.search(rb"\.@(\d*)(?=\.|\Z)", key):
        if not DOTTED.fullmatch(key[: mark.start()]):
            found.add("bad_topic")
        elif int(mark[1] or 0):  # all topics here have one partition
            found.add("unknown_partition")
    return found


def topic_of(key):
    mark = re.search(rb"\.@\d*(?=\.|\Z)", key)
    return key[: mark.start()] if mark else key.partition(b".")[0]


class Account:
    """What was sent, against which what is stored is settled line by line."""

    def __init__(self):
        self.good = Counter()  # stored form of messages
        self.bad = defaultdict(list)  # (length, first bytes) → [(original, reasons)]
        self.cut_off = set()  # lines of connections that were reset: each may be there, whole or as a beginning
        self.acked = {}  # seq → stored form, as its producer was told

    def add(self, stream):
        """A stream that arrived whole."""
        *lines, rest = stream.split(b"\n")
        for line in lines:
            self._add(line, reasons(line))
        if rest:
            self._add(rest, reasons(rest, finished=False))

    def _add(self, line, why):
        if why:
            self.bad[len(line), line[:32]].append((line, why))
        else:
            self.good[line + b"|" * max(0, 3 - line.count(b"|"))] += 1

    def settle(self, stored, seq=0):
        """`stored` is a WAL record without seq and time. Raises AssertionError where nobody sent it."""
        if seq in self.acked:
            assert stored == self.acked.pop(seq), stored[:200]
        elif stored.startswith(b"dead.malformed||;reason="):
            self._settle_malformed(stored)
        elif stored.startswith(b"reset."):
            self.cut_off.remove(stored)
        else:
            assert self.good[stored] > 0, stored[:200]
            self.good[stored] -= 1

    def _settle_malformed(self, stored):
        _, _, header, payload = stored.split(b"|", 3)
        fields = dict(field.split(b"=") for field in header.split(b";")[1:])
        length = int(fields[b"len"])
        if fields.get(b"enc") == b"b64":
            payload = base64.b64decode(payload, validate=True)
        assert len(payload) >= min(length, MAX_LINE // 4 * 3 - 3)
        waiting = self.bad[length, payload[:32]]
        waiting.sort(key=lambda sent: len(sent[1]))  # of two alike, the one with fewer reasons can only be this one
        for number, (original, why) in enumerate(waiting):
            if fields[b"reason"].decode() in why and original.startswith(payload):
                del waiting[number]
                return
        is_cut_off = fields[b"reason"] == b"no_newline" and length == len(payload)
        assert is_cut_off and any(line.startswith(payload) for line in self.cut_off), stored[:200]

    def check_nothing_is_missing(self):
        missing = [line[:200] for line, count in self.good.items() if count]
        missing += [line[:200] for waiting in self.bad.values() for line, _ in waiting]
        missing += [line[:200] for line in self.acked.values()]
        assert not missing, f"{len(missing)} lines are not stored: {missing[:5]}"


@pytest.mark.parametrize("stored", [b"t|1|2|other", b"dead.malformed||;reason=nul;len=3|bad", b"reset.1|||x"])
def test_the_account_does_not_take_what_nobody_sent(stored):
    account = Account()
    account.add(b"t|1|2|x\nbad\n")
    with pytest.raises((AssertionError, KeyError)):
        account.settle(stored)


def test_the_account_misses_what_is_not_stored():
    account = Account()
    account.add(b"t|1|2|x\nbad\n")
    account.settle(b"t|1|2|x")
    with pytest.raises(AssertionError, match="bad"):
        account.check_nothing_is_missing()
    account.settle(b"dead.malformed||;reason=no_separator;len=3|bad")
    account.check_nothing_is_missing()


# --- the pod -------------------------------------------------------------------------------------------------------


class FuzzedPod(Pod):
    """Each stage that ends, or takes too much memory, is seen at once. Its directories lie deep: some names lead upwards."""

    def __init__(self, root):
        super().__init__(root, KMQ_DATA=root / "deep/down/data", KMQ_PIPES=root / "deep/down/pipes")
        self.data, self.pipes, self.peak = self.settings["KMQ_DATA"], self.settings["KMQ_PIPES"], Counter()
        self.data.parent.mkdir(parents=True)

    def begin(self):
        self.start()
        self.wait_ready()
        self.port = int((self.pipes / "ingress.port").read_text())
        self.outside = self.names_outside()

    def wait(self, condition, what, *more):
        super().wait(lambda: condition() or self.look(), what, *more)

    def look(self):
        """All are alive, and none has taken more memory than it may."""
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended: {self.tail()}"
            pages = int(pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            self.peak[name] = max(self.peak[name], pages * resource.getpagesize())
            assert self.peak[name] < RSS_LIMIT[name], f"{name} takes {self.peak[name] / MIB:.0f} MiB"

    def connect(self):
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setblocking(False)
        return sock

    def settle(self):
        """Everything that arrived is in the queues."""
        self.wait(lambda: stats.peek(self.instance).rows["ingress"].connections == 0, "ingress has let all go")
        with socket.create_connection(("127.0.0.1", self.port)) as sock:
            sock.sendall(b"last|0|0|line\n")
        self.wait((self.data / "last.log").exists, "the last line is in its queue")

    def names_outside(self):
        return sorted(path for path in self.root.rglob("*") if not {self.data, self.pipes} & {path, *path.parents})

    def wal(self):
        """The stored lines, without seq and time; the seqs have no gap."""
        lines = b"".join(path.read_bytes() for path in sorted((self.data / "append").glob("*.log"))).split(b"\n")
        assert lines.pop() == b""
        for seq, line in enumerate(lines, start=1):
            found, _, rest = line.split(b"|", 2)
            assert int(found) == seq
            yield line, rest

    def check_files(self):
        """Nothing lies where it does not belong."""
        assert self.names_outside() == self.outside
        legal = re.compile(
            r"id|lineage|format|deletions|\.spare|(router|producers)\.ckpt|append|append/(\d{20}\.(log|idx)|\.owner)|topics|topics/\.owner"
            r"|topics/[A-Za-z0-9_][\w.-]*(/(topic\.toml|\d+(/\d{20}\.(log|idx))?))?|[A-Za-z0-9_][\w.-]*\.log",
            re.ASCII,
        )
        strange = [str(p.relative_to(self.data)) for p in self.data.rglob("*")]
        assert not [name for name in strange if not legal.fullmatch(name)]
        for link in self.data.glob("*.log"):
            assert link.resolve().is_relative_to(self.data)
        pipes = {path.name for path in self.pipes.iterdir()}
        owners = {f"{name}.owner" for name in ("ingress", "raw", "received", "framed", "durable")}
        assert pipes == {"raw", "acks", "ingress.port", "ack.port", "local.token"} | owners

    def check_queues(self):
        """Each WAL record is in the log of its topic, once and in order."""
        queues = defaultdict(list)
        for line, rest in self.wal():
            queues[topic_of(rest.partition(b"|")[0]).decode()].append(line)
        for topic, lines in queues.items():
            path = self.data / "topics" / topic / "0" / f"{0:020d}.log"
            assert path.read_bytes() == b"".join(line + b"\n" for line in lines), topic
        assert set(os.listdir(self.data / "topics")) - {".owner"} == set(queues)


@pytest.fixture
def pod(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made = FuzzedPod(tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- the attackers -------------------------------------------------------------------------------------------------

TOPICS = [
    b"../../../etc/cron.d/x",
    b"..",
    b".",
    b"./t",
    b"/tmp/x",
    b"a/b",
    b"t\\..\\x",
    b"%2e%2e/x",
    b"t\r",
    b"\xff\xfe",
    b" t",
]
TOPICS += [
    b"t.@",
    b"t.@0",
    b"t.@7",
    b"q.w.@",
    b"q.w.@000",
    b"q..w.@",
    b"../x.@",
    b"t/x.@",
    b"t.\xff.@",
    b"t.@x.@",
    b"__t.@",
    b"append.@",
]
TOPICS += [b"x" * 199 + b".@", b"x." * 100 + b".@", b"t.@" + b"9" * 4000, b"t.@\r", b"t.@0.@9", b"r.@.@"]
TOPICS += [
    b"append",
    b"dropped.x",
    b"__groups",
    b"A" * 201,
    b"t/../../x",
    b"~",
    b"$(id)",
    b"topics/../../x",
    b"-rf",
    b"t|",
]


def random_bytes(rng):
    return b"\n".join(rng.randbytes(rng.randrange(4000)) for _ in range(rng.randrange(1, 40))) + rng.choice(
        [b"", b"\n"]
    )


def huge_lines(rng):
    lines = []
    for _ in range(rng.randrange(1, 4)):
        size = rng.choice([rng.randrange(3 * MIB), MAX_LINE - 1, MAX_LINE, MAX_LINE + 1, 4095, 4096, 4097])
        head = rng.choice(
            [
                b"huge.k|0|%d|" % rng.randrange(1 << 30),
                b"huge|%d|" % rng.randrange(1 << 30),
                b"no separator",
                b"+",
                b"\0",
            ]
        )
        lines.append((head + rng.choice([b"x", b"\xe2\x82\xac", b"a|b\t"]) * size)[:size])
    return b"\n".join(lines) + rng.choice([b"", b"\n"])


def bad_topics(rng):
    return b"".join(b"%b.k|0|%d|x\n" % (rng.choice(TOPICS), n) for n in range(rng.randrange(1, 200)))


def control_bytes(rng):
    marks = [b"!", b"+", b"-", b"!r 1 0 0", b"!c 1.1 1 1 1 0 9", b"+t|0|1|", b"-", b"-x", b"+" * 5000]
    # Not as the very first line: that would be a greeting or the attempt of one.
    return b"t|0|0|first\n" + b"".join(b"%b%d\n" % (rng.choice(marks), n) for n in range(rng.randrange(1, 200)))


def nuls(rng):
    lines = [b"t.k|0|%d|a\0b" % rng.randrange(1000), b"\0", b"\0" * 5000, b"t|0|1|\0", b"\0t|0|1|", b"t\0.k|0|1|x"]
    return b"\n".join(rng.choices(lines, k=rng.randrange(1, 60))) + rng.choice([b"", b"\n"])


def short_of_fields(rng):
    lines = [b"t", b"t|", b"t.k|x", b"t.k|1|2", b"|", b"||||", b"", b"\r", b"t.|", b".|", b"t|||||||"]
    return b"\n".join(rng.choices(lines, k=rng.randrange(1, 100))) + rng.choice([b"", b"\n"])


ATTACKS = [random_bytes, huge_lines, bad_topics, control_bytes, nuls, short_of_fields]


def with_messages(rng, stream):
    """The lines of an attack among messages, some of which are sent twice or come too late."""
    lines, id = [], 0
    for line in stream.split(b"\n"):
        id += rng.choice([0, 1, 1, 1, 3])
        lines += [b"acked.k|0|%d|x" % max(0, id - rng.choice([0, 0, 0, 1, 2])), line]
    return b"\n".join(lines)


def bad_hello(rng):
    words = [
        b"hello",
        b"acks=1",
        b"acks=2",
        b"producer=a/b",
        b"window=",
        b"producer=%b" % (b"x" * 65),
        b"\0",
        b"\xff",
        b"=",
        b"!",
    ]
    return (
        b"!"
        + rng.choice([b"", b"hello ", b"b 1", b"c 1.1 1 1 "])
        + b" ".join(rng.choices(words[2:], k=rng.randrange(1, 5)))
    )


def bad_unit(rng):
    """A unit that lies, is cut off, or is none. Nothing follows the fault, else a reset may overtake the refusal."""
    count = rng.randrange(1, 9)
    body = b"".join(b"lie|1|%d|%b\n" % (n, b"x" * rng.randrange(99)) for n in range(count))
    return rng.choice(
        [
            b"!unit %d %d p=lie\n%b" % (count + rng.choice([1, 7, -1] if count > 1 else [1, 7]), len(body), body),
            b"!unit %d %d p=lie\n%b" % (count, len(body) + rng.choice([1, 7]), body),
            b"!unit %d %d p=lie\n%b" % (count, len(body), body[: rng.randrange(len(body))]),
            b"!unit %d %d p=lie" % (count, len(body)),
            b"!unit %d %d %b\n" % (count, len(body), rng.choice([b"p=", b"p=a/b", b"w=a", b"p=a p=b", b"\xff"])),
            b"!unit %b\n"
            % rng.choice([b"", b"-1 5", b"1", b"0 5", b"9 5", b"1 1 1", b"a b", b"9" * 40, b"1 " + b"9" * 3000]),
            b"!%b\n" % rng.choice([b"", b"b 1", b"hello acks=1", b"c 1.1 1 1 1 0 9"]),
        ]
    )


def log_lines(rng, count):
    """Lines like those of real logs: CRLF, CR inside, tabs, bars, other encodings, a trace of several KiB."""
    words = b"sshd[2211]: Failed password \tat user= a|b||c caf\xe9 na\xc3\xafve 2026-05-20T01:02:03Z #0".split(b" ")
    words += [b"50%\rdone", b"+", b"!", b"-", b";reason=x", b"\xff\xfe", b"\x1b[0m", b"  ", b"=" * 80]
    for _ in range(count):
        length = rng.choice([0, 3, 8, 15, 15, 30, 700])
        yield b" ".join(rng.choices(words, k=length)) + rng.choice([b"", b"", b"\r"])


def own_logs():
    """Lines of the log files of this machine that may be read, at most a few MiB."""
    lines, size = [], 0
    for path in sorted(pathlib.Path("/var/log").rglob("*.log")):
        with contextlib.suppress(OSError):
            text = path.read_bytes()[: 2 * MIB]
            size += len(text)
            lines += text.split(b"\n")
        if size > 8 * MIB:
            break
    return [line for line in lines if b"\0" not in line]


class Sender:
    """One connection with its stream, sent in small steps. Ends in order, or with a reset in the middle."""

    def __init__(self, pod, rng, stream, step, reset_at=None):
        self.sock, self.rng, self.stream, self.step = pod.connect(), rng, memoryview(stream), step
        self.at, self.end = 0, len(stream) if reset_at is None else reset_at
        self.resets, self.over = reset_at is not None, False
        if step < 100:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def events(self):
        return select.POLLOUT if self.at < self.end else select.POLLIN

    def send_some(self):
        with contextlib.suppress(BlockingIOError):
            self.at += self.sock.send(
                self.stream[self.at : min(self.end, self.at + self.rng.randrange(1, self.step + 1))]
            )
        if self.at == self.end:
            self._finish()

    def go_on(self):
        if self.at < self.end:
            self.send_some()
        elif not self.sock.recv(1000):  # ingress has taken everything and closed its side
            self.sock.close()
            self.over = True

    def _finish(self):
        if self.resets:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sock.close()
            self.over = True
        else:
            self.sock.shutdown(socket.SHUT_WR)


def content_of(key, headers, payload):
    """What makes two messages of one id the same: not the partition mark, nor KMQ's own headers."""
    users = [
        h for h in headers if len(h.partition(b"=")[0]) != 1 and h.partition(b"=")[0] not in (b"enc", b"reason", b"len")
    ]
    return re.sub(rb"\.@\d*(?=\.|$)", b"", key, count=1), users, payload


class Listener(Sender):
    """Reads what it is told while it sends, and settles all of that in the end."""

    heard = b""

    def events(self):
        return select.POLLIN | (select.POLLOUT if self.at < self.end else 0)

    def go_on(self):
        if self.at < self.end:
            self.send_some()
        with contextlib.suppress(BlockingIOError):
            data = self.sock.recv(1 << 16)
            self.heard += data
            if not data:
                self.sock.close()
                self.over = True
                self.settle()

    def said(self):
        """The lines after the greeting."""
        greeting, *said, rest = self.heard.split(b"\n")
        assert greeting == b"!ok max_line=%d" % MAX_LINE and not rest
        return said


class AckedSender(Listener):
    """Says hello first, and reads what it is told about each line."""

    def __init__(self, pod, rng, account, number, stream, step):
        self.tag, hello = rng.choice(
            [("", ""), (f";p=f{number}", f" producer=f{number}"), (f";w=f{number}", f" window=f{number}")]
        )
        super().__init__(pod, rng, f"!hello acks=1{hello}\n".encode() + stream, step)
        *self.lines, self.unfinished = stream.split(b"\n")
        self.account = account

    def replies(self):
        """One for each message, in order: (word, seq or reason)."""
        told = []
        for line in self.said():
            word, n, what = line.split(b" ", 2)
            count = int(n) - len(told)
            assert count == 1 or (count > 1 and word == b"!ack"), f"out of order: {line}"
            told += [(word, what.split()[0])] if word == b"!err" else [
                (word, int(what) - ahead) for ahead in range(count - 1, -1, -1)
            ]  # fmt: skip
        return told

    def settle(self):
        """Each line has been told what becomes of it; what is acknowledged has to be there."""
        told, known, last = self.replies(), {}, -1
        if self.unfinished:
            assert told.pop() in ((b"!err", b"no_newline"), (b"!err", b"too_long"))
        assert len(told) == len(self.lines)
        for line, (word, what) in zip(self.lines, told, strict=True):
            why = reasons(line)
            if why:
                assert word == b"!err" and what.decode() in why, (line[:80], word, what)
                continue
            key, ts, id, payload = (line + b"|" * max(0, 3 - line.count(b"|"))).split(b"|", 3)
            bare, *headers = id.split(b";")
            legal = {"": rb"[^|]*", ";p": rb"\d{1,18}", ";w": rb"[^|]{1,256}"}[self.tag[:2]]
            if not re.fullmatch(legal, bare, re.DOTALL):
                assert (word, what) == (b"!err", b"bad_id"), line[:80]
            elif self.tag and (same := int(bare) if self.tag[:2] == ";p" else bare) in known:
                seq, content = known[same]
                is_same = content == content_of(key, headers, payload)
                assert (word, what) == ((b"!dup", seq) if is_same else (b"!err", b"id_reused")), line[:80]
            elif self.tag[:2] == ";p" and same < last:
                assert (word, what) == (b"!err", b"id_too_old"), line[:80]
            else:
                assert word == b"!ack", (line[:80], what)
                if self.tag:
                    known[same] = what, content_of(key, headers, payload)
                    last = same if self.tag[:2] == ";p" else last
                headers = b"".join(b";" + header for header in headers)
                self.account.acked[what] = b"|".join([key, ts, bare + self.tag.encode() + headers, payload])


class BadHello(Sender):
    """A first line that begins as a hello and is none: it is told so, once, and let go."""

    def __init__(self, pod, rng, line, step):
        super().__init__(pod, rng, line + b"\n", step)
        self.heard = b""

    def go_on(self):
        if self.at < self.end:
            self.send_some()
            return
        data = self.sock.recv(1000)
        self.heard += data
        if not data:
            assert self.heard.startswith(b"!err 0 bad_hello ") and self.heard.count(b"\n") == 1, self.heard
            self.sock.close()
            self.over = True


class UnitSender(Listener):
    """A door of KMQ: good units of many names, a question now and then, and perhaps one that is none, which ends it."""

    def __init__(self, pod, rng, account, number):
        self.account, self.ids, self.sent = account, Counter(), []  # lines as stored, or the answer
        token = (pod.pipes / "local.token").read_text().strip()
        parts = [f"!hello acks=1 reserved=1 token={token}\n".encode()]
        for _ in range(rng.randrange(1, 20)):
            parts.append(self._unit(rng, b"u%d.%d" % (number, rng.randrange(4)), rng.choice([0, 1, 2, 9, 400])))
        self.lies = rng.randrange(2)
        if self.lies:
            parts.append(bad_unit(rng))
        super().__init__(pod, rng, b"".join(parts), rng.choice([3, 200, 10_000]) if len(parts) < 6 else 200_000)

    def _unit(self, rng, name, count):
        body = b""
        for _ in range(count):
            self.ids[name] += 1
            key, payload = rng.choice([b"unit", b"unit.@0.k"]), rng.randbytes(rng.randrange(200)).hex().encode()
            body += b"%b|1|%d|%b\n" % (key, self.ids[name], payload)
            self.sent.append(b"%b|1|%d;p=%b|%b" % (key, self.ids[name], name, payload))
        if not count:
            self.sent.append(b"!last %d" % self.ids[name])
        return b"!unit %d %d p=%b\n%b" % (count, len(body), name, body)

    def settle(self):
        sent, n = iter(self.sent), 0
        for line in self.said():
            word, number, *more = line.split(b" ", 2)
            if word == b"!last":
                assert next(sent) == line
            elif word == b"!ack":
                for seq in range(int(more[0]) - int(number) + n + 1, int(more[0]) + 1):
                    self.account.acked[seq] = next(sent)
                n = int(number)
            else:
                assert self.lies and word == b"!err" and more[0].startswith((b"bad_unit ", b"no_newline ")), line
        assert next(sent, None) is None and self.lies == (b"!err" in self.heard)


class Crowd:
    """The senders of a run, and the account of what they sent."""

    def __init__(self, pod, seed):
        self.pod, self.rng, self.account = pod, random.Random(seed), Account()
        self.senders, self.started = [], Counter()
        self.well_behaved = None
        self.streams = 0  # of the well-behaved producer

    def attack(self):
        rng = self.rng
        if rng.randrange(3) == 0:  # a connection that dies
            number = self.started["reset"]
            lines = [b"reset.%d|0|%d|%b" % (number, n, b"x" * rng.randrange(300)) for n in range(rng.randrange(1, 30))]
            stream = b"\n".join(lines) + b"\n"
            self.account.cut_off.update(lines)
            sender = Sender(self.pod, rng, stream, rng.choice([5, 5000]), reset_at=rng.randrange(1, len(stream)))
            self.started["reset"] += 1
        elif rng.randrange(4) == 0:
            stream = with_messages(rng, rng.choice(ATTACKS)(rng))
            step = rng.choice([3, 200, 10_000]) if len(stream) < 20_000 else 200_000
            sender = AckedSender(self.pod, rng, self.account, self.started["acked"], stream, step)
            self.started["acked"] += 1
        elif rng.randrange(6) == 0:
            sender = UnitSender(self.pod, rng, self.account, self.started["units"])
            self.started["units"] += 1
        elif rng.randrange(6) == 0:
            sender = BadHello(self.pod, rng, bad_hello(rng), rng.choice([1, 5000]))
            self.started["hello"] += 1
        else:
            kind = rng.choice(ATTACKS)
            stream = kind(rng)
            while not stream or stream.startswith(b"!"):
                stream = kind(rng)
            self.account.add(stream)
            step = rng.choice([3, 200, 10_000]) if len(stream) < 20_000 else 200_000
            sender = Sender(self.pod, rng, stream, step)
            self.started[kind.__name__] += 1
        self.senders.append(sender)

    def behave_well(self, lines):
        stream = b"".join(b"good.s%d|0|%d|%b\n" % (self.streams, n, line) for n, line in enumerate(lines))
        self.account.add(stream)
        self.streams += 1
        self.well_behaved = Sender(self.pod, self.rng, stream, 20_000)
        self.senders.append(self.well_behaved)

    def turn(self):
        """Each sender that can goes one step on."""
        poll = select.poll()
        by_fd = {sender.sock.fileno(): sender for sender in self.senders}
        for fd, sender in by_fd.items():
            poll.register(fd, sender.events())
        for fd, _ in poll.poll(100):
            by_fd[fd].go_on()
        self.senders = [sender for sender in self.senders if not sender.over]

    def run(self, connections):
        while sum(self.started.values()) < connections:
            for _ in range(5):
                self.turn()
                while len(self.senders) < CONNECTIONS:
                    self.attack()
                if self.well_behaved is None or self.well_behaved.over:
                    self.behave_well(log_lines(self.rng, 2000))
            self.pod.look()
        tries = attempts("ingress takes what is left", every_s=0)
        while self.senders:
            next(tries)
            self.turn()
            self.pod.look()


def check(pod, account):
    """After the pod has stopped: every line is accounted for, nothing else is there, nothing lies elsewhere."""
    account.add(b"last|0|0|line\n")
    stored = 0
    next_of = Counter()
    for seq, (_, line) in enumerate(pod.wal(), start=1):
        account.settle(line, seq)
        stored += 1
        if line.startswith(b"good.s"):
            key, _, number, _ = line.split(b"|", 3)
            assert int(number) == next_of[key], "lines of the well-behaved producer are out of order"
            next_of[key] += 1
    account.check_nothing_is_missing()
    pod.check_queues()
    pod.check_files()
    return stored


def fuzz(pod, seed, connections):
    crowd = Crowd(pod, seed)
    crowd.run(connections)
    pod.settle()
    pod.stop()
    acked = len(crowd.account.acked)
    stored = check(pod, crowd.account)
    assert acked > 10 * crowd.started["acked"]
    assert set(crowd.started) == {"reset", "acked", "units", "hello", *(attack.__name__ for attack in ATTACKS)}
    peaks = " ".join(f"{name}_mib={peak / MIB:.0f}" for name, peak in pod.peak.items())
    print(f"event=fuzz seed={seed} connections={sum(crowd.started.values())} lines={stored} acked={acked} {peaks}")


def test_bad_input_is_accounted_for_and_good_lines_beside_it_are_untouched(pod):
    fuzz(pod, seed=2, connections=300)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10, 20))
def test_bad_input_for_a_long_time(pod, seed):
    fuzz(pod, seed, connections=3000)


def test_the_logs_of_this_machine_come_out_byte_for_byte(pod):
    lines = [*log_lines(random.Random(1), 5000), *own_logs()]
    crowd = Crowd(pod, 1)
    crowd.behave_well(lines)
    while crowd.senders:
        crowd.turn()
    pod.settle()
    pod.stop()
    queue = (pod.data / "good.log").read_bytes().split(b"\n")[:-1]
    assert [line.split(b"|", 5)[5] for line in queue] == lines
    check(pod, crowd.account)


def test_lines_without_end_keep_ingress_small_and_each_is_accounted_for(pod):
    """200 connections send more than a line may have each, without a newline, in turns: 240 MB that must not be in memory."""
    piece, alive, sent = b"x" * 100_000, {}, {}
    for n in range(200):
        head = b"endless.%d|" % n
        alive[n] = pod.connect()
        sent[n] = alive[n].send(head)
    for _ in range(12):
        for n, sock in list(alive.items()):
            left, tries = len(piece), attempts("room for a piece", every_s=0)
            while left and n in alive:
                next(tries)
                if not select.select([], [sock], [], 1)[1]:
                    continue
                try:
                    count = sock.send(piece[:left])
                    left, sent[n] = left - count, sent[n] + count
                except OSError:  # ingress closed the longest lines when they took too much together
                    alive.pop(n).close()
        pod.look()
    for sock in alive.values():
        sock.close()
    pod.settle()
    pod.stop()
    found = {}
    for _, line in pod.wal():
        match = re.match(rb"dead\.malformed\|\|;reason=(too_long|no_newline);len=(\d+)\|(endless\.(\d+)\|x*)$", line)
        if match:
            n = int(match[4])
            assert n not in found and len(match[3]) == min(int(match[2]), MAX_LINE) and int(match[2]) <= sent[n]
            found[n] = int(match[2])
    cut = sum(map(int, re.findall(r"event=unfinished_line_cut count=(\d+)", pod.log())))
    assert set(found) == set(sent) and cut > 50
    assert sum(found[n] == sent[n] for n in sent) >= 200 - cut
    pod.check_files()
    print(f"event=endless cut={cut} ingress_peak_mib={pod.peak['ingress'] / MIB:.0f}")


def test_a_thousand_connections_that_open_and_die(pod):
    """All open at once; each has sent nothing, a part of a line or a line, and goes with a reset or in order."""
    rng, account, sockets = random.Random(3), Account(), []
    for n in range(1000):
        stream = rng.choice([b"", b"part.%d|0|" % n, b"whole.%d|0|1|x\n" % n, b"whole.%d|0|1|x\nand part" % n])
        sock = pod.connect()
        assert sock.send(stream) == len(stream) if stream else True
        sockets.append((sock, stream))
    pod.wait(lambda: stats.peek(pod.instance).rows["ingress"].connections == 1000, "all are accepted")
    rng.shuffle(sockets)
    resets = 0
    for sock, stream in sockets:
        if not stream and rng.randrange(2):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            resets += 1
        else:
            account.add(stream)
        sock.close()
    pod.settle()
    pod.stop()
    check(pod, account)
    assert resets > 50


# --- the FIFO, which any shell of the pod may write to ----------------------------------------------------------------------


def random_text(rng, ring):
    """Whole lines in which control lines, true ones and made-up ones, messages and rubbish are mixed."""
    parts = []
    for _ in range(rng.randrange(1, 30)):
        body = b"".join(
            rng.choice([b"t|1|%d|x" % rng.randrange(9), b"", b"x", b"-x", b"+x", b"!e nul", rng.randbytes(20)]) + b"\n"
            for _ in range(rng.randrange(1, 6))
        )
        start = ring.put([body], len(body)) if rng.randrange(2) else -1
        if start < 0:
            start = rng.choice([ring.head, rng.randrange(1 << 20), (1 << 64) - 1, 10**18])
        numbers = [ring.birth, start, start + len(body)]
        if not rng.randrange(4):
            numbers[rng.randrange(3)] += rng.choice([-(1 << 12), -1, 1, 1 << 12, 1 << 64])
        piece = b"%d %d %d" % tuple(numbers)
        tag = rng.choice([b"", b" p=a", b" w=b"])
        if not rng.randrange(4):
            tag = rng.choice([b" p=%s", b" p=", b" q=1", b" p=a w=b", b" " + rng.randbytes(3)])
        count = rng.choice([0, 1, 200, -1]) if not rng.randrange(4) else body.count(b"\n")
        connection = rng.choice([b"1", b"x.y", b"\xff"]) if not rng.randrange(4) else rng.choice([b"1.1", b"1.2"])
        messages = b"!c %b %d %d %b%b\n" % (connection, rng.randrange(5), count, piece, tag)
        question = b"!l %b %d%b\n" % (connection, rng.randrange(-1, 3), tag)
        parts.append(
            rng.choice([messages, messages, b"!r %b\n" % piece, b"!r %b\n" % piece, question, body, b"!r 1\n"])
        )
    ring.publish()
    text = b"".join(parts)
    return text[: text.rindex(b"\n") + 1].replace(b"\0", b"0")


def test_whatever_stands_in_the_fifo_the_framer_goes_on():
    """Each line it stores is one, what it answers goes up, and nothing is left that would never be read."""
    rng, instance = random.Random(5), f"fuzz-{os.getpid()}-framer"
    identity = layout.make_identity("fuzz", 0, 1 << 16, 0, "block")
    taken = Counter()
    try:
        ring = received.ReceivedWriter(instance, identity, "the test", FakeLogger())
        reader = received.ReceivedReader.attach(instance, "fuzz", "the test", os.open(os.devnull, os.O_WRONLY))
        for _ in range(3000):
            source = ReceivedLines(lambda: reader, layout.Received(ring.birth, reader.cells[layout.TAIL]))
            framer = parser.Parser(8192, DedupeTable(100, 1e6, 100, 1e6, 100), source, layout.BlockLimits(64, 1 << 16))
            text = random_text(rng, ring)
            while text:
                batch = framer.batch(text, 1, 0)
                assert all(re.fullmatch(rb"[^|\n]+\|[^|\n]*\|[^|\n]*\|[^\n]*", line) for line in batch.lines)
                if batch.cuts is not None:
                    assert batch.cuts == sorted(batch.cuts), "done is done"
                    assert not batch.cuts or batch.cuts[-1] == (len(batch.lines), batch.used, batch.position)
                assert 0 <= batch.used <= len(text)
                assert source.done.position <= batch.position <= ring.head
                assert batch.used or batch.position > source.done.position, "it does not go on"
                for line in blocks.encode_replies(batch.replies, 0, 1).split(b"\n")[:-1]:
                    reply = rb"\d+\.\d+ (?:\d+ !(?:ack \d+ \d+|dup \d+ \d+|err \d+ [^\n]+)|\d !last \d+)"
                    assert re.fullmatch(reply, line), line
                taken["lines"] += len(batch.lines)
                taken["replies"] += len(batch.replies)
                taken["bytes"] += batch.position - source.done.position
                source.committed(layout.Received(ring.birth, batch.position))
                text = text[batch.used :]
        assert all(taken[what] > 1000 for what in ("lines", "replies", "bytes")), taken
        ring.close()
        reader.close()
    finally:
        os.unlink(layout.shm_path(instance, "received"))
