"""The framer's parser and table, driven step by step."""

from itertools import accumulate

from kmq import record
from kmq.framing import parser
from kmq.framing.batch import plain
from kmq.framing.blocks import encode_replies
from kmq.framing.dedupe import DedupeTable
from kmq.links.raw import Sender, fragments, reassemble
from kmq.settings import PIPE_BUF

MAX = 8192
ME = b"17.1"  # a connection


def table(producers=1000, ttl=1e6, count=1000, age=1e6):
    return DedupeTable(producers, ttl, count, age)


def frame(text):
    """What the framer does with whole lines: (lines, text that is not done yet, ends of the lines in the text, used)."""
    batch = plain(text, 1)
    if batch is None:
        text = reassemble(text)
        batch = parser.Parser(MAX, table()).parse(text, 1, 0)
        cuts = batch.cuts or []
        assert [count for count, _ in cuts] == list(range(1, len(batch.lines) + 1)) and not batch.replies
        return batch.lines, text, [end for _, end in cuts], batch.used
    return batch.lines, text, list(accumulate(len(line) + 1 for line in batch.lines)), batch.used


def group(lines, n=1, tag=b"", conn=ME):
    """Messages n… of a connection as ingress writes them; a long line as pieces, its group around the last one."""
    sender = Sender(conn, tag)
    sender.sent = n - 1
    if len(lines) == 1 and len(lines[0]) > PIPE_BUF - sender.header_room:
        first, last = fragments(lines[0], sender.header_room).rsplit(b"\n", 2)[:2]
        return first + b"\n" + sender.header(1, len(last) + 1) + last + b"\n"
    body = b"".join(line + b"\n" for line in lines)
    return sender.header(len(lines), len(body)) + body


def mine(*ids, tag=b""):
    """Messages with these ids, as sent or, with a tag, as stored."""
    return [b"t.k|1|%b%b|x" % (id if isinstance(id, bytes) else b"%d" % id, tag) for id in ids]


P, W = b"p=me", b"w=me"


class Steps:
    """The framer's turns without its ring: what is read is framed as far as it goes, the rest is carried on."""

    def __init__(self, known, cut=lambda cuts: cuts[-1:], max_line=MAX):
        """`cut` chooses where a batch becomes blocks."""
        self.known, self.cut, self.max_line = known, cut, max_line
        self.seconds = 0
        self.waiting = b""
        self.lines, self.replies = [], []

    def read(self, data):
        self.waiting += data
        while self.turn():
            pass

    def turn(self):
        end = self.waiting.rfind(b"\n") + 1
        if not end:
            return False
        ordered = reassemble(self.waiting[:end])
        self.waiting = ordered + self.waiting[end:]
        batch = parser.Parser(self.max_line, self.known).parse(ordered, len(self.lines) + 1, self.seconds)
        start, answers = 0, batch.replies
        for stop, end in self.cut(batch.cuts):
            said = encode_replies([a for a in answers if a[0] <= end], start, len(self.lines) + 1)
            answers = [a for a in answers if a[0] > end]
            self.lines += batch.lines[start:stop]
            self.replies += said.split(b"\n")[:-1]
            start = stop
            if self.committed():
                self.waiting = self.waiting[end:]
                return True
        self.waiting = self.waiting[batch.used :]
        return batch.used > 0

    def committed(self):
        """After each block; whether the framer was killed there."""
        return False


def one_by_one(replies):
    """Replies as {(connection, n): reply}; asserts that each message gets one, in order."""
    said, last = {}, dict[bytes, int]()
    for line in replies:
        conn, first, kind, n, rest = line.split(b" ", 4)
        assert int(first) == last.get(conn, 0) + 1, f"no reply before {line}"
        last[conn] = int(n)
        for number in range(int(first), int(n) + 1):
            value = b"%d" % (int(rest) - int(n) + number) if kind == b"!ack" else rest.split(b" ")[0]
            said[conn, number] = kind[1:] + b" " + value
    return said


def random_traffic(rng, count=40):
    """(text of the FIFO, what the model makes of it): many connections, resends, long lines, shells between."""
    model = Model()
    conns = [[b"17.%d" % n, rng.choice([b"", b"p=a", b"p=b", b"w=a", b"w=b"]), 0] for n in range(1, 5)]
    out = []
    for _ in range(count):
        if not rng.randrange(4):
            line = rng.choice([b"u|||plain", b"no separator", b"u|1|5;p=a|claimed", b"", b"u|x"])
            out.append(line + b"\n")
            model.nobody(line)
            continue
        conn = rng.choice(conns)
        whose, tag, n = conn
        sent, top = [], model.last.get(tag, 0)
        for _ in range(rng.choice([1, 1, 3, 8])):
            id = max(0, top + rng.choice([1, 1, 1, 1, 2, 5, 0, -1, -3]))
            top = max(top, id)
            sent.append(rng.choice([b"t.k|1|%d|x" % id] * 9 + [b"", b"no separator", b"t|1|x|y", b"t|1|%d" % id]))
        if not rng.randrange(8):
            sent = [b"t.k|1|%d|" % top + b"x" * 5000]
        out.append(group(sent, n + 1, tag, whose))
        for line in sent:
            conn[2] += 1
            model.take(line, whose, conn[2], tag)
    return b"".join(out), model


def randomly(rng):
    """Cuts a batch into some blocks."""
    return lambda cuts: [cut for at, cut in enumerate(cuts) if at + 1 == len(cuts) or rng.randrange(2)]


class Model:
    """Who is told what, message by message: a dictionary that forgets nothing."""

    def __init__(self):
        self.lines, self.said = [], {}  # (connection, n) → reply without n
        self.stored, self.last = {}, {}  # (tag, id) → seq; tag → last id

    def take(self, line, conn, n, tag):
        self.said[conn, n] = self._store(line, tag) if record.refusal(line) == "" else b"err " + refusal(line)

    def _store(self, line, tag):
        key, ts, id, payload = record.padded(line).split(b"|", 3)
        id = id.partition(b";")[0]
        content = key, payload
        if tag[:1] == b"p" and not id.isdigit():
            return b"err bad_id"
        known = tag, int(id) if tag[:1] == b"p" else id
        if tag and known in self.stored:
            seq, before = self.stored[known]
            return b"dup %d" % seq if content == before else b"err id_reused"
        if tag[:1] == b"p":
            if known[1] < self.last.get(tag, -1):
                return b"err id_too_old"
            self.last[tag] = known[1]
        self.lines.append(b"|".join([key, ts, id + b";" + tag if tag else id, payload]))
        self.stored[known] = len(self.lines), content
        return b"ack %d" % len(self.lines)

    def nobody(self, line):
        self.lines.append(record.admit(line, MAX))


def refusal(line):
    return record.refusal(line).encode()
