"""The connections of a writing task: whole lines with numbers of their own, each stored once by its broker.

Invariant   A row is stored only when the broker has said so (`!ack`), or when what it has under the row's id says the same: read
            from its logs (stored.py), or compared by the broker itself, which remembers what the last 4,096 ids of a producer
            said. An id that is neither is never taken for the row's. `kmq.replay` decides what becomes of such a row: stop
            ends the task, again stores it under the producer's next name, trust takes the id for the row.
Again       The names of a producer are name, name:1, name:2 … A row belongs to the first whose id is free or says the same. So a
            replay of a replay finds each row where the last one put it, and nothing is lost whatever has changed in between.
Own         Lines sent again because a connection broke may be known to the broker by then: where its logs are not read, those
            count as this task's own, because no other attempt has had a turn.
"""

import logging
import re
import time
import zlib
from collections import OrderedDict, deque
from functools import partial
from hashlib import sha256

from kmq import record
from kmq.client.failures import Fenced, NotAnswered, Refused
from kmq.client.producer import Delivery
from kmq.errors import EXIT_CONFIG, ConfigError, KmqError, RetryError
from kmq.ids import MAX_NAME, PRINTS
from kmq.settings import MIB
from kmq.spark.sink.stored import Sent, Stored, says_the_same
from kmq.spark.sink.targets import check, producer
from kmq.spark.sink.write_options import AGAIN, TRUST, WriteOptions

_IN_FLIGHT_BYTES = 16 * MIB
_OPEN = 8  # connections of a task whose rows have many producers
_SAY_S = 10.0
_FIRST_S = 1.0  # without a connection: then it is looked at whether there is hope of one
_TURNS_S = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # pauses of one that was fenced, ever longer: two never stop each other
_NAMES = 20  # of a producer whose rows are stored again
_OTHER = ("id_reused", "id_too_old")  # refusals: the id is another row's
_SHOWN = 200  # bytes of a line in an error
_SEQ = re.compile(r"as seq (\d+)")  # in the reason of a refusal
_ADVICE = (
    "rows came again otherwise than they were stored: the query, its source or its parallelism has changed, or two writes have"
    " one kmq.producer (each needs its own). kmq.replay=again stores what is not stored under new ids, so that rows may be"
    " there twice but none is lost; kmq.replay=trust takes an id for its row, and loses rows that have changed"
)


class ReplayError(KmqError):
    """A row whose id the broker has, and which cannot be told to be the row that is stored."""

    def __init__(self, producer: str, id: int, problem: str, row: int | None = None) -> None:
        """`row`: of its Spark partition, where that is known."""
        self.producer, self.id, self.problem = producer, id, problem
        where = "" if row is None else f"row {row} of this Spark partition, "
        super().__init__(f"{where}producer {producer}, id {id}: {problem}")


class Senders:
    """The producers of a task: one, or those that column `producer` names, the latest of them connected."""

    def __init__(self, options: WriteOptions, place: int | None) -> None:
        """`place` says which of the brokers; None: the name of a producer does."""
        self._options, self._place = options, place
        self._open: OrderedDict[str, Sender] = OrderedDict()
        self._duplicates = 0

    def max_line(self, name: str) -> int:
        return self._sender(name).max_line

    def send(self, name: str, lines: bytes) -> None:
        self._sender(name).send(lines)

    def _sender(self, name: str) -> "Sender":
        sender = self._open.get(name)
        if sender is None:
            if len(self._open) >= _OPEN:
                self._close(next(iter(self._open)))
            place = zlib.crc32(name.encode()) if self._place is None else self._place
            sender = self._open[name] = Sender(name, self._options, place % len(self._options.brokers))
        self._open.move_to_end(name)
        return sender

    def _close(self, name: str) -> None:
        sender = self._open.pop(name)
        sender.finish()
        self._duplicates += sender.duplicates

    def finish(self) -> int:
        """Wait for all replies. Returns how many rows had been stored before."""
        for name in list(self._open):
            self._close(name)
        return self._duplicates

    def __enter__(self) -> "Senders":
        return self

    def __exit__(self, *_: object) -> None:
        for sender in self._open.values():
            sender.abort()


class NoPartition(KmqError):
    """A topic does not have the partition that a row asks for."""

    exit_code = EXIT_CONFIG

    def __init__(self, producer: str, line: bytes) -> None:
        routing_key, _, id, *_ = line.split(b"|", 3)
        self.producer, self.id, mark = producer, int(id.partition(b";")[0]), record.marked(routing_key)
        assert mark is not None
        self.problem = (
            f"{mark.partition}: topic {mark.topic.decode()} has no such partition, says the broker (unknown_partition);"
            " how many it has, kmq topics list shows there"
        )
        super().__init__(f"the row with id {self.id} of producer {producer}, column partition: {self.problem}")


class Sender:
    """One producer at one broker: whole lines with numbers of their own, each stored once."""

    def __init__(self, name: str, options: WriteOptions, at: int = 0, turn: int = 0) -> None:
        """`at`: which of the brokers. `turn`: of the producer's names; 0 is the name itself."""
        self._first_name, self._options, self._at, self._turn = name, options, at, turn
        self._name, self._address = _named(name, turn), options.brokers[at]
        self._stored = Stored(options.logs(at)) if options.has_logs else None
        self._check = partial(check, self._address, options.access, is_host_sure=True)
        self._make = partial(
            producer,
            self._address,
            options.access,
            producer=self._name,
            # The lines bring ids of their own. Only who cannot read what is stored asks for the last one, and waits for it.
            first_id=0 if self._stored or options.replay == TRUST else None,
            timeout_s=options.timeout_s,
            max_in_flight_bytes=_IN_FLIGHT_BYTES,
            stall_s=_SAY_S,
            on_stall=self._say,
        )
        self._unsent: deque[bytes] = deque()
        self._sent: deque[tuple[Delivery, bytes]] = deque()  # without a reply, when last looked at
        self._turns = iter(_TURNS_S)
        self._next: Sender | None = None  # for rows that are stored again
        self.duplicates = 0
        self._connect()

    def send(self, lines: bytes) -> None:
        """Queue lines; waits while the broker pushes back."""
        self._unsent.append(lines)
        self._go_on(False)

    def finish(self) -> None:
        """Wait until all is stored, and end."""
        try:
            self._go_on(True)
            if self._next is not None:
                self._next.finish()
                self.duplicates += self._next.duplicates
        finally:
            self.abort()

    def abort(self) -> None:
        """End now."""
        self._producer.abort()
        if self._next is not None:
            self._next.abort()

    def _connect(self) -> None:
        self._producer = self._make()
        deadline, tick_s = time.monotonic() + self._options.timeout_s, _FIRST_S
        while True:
            try:
                self.max_line = self._producer.connect(max(0.0, min(tick_s, deadline - time.monotonic())))
                self._last_id = self._producer.last_id
                return
            except NotAnswered as err:
                tick_s = _SAY_S
                self._check_once_more()
                if time.monotonic() >= deadline:
                    self._producer.abort()
                    raise self._failed(err) from err
                self._say(str(err))
            except Refused as err:
                self._producer.abort()
                raise self._failed(err) from err

    def _check_once_more(self) -> None:
        """There is no connection: see that it is not for a reason that no waiting mends."""
        try:
            self._check()
        except ConfigError as err:
            self._producer.abort()
            raise ConfigError(f"producer {self._name} at {err}") from err

    def _go_on(self, to_the_end: bool) -> None:
        while True:
            try:
                while self._unsent:
                    delivery = self._producer.send_lines(self._unsent[0])
                    delivery.seen = True  # what becomes of it is looked at here
                    self._sent.append((delivery, self._unsent.popleft()))
                if to_the_end:
                    self._producer.flush()
                while self._sent and self._sent[0][0].done:
                    delivery, lines = self._sent[0]
                    if delivery.answered < delivery.count:
                        self._producer.flush()  # raises what has ended it; what has no reply stays, for the next turn
                    self._sent.popleft()
                    self._settle(delivery, lines)
                return
            except Fenced as err:
                self._wait_for_a_turn(err)
            except (Refused, NotAnswered) as err:
                raise self._failed(err) from err

    def _wait_for_a_turn(self, err: Fenced) -> None:
        """Another attempt of this task is at work; if it succeeds Spark ends us, and if it was left behind it ends soon."""
        pause_s = next(self._turns, None)
        if pause_s is None:
            raise self._failed(err) from err
        self._say(f"fenced: another attempt of this task, or a job of the same name; next turn in {pause_s:g} s")
        self._producer.abort()
        again = []
        for delivery, lines in self._sent:
            self._settle(delivery, lines)
            if delivery.answered < delivery.count:
                again.append(b"".join(lines.splitlines(keepends=True)[delivery.answered :]))
        self._sent.clear()
        self._unsent.extendleft(reversed(again))
        time.sleep(pause_s)
        self._connect()

    # --- what had been stored before ---------------------------------------------------------------------------------

    def _settle(self, delivery: Delivery, lines: bytes) -> None:
        """See that what has been answered is stored; what is not is stored again, or an error."""
        if not (delivery.duplicates or delivery.refused):
            return
        rows = lines.split(b"\n")
        self.duplicates += len(delivery.duplicates)
        wrong: dict[int, str] = {}  # row → what is wrong
        if self._options.replay != TRUST:
            places = {_id_of(rows[place]): place for place, _ in delivery.duplicates}
            problems = self._compare(
                [Sent(_id_of(rows[place]), seq, rows[place]) for place, seq in delivery.duplicates]
            )
            wrong = {places[id]: problem for id, problem in problems}
            self.duplicates -= len(wrong)
        for place, refusal in delivery.refused.items():
            if refusal.code not in _OTHER or self._options.replay == TRUST:
                raise refusal
            wrong[place] = refusal.reason
        if not wrong:
            return
        first = min(wrong)
        why = self._refusal(delivery.refused[first], rows[first]) if first in delivery.refused else wrong[first]
        if self._options.replay != AGAIN:
            raise ReplayError(self._name, _id_of(rows[first]), f"{why}; {_ADVICE}")
        self._store_again([rows[place] for place in sorted(wrong)], why)

    def _compare(self, repeated: list[Sent]) -> list[tuple[int, str]]:
        """(id, problem) of those whose record is not known to say the same."""
        if self._stored is None:
            for each in repeated:
                if each.id <= self._last_id - PRINTS:
                    raise self._unread(each.id)
            return []
        found = self._stored.find(self._name, repeated)
        problems = []
        for each in repeated:
            stored = found.get(each.id)
            if stored is None:
                seq = f" as seq {each.seq}" if each.seq else ""
                problems.append((each.id, f"what is stored{seq} is in no log any more; came {_shown(each.line)}"))
            elif not says_the_same(each.line, stored):
                problems.append((each.id, f"stored is {_shown(stored)}; came {_shown(each.line)}"))
        return problems

    def _refusal(self, refusal: Refused, line: bytes) -> str:
        if refusal.code == "id_too_old":
            return f"ids above it are stored, and it is not known itself; came {_shown(line)}"
        id, seq = _id_of(line), _SEQ.search(refusal.reason)
        sent = Sent(id, int(seq[1]) if seq else 0, line)
        stored = self._stored.find(self._name, [sent]).get(id) if self._stored else None
        other = _shown(stored) if stored else f"something else as seq {sent.seq} (id_reused)"
        return f"stored is {other}; came {_shown(line)}"

    def _unread(self, id: int) -> ReplayError:
        return ReplayError(
            self._name,
            id,
            f"it is stored already, and {self._last_id - id:,} ids below the last one: of those before the last {PRINTS:,}"
            " the broker does not know what they said. Give option path, its data directory, or kmq.bootstrap.servers, its"
            " gateway, so that what comes again is compared; two writes of one foreachBatch need a kmq.producer each;"
            " kmq.replay=trust takes the id for the row",
        )

    def _store_again(self, lines: list[bytes], why: str) -> None:
        if self._next is None:
            if self._turn + 1 >= _NAMES:
                raise ReplayError(self._name, _id_of(lines[0]), f"{why}; and so it is under {_NAMES - 1} other names")
            self._next = Sender(self._first_name, self._options, self._at, self._turn + 1)
            self._say(f"id {_id_of(lines[0])} is another row's: {why}; such rows are stored as {self._next._name}")
        self._next.send(b"\n".join(lines) + b"\n")

    def _failed(self, err: KmqError) -> KmqError:
        if isinstance(err, Refused) and err.code == "unknown_partition":
            return NoPartition(self._name, err.line)
        kind = RetryError if isinstance(err, (NotAnswered, Fenced)) else KmqError
        return kind(f"producer {self._name} at {self._address}: {err}")

    def _say(self, text: str) -> None:
        log().warning("producer %s at %s: %s", self._name, self._address, text)


def _named(name: str, turn: int) -> str:
    if not turn:
        return name
    made = f"{name}:{turn}"
    return made if len(made) <= MAX_NAME else f"{sha256(name.encode()).hexdigest()[:48]}:{turn}"


def _id_of(line: bytes) -> int:
    return int(line.split(b"|", 3)[2].partition(b";")[0])


def _shown(line: bytes) -> str:
    return repr(line[:_SHOWN])[1:] + ("…" if len(line) > _SHOWN else "")


def log() -> logging.Logger:
    return logging.getLogger("kmq.spark")
