"""What becomes of the messages of an acknowledged connection: each is stored, or known as stored, or refused.

Invariant   A message is accepted only if its id is new, and the dedupe table knows it from then on. A stored id carries
            `;p=` or `;w=` of the connection it came from, and no header of that kind from anybody else. A message that
            names a reserved topic is accepted only from a connection that ingress has found to be the pod's own. Such
            messages are looked at one by one: the check of whole blocks knows no reserved topic, and stays as fast.
"""

from operator import lt
from zlib import crc32

from kmq.framing.batch import Batch
from kmq.framing.dedupe import DedupeTable
from kmq.message import record
from kmq.message.ids import MAX_ID_DIGITS, MAX_WINDOW_ID, NEW, TOO_OLD
from kmq.message.routing import AnyTopic


class Acceptor:
    """Adds messages to a batch, or says what to reply instead.

    Messages come from a producer (`kind` is `p`) or a window (`w`) of that name, or from a connection without either.
    """

    def __init__(self, max_line: int, table: DedupeTable, topics: AnyTopic) -> None:
        self.max_line, self.table, self.topics = max_line, table, topics
        self.duplicates = 0
        self._window = table.window
        self._start_of = record.Starts().__getitem__

    def begin(self, batch: Batch, seconds: int) -> None:
        """Add to this batch from now on; `seconds` since the epoch is now."""
        self._batch, self._seconds = batch, seconds

    def accept_all(self, body: bytes, kind: bytes, name: bytes) -> bool:
        """Add these messages if all are good and new; return False if each must be looked at.

        One check of them all, and one call of the table for ids without a gap.
        """
        batch = self._batch
        seq = batch.next_seq + len(batch.lines)
        if len(body) > self.max_line and max(map(len, body.split(b"\n"))) > self.max_line:
            return False
        if not self.topics.takes(body, seq):
            return False
        if not kind:
            if record.claims(body):
                return False
            batch.lines += body.split(b"\n")[:-1]
            return True
        fields = record.numbered(body) if kind == b"p" else None
        if fields is None:
            return False
        numbers = [int(id) for _, _, id, _ in fields]
        first, count = numbers[0], len(numbers)
        producer = self.table.producer(name, self._seconds)  # only now: a name that stores nothing takes no place
        if producer is None or first <= producer.last_id:
            return False
        start_of = self._start_of
        prints = [crc32(payload, start_of(routing_key)) for _, routing_key, _, payload in fields]
        if numbers == list(range(first, first + count)):
            self.table.remember(producer, first, seq, count, self._seconds, prints)
        elif all(map(lt, numbers, numbers[1:])):
            for ahead, number in enumerate(numbers):
                self.table.remember(producer, number, seq + ahead, 1, self._seconds, prints[ahead : ahead + 1])
        else:
            return False
        join = b"".join((b";p=", name, b"|")).join
        batch.lines += [join((head, payload)) for head, _, _, payload in fields]
        return True

    def accept(self, line: bytes, n: int, kind: bytes, name: bytes, reserved: bool = False) -> bytes:
        """Add message n if it is good and new, and return b""; otherwise return the reply.

        `reserved`: it may name a reserved topic.
        """
        reason = "too_long" if len(line) > self.max_line else record.refusal(line, reserved)
        if reason:
            return b"!err %d %b" % (n, reason.encode())
        batch = self._batch
        seq = batch.next_seq + len(batch.lines)
        if reason := self.topics.refusal(line, seq):
            return b"!err %d %b" % (n, reason.encode())
        routing_key, ts, id_field, payload = record.padded(line).split(b"|", 3)
        id, *headers = id_field.split(b";")
        rest = b"".join(b";" + header for header in headers if header != b"%b=%b" % (kind, name))
        if kind and record.claims(b"||%b|" % rest):
            return b"!err %d bad_id the headers p= and w= are KMQ's own" % n
        if not kind:
            batch.lines.append(record.disclaim(record.padded(line)))
            return b""
        print = crc32(payload, record.fingerprint_start(routing_key, rest) if rest else self._start_of(routing_key))
        if kind == b"p":
            reply = self._remember_increasing(id, n, name, seq, print)
        else:
            reply = self._remember_arbitrary(id, n, name, seq, print)
        if not reply:
            batch.lines.append(b"%b|%b|%b;%b=%b%b|%b" % (routing_key, ts, id, kind, name, rest, payload))
        return reply

    def _remember_increasing(self, id: bytes, n: int, name: bytes, seq: int, print: int) -> bytes:
        if not id.isdigit() or len(id) > MAX_ID_DIGITS:
            return b"!err %d bad_id a producer's ids are decimal numbers of at most %d digits" % (n, MAX_ID_DIGITS)
        producer = self.table.producer(name, self._seconds)
        if producer is None:
            return b"!err %d producers_full KMQ_PRODUCERS names are remembered already" % n
        number = int(id)
        stored = producer.find(number)
        if stored == NEW:
            self.table.remember(producer, number, seq, 1, self._seconds, (print,))
            return b""
        if stored == TOO_OLD:
            return b"!err %d id_too_old" % n
        return self._stored_before(n, stored, print, producer.print_of(number))

    def _remember_arbitrary(self, id: bytes, n: int, scope: bytes, seq: int, print: int) -> bytes:
        if not 0 < len(id) <= MAX_WINDOW_ID:
            return b"!err %d bad_id a message in a window needs an id of 1 to %d bytes" % (n, MAX_WINDOW_ID)
        stored = self._window.find(scope, id, self._seconds)
        if stored == NEW:
            self._window.add(scope, id, seq, self._seconds, print)
            return b""
        return self._stored_before(n, stored, print, self._window.print_of(scope, id))

    def _stored_before(self, n: int, seq: int, print: int, print_then: int) -> bytes:
        """Return the reply to an id stored as `seq`; `print_then`: the fingerprint of what was stored, 0 if unknown."""
        if print_then not in (0, print):
            return b"!err %d id_reused %d" % (n, seq)
        self.duplicates += 1
        return b"!dup %d %d" % (n, seq)
