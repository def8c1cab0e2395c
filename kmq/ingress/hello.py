"""The lines in which a connection speaks of itself and its messages: the hello, and the first line of a unit.

    !hello acks=0|1|all [producer=<name> [attempt=<run>.<number>] | window=<scope>] [last=?] [shard=?]
           [reserved=1|spare] [token=<token>]

    producer    ids are decimal numbers that increase over all connections of that name
    attempt     which connection of a program this is: an earlier one of the same run, which arrives late, is refused
                instead of fencing the newer one (kmq/wire/attempts.py)
    window      ids are text of 1 to 256 bytes and remembered for a while; the gateway uses it for gRPC's message_id
    neither     messages are acknowledged, and stored as often as they are sent
    last=?      with acks and a producer: a line `!last <id>` before the first reply says the last id stored of this
                name (0: the name is unknown), so that a restarted program can resume there
    shard=?     a line `!shard <lineage> <host:port>…` after `!ok` says which records these are, and where the brokers of
                the shard take lines, so that a client knows which of its addresses are one shard's; `!shard` without one
    reserved=1  with acks and the pod's local token: messages may name the topics of KMQ itself (`__…`), and the
                producer's name may be one of KMQ's own. It must be asked for: the gateway shows that token for its clients
                too, and must not lend them this right
    reserved=spare  the same, and its messages are accepted also while the disk is full or the quota reached, out of the
                reserve that is kept for messages on their way. It sends few and short ones, by which room becomes free

    !unit <lines> <bytes> [p=<name> [after=<id>]]

After reserved=1 only: so many lines follow, in exactly so many bytes. They are handed over as one piece, so they get
consecutive seqs whoever else writes. `p` is the producer of this unit, else it is that of the connection. Where `after`
is given, the framer refuses all of it (`id_gap`) unless that id of the producer, or a later one, is stored, and each
line but the first unless the id before its own is: their ids have no gap. A unit of 0 lines asks for the last id of the
name, as `last=?` does.

An id ends at the first `;`, where the headers begin: `a`, `a;x=1` and `a;y=2` are one id. Clients that accept any text
as an id percent-encode `%`, `|`, `;`, spaces and control characters in it, as kmq.Producer and the gateway do.
"""

import re
from collections import namedtuple

from kmq.config.values import KIB
from kmq.message.ids import KAFKA_NAME, NAME_PATTERN, OWN_NAME
from kmq.wire.attempts import Attempt, attempt_of

MAX_BYTES = 4096  # of either line
UNIT_BYTES = (
    64 * KIB
)  # that a unit may have beside the longest line: so it goes into `received` in one piece (received.py)
_NAME = re.compile(NAME_PATTERN.encode())
_FIELDS = (b"acks", b"producer", b"attempt", b"window", b"last", b"shard", b"reserved", b"token")
_USAGE = (
    "expected: !hello acks=0|1|all [producer=<name> [attempt=<run>.<number>] | window=<scope>] [last=?] [shard=?]"
    " [reserved=1|spare] [token=<token>]"
)
# The names of KMQ's own producers: no stranger may fence them, or send in their name.
_OWN = re.compile(f"{OWN_NAME}|{KAFKA_NAME}".encode())


class HelloRefused(Exception):
    """A hello that is refused; its text is a code and the reason."""


class Hello:
    """What a producer asked for."""

    __slots__ = ("acks", "asks_last", "asks_shard", "attempt", "producer", "reserved", "spare", "tag", "token")

    def __init__(
        self,
        acks: bool,
        producer: bytes,
        window: bytes,
        token: bytes,
        asks_last: bool = False,
        asks_shard: bool = False,
        reserved: bool = False,
        spare: bool = False,
        attempt: Attempt | None = None,
    ) -> None:
        self.acks, self.producer, self.token, self.attempt = acks, producer, token, attempt
        self.asks_last, self.asks_shard = asks_last, asks_shard
        self.reserved = reserved  # it wants to write to reserved topics
        self.spare = spare  # and to the reserve of the disk
        self.tag = b"p=" + producer if producer else b"w=" + window if window else b""


def parse(line: bytes) -> Hello:
    """Return the hello in `line` (without newline). Raises HelloRefused, which names the field and what it may be."""
    verb, *words = line.rstrip(b"\r").split()
    if verb != b"!hello":
        raise HelloRefused(f"bad_hello {_USAGE}")
    fields: dict[bytes, bytes] = {}
    for word in words:
        name, equals, value = word.partition(b"=")
        if not equals or name not in _FIELDS or name in fields:
            raise HelloRefused(f"bad_hello {word[:64].decode(errors='replace')!r}: {_USAGE}")
        fields[name] = value
    acks = fields.get(b"acks", b"")
    if acks not in (b"0", b"1", b"all"):
        raise HelloRefused("bad_hello acks= must be 0, 1 or all")
    for name in (b"producer", b"window"):
        if name in fields and not _NAME.fullmatch(fields[name]):
            raise HelloRefused(f"bad_hello {name.decode()}= must be 1 to 64 of A-Z a-z 0-9 _ . : -")
    if b"producer" in fields and b"window" in fields:
        raise HelloRefused("bad_hello producer= and window= exclude each other")
    attempt = None
    if b"attempt" in fields:
        if b"producer" not in fields:
            raise HelloRefused("bad_hello attempt= needs producer=")
        try:
            attempt = attempt_of(fields[b"attempt"].decode(errors="replace"))
        except ValueError as err:
            raise HelloRefused(f"bad_hello attempt={err}") from None
    if b"last" in fields and (fields[b"last"] != b"?" or acks == b"0" or b"producer" not in fields):
        raise HelloRefused("bad_hello last= must be ? and needs acks=1 and producer=")
    if fields.get(b"shard", b"?") != b"?":
        raise HelloRefused("bad_hello shard= must be ?")
    reserved = b"reserved" in fields
    if reserved and (fields[b"reserved"] not in (b"1", b"spare") or acks == b"0"):
        raise HelloRefused("bad_hello reserved= must be 1 or spare and needs acks=1")
    if not reserved and _OWN.fullmatch(fields.get(b"producer", b"")):
        raise HelloRefused("bad_hello producer= must not begin with __ or name a Kafka producer: these are KMQ's own")
    return Hello(
        acks=acks != b"0",
        producer=fields.get(b"producer", b""),
        window=fields.get(b"window", b""),
        token=fields.get(b"token", b""),
        asks_last=b"last" in fields,
        asks_shard=b"shard" in fields,
        reserved=reserved,
        spare=fields.get(b"reserved") == b"spare",
        attempt=attempt,
    )


# --- unit ------------------------------------------------------------------------------------------------------------

_UNIT = re.compile(rb"!unit (\d{1,9}) (\d{1,9})(?: p=((%b)(?: after=\d{1,18})?))?\r?" % NAME_PATTERN.encode())


class Unit(namedtuple("Unit", ("lines", "nbytes", "producer", "origin"))):
    """What the first line of a unit says. `producer`: b"" if it names none; `origin`: with `after=`, for the framer."""

    __slots__ = ()


def parse_unit(line: bytes, max_line: int) -> Unit:
    """Return the unit that begins with `line` (without newline). Raises ValueError, which says what is wrong."""
    match = _UNIT.fullmatch(line)
    if match is None:
        raise ValueError("expected: !unit <lines> <bytes> [p=<name> [after=<id>]]")
    unit = Unit(int(match[1]), int(match[2]), match[4] or b"", match[3] or b"")
    if unit.nbytes > max_line + UNIT_BYTES:
        raise ValueError(f"{unit.nbytes} bytes: a unit has at most {max_line + UNIT_BYTES}")
    if unit.lines > unit.nbytes or bool(unit.lines) != bool(unit.nbytes):
        raise ValueError(f"{unit.lines} lines cannot have {unit.nbytes} bytes")
    return unit
