"""Control lines of a connection: the hello, and the first line of a unit. Example: `!hello acks=1 producer=a last=?`.

!hello acks=0|1|all [producer=<name> [attempt=<run>.<number>] | window=<scope>] [last=?] [shard=?]
       [reserved=1|spare] [epoch=<n>] [token=<token>]

producer    ids are decimal numbers that increase over all connections of that name
    attempt     which connection of a program this is. An earlier attempt of the same run that arrives late is
                refused, and does not fence the newer one (kmq/wire/attempts.py)
    window      ids are text of 1 to 256 bytes, remembered for a while; the gateway uses it for gRPC's message_id
    neither     messages are acknowledged, and stored as often as they are sent
    last=?      with acks and a producer: asks for a line `!last <id>` before the first reply, with the last stored
    id of
                this name (0: unknown name), so that a restarted program can resume there
    shard=?     asks for a line `!shard <lineage> <host:port>…` after `!ok`. It names the records, and the addresses
    where
                the brokers of the shard take lines, so a client knows which of its addresses are one shard's.
                Without a shard the line is `!shard`
    reserved=1  with acks and the pod's local token: messages may name KMQ's own topics (`__…`), and the producer's
    name
                may be one of KMQ's own. It must be requested, because the gateway shows that token for its clients
                too, and must not lend them this right
    reserved=spare  the same, and its messages are accepted even while the disk is full or the quota reached. They
    use the
                reserve for messages in flight. Only for few and short messages that lead to free room
    epoch=<n>   for the gateway: only the broker that leads its shard in this epoch may accept the connection. This
    is
                checked first. A deposed broker passes connections on to its successor, which refuses it: no_leader

    !unit <lines> <bytes> [p=<name> [after=<id>]]

After reserved=1 only: this many lines follow, in exactly this many bytes. They are handed over as one piece, so
they get consecutive seqs whatever other clients write. `p` is the producer of this unit; the default is that of the
connection. With `after` the framer refuses the whole unit (`id_gap`) unless that id of the producer, or a later
one, is stored. It refuses each further line unless the id before its own is stored, so the ids of a unit have no
gap. A unit of 0 lines asks for the last id of the name, as `last=?` does.

An id ends at the first `;`, where the headers begin: `a`, `a;x=1` and `a;y=2` are one id. Clients that accept any
text as an id percent-encode `%`, `|`, `;`, spaces and control characters in it, as kmq.Producer and the gateway do.
"""

import re
from collections import namedtuple

from kmq.config.values import KIB
from kmq.message.ids import KAFKA_NAME, NAME_PATTERN, OWN_NAME
from kmq.wire import refusals
from kmq.wire.attempts import Attempt, attempt_of

MAX_BYTES = 4096  # of either line
UNIT_BYTES = (
    64 * KIB
)  # that a unit may have beside the longest line: so it goes into `received` in one piece (received.py)
_NAME = re.compile(NAME_PATTERN.encode())
_EPOCH = re.compile(rb"\d{1,18}")
_FIELDS = (b"acks", b"producer", b"attempt", b"window", b"last", b"shard", b"reserved", b"epoch", b"token")
_USAGE = (
    "expected: !hello acks=0|1|all [producer=<name> [attempt=<run>.<number>] | window=<scope>] [last=?] [shard=?]"
    " [reserved=1|spare] [epoch=<n>] [token=<token>]"
)
# The names of KMQ's own producers: no other client may fence them, or send under their names.
_OWN = re.compile(f"{OWN_NAME}|{KAFKA_NAME}".encode())


class HelloRefused(Exception):
    """A hello that is refused; its text is a code and the reason."""


class Hello:
    """The options that a producer asked for."""

    __slots__ = ("acks", "asks_last", "asks_shard", "attempt", "epoch", "producer", "reserved", "spare", "tag", "token")

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
        epoch: int | None = None,
    ) -> None:
        self.acks, self.producer, self.token, self.attempt = acks, producer, token, attempt
        self.asks_last, self.asks_shard = asks_last, asks_shard
        self.reserved = reserved  # may write to reserved topics
        self.spare = spare  # may use the disk's reserve
        self.epoch = epoch  # the broker must lead its shard in this epoch; None: no such condition
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
    if b"epoch" in fields and not _EPOCH.fullmatch(fields[b"epoch"]):
        raise HelloRefused("bad_hello epoch= must be a number of at most 18 digits")
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
        epoch=int(fields[b"epoch"]) if b"epoch" in fields else None,
    )


def check_epoch(hello: Hello, epoch: int | None) -> None:
    """Raise HelloRefused if the connection is meant for the leader of another epoch than ours."""
    if hello.epoch not in (None, epoch):
        raise HelloRefused(refusals.reason("no_leader", f"this broker does not lead in epoch {hello.epoch}"))


# --- unit ------------------------------------------------------------------------------------------------------------

_UNIT = re.compile(rb"!unit (\d{1,9}) (\d{1,9})(?: p=((%b)(?: after=\d{1,18})?))?\r?" % NAME_PATTERN.encode())


class Unit(namedtuple("Unit", ("lines", "nbytes", "producer", "origin"))):
    """The first line of a unit, parsed. `producer`: b"" if not named; `origin`: with `after=`, for the framer."""

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
