"""The lines of the consumer port (KMQ_EGRESS_PORT): requests and replies, each with its encoder and its decoder.

    → CONSUME <topic>[/<partition>] [from=<position>] [max=<n>] [follow] [raw] [token=<token>]
    → GROUP <group> member=<name> topics=<topic>[,<topic>…] [assignor=<name>] [session=<time>]
      [attempt=<run>.<number>] [given=said] [overtaken=said] [token=<token>] [more]
    → ASSIGN [<group>] <topic>/<partition>[@<position>] … [overtaken=said] [token=<token>] [more]
    → !fetch <max bytes> [wait=<ms>] [<topic>/<partition> …]
    → !seek <topic>/<partition> <position>          → !offsets [<topic>/<partition> …]
    → !commit <topic>/<partition> <next offset> …   → !revoked      → !beat      → !leave
    → !nack <topic>/<partition> <offset> [delay=<ms>] [reason=<text>]
    → !commit again <topic>/<partition> <offset> …  a message from `!batch again` is handled
    → !given <topic>/<partition> <next offset> …    the program is given messages up to here; no answer
    ← !ok <topic>/<partition> offset=<first>
    ← !batch <topic>/<partition> <first offset> <lines> <bytes> [overtaken=<n>], then that many stored lines;
      !batch -: no records
    ← !batch again <topic>/<partition> <offset> 1 <bytes> deliveries=<n>, then the stored line
    ← !assign <generation> [<topic>/<partition>@<next offset> …]    ← !revoke <topic>/<partition> …
    ← !seek <topic>/<partition>@<next offset>
    ← !offsets <topic>/<partition> start=<n> end=<n> next=<n> committed=<n or -> …
    ← !committed <topic>/<partition> <next offset> …          ← !committed again <topic>/<partition> <offset> …
    ← !nacked <topic>/<partition> <offset> deliveries=<n> [letter=<topic>/<partition>@<offset>]
    ← !err <code> <text>                            the connection ends
    ← !err <request> <code> <text>                  the answer to one `!<request>`; the connection continues
    ← !err consume damaged <topic>/<partition>: …   `follow` pauses this partition; the others continue

`more`: the next line continues the request: again GROUP or ASSIGN, the same group and member, further topics or
partitions. Only options of the first line count.

A position is `earliest`, `latest`, an offset, or a time in RFC 3339. Names of groups and members, and reasons, are
percent-encoded. A line ends with a newline, or with carriage return and newline. No stored line begins with `!`.

Invariant   decode(encode(x)) == x for every request and reply: a value that would be read as another request is never
            encoded. It raises BadLine, as does a line that is no request; the text says what is wrong and what was
            expected.
Not covered Whether a topic, a partition or an offset exists: only the broker knows that.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from kmq.message import record
from kmq.message.text import request_line
from kmq.wire.attempts import Attempt, attempt_of

MAX_REQUEST = 1 << 16  # bytes of a request line
MAX_REPLY = 1 << 22  # bytes of a reply line: an assignment of 10,000 partitions with the longest names
MAX_OPENING = 1 << 20  # bytes of all lines of an opening
MAX_WAIT_MS = 300_000
MAX_NAME = 200  # characters of the name of a group or member
MAX_REASON = 250  # characters of the reason of a nack
MAX_DELAY_MS = 604_800_000
ASSIGNORS = ("cooperative-sticky", "sticky", "range", "roundrobin")
REQUESTS = ("fetch", "seek", "offsets", "commit", "nack")  # those that `!err <request> …` answers

_OFFSET = re.compile(r"\d{1,18}")
_PARTITION = re.compile(r"(?:0|[1-9]\d{0,8})")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)")
_DURATION = re.compile(r"(\d{1,8})(ms|s|m)")
_MOST_S = 86_400  # the longest time, in seconds
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0}
_NAME_SAFE = "!$&'()*+,-.:;@^_`~"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_PLACES = 10_000  # partitions whose words are cached


class BadLine(ValueError):
    """A line that is no request or reply. Its text says what is wrong."""


# --- values ----------------------------------------------------------------------------------------------------------


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class Position(NamedTuple):
    """A place in a partition. `kind`: earliest, latest, offset, time or received; `value`: the offset, or µs since the epoch.

    `time`: the first message whose timestamp is that time or later. `received`: the first one received since then.
    """

    kind: str
    value: int = 0

    def __str__(self) -> str:
        if self.kind == "offset":
            return str(self.value)
        if self.kind in ("time", "received"):
            moment = (_EPOCH + timedelta(microseconds=self.value)).isoformat().replace("+00:00", "Z")
            return moment if self.kind == "time" else RECEIVED + moment
        return self.kind


EARLIEST, LATEST = Position("earliest"), Position("latest")
RECEIVED = "received:"  # before a time in a position


def partition_of(text: str) -> TopicPartition:
    """Return the partition that `<topic>/<partition>` names."""
    topic, slash, number = text.partition("/")
    if not (slash and record.is_topic_name(topic) and _PARTITION.fullmatch(number)):
        raise BadLine(f"{text[:80]!r}: must be <topic>/<partition>")
    return TopicPartition(topic, int(number))


def position_of(text: str) -> Position:
    """Return the position that a word names."""
    if text in ("earliest", "latest"):
        return Position(text)
    if _OFFSET.fullmatch(text):
        return Position("offset", int(text))
    moment = text.removeprefix(RECEIVED)
    if _TIME.fullmatch(moment):
        try:
            since = datetime.fromisoformat(moment) - _EPOCH
            return Position("time" if moment == text else "received", max(0, since // timedelta(microseconds=1)))
        except (ValueError, OverflowError):
            pass
    raise BadLine(f"{text[:80]!r}: must be earliest, latest, an offset, or a time such as 2026-11-23T12:00:00Z")


def offset_of(text: str) -> int:
    if not _OFFSET.fullmatch(text):
        raise BadLine(f"{text[:80]!r}: must be an offset")
    return int(text)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def check(text: str) -> int:
        if not (_OFFSET.fullmatch(text) and least <= int(text) <= most):
            raise BadLine(f"{text[:80]!r}: must be a whole number between {least} and {most}")
        return int(text)

    return check


def _topic(text: str) -> str:
    if not record.is_topic_name(text):
        raise BadLine(f"{text[:80]!r}: must be the name of a topic: letters, digits, _ . and -")
    return text


def name_of(text: str) -> str:
    """Return the name of a group or member."""
    try:
        name = unquote(text, errors="strict")
    except UnicodeDecodeError:
        name = ""
    if not 0 < len(name) <= MAX_NAME or "/" in text or not name.isprintable():
        raise BadLine(f"{text[:80]!r}: must be a name of 1 to {MAX_NAME} characters, percent-encoded")
    return name


def _reason(text: str) -> str:
    try:
        reason = unquote(text, errors="strict")
    except UnicodeDecodeError:
        reason = ""
    if not 0 < len(reason) <= MAX_REASON:
        raise BadLine(f"{text[:80]!r}: must be 1 to {MAX_REASON} characters, percent-encoded")
    return reason


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else math.inf
    if seconds > _MOST_S:
        raise BadLine(f"{text[:80]!r}: must be a time such as 30s, 500ms or 2m, of at most a day")
    return seconds


def _said(text: str) -> bool:
    return bool(_one_of("said")(text))


def _attempt(text: str) -> Attempt:
    try:
        return attempt_of(text)
    except ValueError as err:
        raise BadLine(str(err)) from None


def _one_of(*choices: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in choices:
            raise BadLine(f"{text[:80]!r}: must be one of {', '.join(choices)}")
        return text

    return check


def _quoted(name: str) -> str:
    return quote(name, safe=_NAME_SAFE)


@lru_cache(_MOST_PLACES)
def _spelled(place: TopicPartition) -> str:
    """Return a partition as a word. Raises BadLine if the word would not be read as the same partition."""
    return str(partition_of(str(place)))


def _encoded(*words: object) -> bytes:
    try:
        return request_line(*words)
    except ValueError as err:
        raise BadLine(str(err)) from None


def _option(name: str, value: object, default: object = "") -> str:
    return "" if value == default else f"{name}={value}"


# --- requests --------------------------------------------------------------------------------------------------------


class Consume(NamedTuple):
    """Read a topic or one of its partitions. `most`: lines at most, 0 for all. `start` None: see `first`."""

    topic: str
    partition: int | None = None
    start: Position | None = None
    most: int = 0
    follow: bool = False
    raw: bool = False
    token: str = ""

    @property
    def first(self) -> Position:
        """Return where to begin: at the end if this follows, else at the first record, unless `start` says more."""
        return self.start or (LATEST if self.follow else EARLIEST)

    def encode(self) -> bytes:
        target = _topic(self.topic)
        if self.partition is not None:
            target = _spelled(TopicPartition(self.topic, self.partition))
        start, most = _option("from", self.start, None), _option("max", self.most, 0)
        follow, raw = "follow" * self.follow, "raw" * self.raw
        return _encoded("CONSUME", target, start, most, follow, raw, _option("token", self.token))


class Group(NamedTuple):
    """Join a group as `member`. `session_s`: seconds without any line after which the member counts as gone.

    `more`: the next line has further topics. `attempt`: an earlier one of the same run is refused. `says_hand_outs`:
    the client reports by `!given` which messages its program has, so messages that it only buffers do not count as
    delivered. `hears_overtaken`: batches say how many messages before them were deleted before the group had read them.
    """

    group: str
    member: str
    topics: tuple[str, ...]
    assignor: str = ASSIGNORS[0]
    session_s: float = 30.0
    token: str = ""
    more: bool = False
    attempt: Attempt | None = None
    says_hand_outs: bool = False
    hears_overtaken: bool = False

    def encode(self) -> bytes:
        session = "" if self.session_s == 30 else f"session={round(self.session_s * 1000)}ms"
        who, topics = f"member={_quoted(self.member)}", f"topics={','.join(map(_topic, self.topics))}"
        assignor = _option("assignor", self.assignor, ASSIGNORS[0])
        attempt = "" if self.attempt is None else f"attempt={_attempt(str(self.attempt))}"
        said = "given=said" * self.says_hand_outs, "overtaken=said" * self.hears_overtaken
        token, more = _option("token", self.token), "more" * self.more
        return _encoded("GROUP", _quoted(self.group), who, topics, assignor, session, attempt, *said, token, more)


class Assign(NamedTuple):
    """Read these partitions, without a group's management; commits go to `group`, if there is one.

    `more`: the next line has further partitions. `hears_overtaken`: as in Group.
    """

    group: str | None
    partitions: tuple[tuple[TopicPartition, Position | None], ...]
    token: str = ""
    more: bool = False
    hears_overtaken: bool = False

    def encode(self) -> bytes:
        words = [_spelled(place) if at is None else f"{_spelled(place)}@{at}" for place, at in self.partitions]
        said, token, more = "overtaken=said" * self.hears_overtaken, _option("token", self.token), "more" * self.more
        return _encoded("ASSIGN", _quoted(self.group or ""), *words, said, token, more)


class Fetch(NamedTuple):
    """Ask for one batch of these partitions, or of all that are assigned."""

    max_bytes: int
    wait_ms: int = 0
    partitions: tuple[TopicPartition, ...] = ()

    def encode(self) -> bytes:
        return _encoded("!fetch", self.max_bytes, _option("wait", self.wait_ms, 0), *map(_spelled, self.partitions))


class Seek(NamedTuple):
    place: TopicPartition
    position: Position

    def encode(self) -> bytes:
        return _encoded("!seek", _spelled(self.place), self.position)


class Offsets(NamedTuple):
    """Ask for the offsets of these partitions, or of all that are assigned."""

    partitions: tuple[TopicPartition, ...] = ()

    def encode(self) -> bytes:
        return _encoded("!offsets", *map(_spelled, self.partitions))


class Commit(NamedTuple):
    """Commit the next offset of each of these partitions. `is_again`: commit these single redelivered messages."""

    offsets: tuple[tuple[TopicPartition, int], ...]
    is_again: bool = False

    def encode(self) -> bytes:
        again = ["again"] if self.is_again else []
        pairs = (word for place, offset in self.offsets for word in (_spelled(place), offset))
        return _encoded("!commit", *again, *pairs)


class Given(NamedTuple):
    """Report that the client hands messages to its program, up to the next offset of each of these partitions.

    Sent before they are handed out; there is no answer.
    """

    offsets: tuple[tuple[TopicPartition, int], ...]

    def encode(self) -> bytes:
        return _encoded("!given", *(word for place, offset in self.offsets for word in (_spelled(place), offset)))


class Nack(NamedTuple):
    """Nack a message: it is redelivered after a delay. `reason`: for its dead letter; "": no reason."""

    place: TopicPartition
    offset: int
    delay_ms: int = 0
    reason: str = ""

    def encode(self) -> bytes:
        delay, reason = _option("delay", self.delay_ms, 0), _option("reason", _quoted(self.reason))
        return _encoded("!nack", _spelled(self.place), self.offset, delay, reason)


class Word(NamedTuple):
    """A request without arguments: `revoked`, `beat` or `leave`."""

    name: str

    def encode(self) -> bytes:
        return _encoded(f"!{self.name}")


REVOKED, BEAT, LEAVE = Word("revoked"), Word("beat"), Word("leave")
Opening = Consume | Group | Assign
Request = Fetch | Seek | Offsets | Commit | Given | Nack | Word


def opening(line: bytes) -> Opening:
    """Return the first request of a connection, given with or without its newline. Raises BadLine."""
    verb, *words = _words(line)
    decode = _OPENINGS.get(verb)
    if decode is None:
        raise BadLine(f"{verb[:80]!r}: unknown request; expected one of {', '.join(_OPENINGS)}")
    return decode(words)


def further(first: Group | Assign, line: bytes) -> Group | Assign:
    """Return an opening with what its next line adds. Raises BadLine."""
    added = opening(line)
    if isinstance(first, Group) and isinstance(added, Group) and first[:2] == added[:2]:
        return first._replace(topics=tuple(dict.fromkeys(first.topics + added.topics)), more=added.more)
    if isinstance(first, Assign) and isinstance(added, Assign) and first.group == added.group:
        starts = dict(first.partitions)
        for place, _ in added.partitions:
            if place in starts:
                raise BadLine(f"{place}: is given twice")
        return first._replace(partitions=first.partitions + added.partitions, more=added.more)
    verb = type(first).__name__.upper()
    raise BadLine(f"more: expected a line that goes on with {verb}, of the same group and member")


def request(line: bytes) -> Request:
    """Return a later request of a connection, given with or without its newline. Raises BadLine."""
    verb, *words = _words(line)
    decode = _REQUESTS.get(verb)
    if decode is None:
        raise BadLine(f"{verb[:80]!r}: unknown request; expected one of {', '.join(_REQUESTS)}")
    return decode(words)


def _words(line: bytes) -> list[str]:
    """Return the words of a line; there is at least one."""
    if len(line) > MAX_REPLY:
        raise BadLine(f"the line is over {MAX_REPLY} bytes")
    text = line.removesuffix(b"\n").removesuffix(b"\r").decode("ascii", "replace")
    if not (text.isascii() and text.isprintable()):
        raise BadLine("the line must be printable ASCII")
    return text.split() or [""]


def _options(words: Iterable[str], **parsers: Callable[[str], object]) -> dict[str, Any]:
    """Return the values of `name=value`; `from` is given as `start`."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        parse = parsers.get(_SPELLED.get(name, name))
        if not equals or parse is None:
            shown = ", ".join(f"{_SPELLED_OUT.get(each, each)}=" for each in parsers)
            raise BadLine(f"{word[:80]!r}: unknown option; expected one of {shown}")
        if _SPELLED.get(name, name) in found:
            raise BadLine(f"{name}=: is given twice")
        try:
            found[_SPELLED.get(name, name)] = parse(text)
        except BadLine as err:
            raise BadLine(f"{name}={err}") from None
    return found


_SPELLED = {  # as typed → attribute
    "from": "start",
    "max": "most",
    "session": "session_s",
    "wait": "wait_ms",
    "delay": "delay_ms",
    "given": "says_hand_outs",
    "overtaken": "hears_overtaken",
}
_SPELLED_OUT = {attribute: typed for typed, attribute in _SPELLED.items()}


def _consume(words: list[str]) -> Consume:
    if not words:
        raise BadLine("CONSUME: names no topic; expected CONSUME <topic>[/<partition>]")
    target, flags = words[0], {word for word in words[1:] if word in ("follow", "raw")}
    partition: int | None = None
    if "/" in target:
        target, partition = partition_of(target)
    options = _options(
        [word for word in words[1:] if word not in flags], start=position_of, most=_whole(1, 10**18 - 1), token=str
    )
    return Consume(_topic(target), partition, follow="follow" in flags, raw="raw" in flags)._replace(**options)


def _group(words: list[str]) -> Group:
    if not words:
        raise BadLine("GROUP: names no group; expected GROUP <group> member=<name> topics=<topic>[,<topic>…]")

    def topics(text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_topic(name) for name in text.split(",")))

    more = words[-1] == "more" and len(words) > 1
    options = _options(
        words[1 : len(words) - more],
        member=name_of,
        topics=topics,
        assignor=_one_of(*ASSIGNORS),
        session_s=_duration,
        attempt=_attempt,
        says_hand_outs=_said,
        hears_overtaken=_said,
        token=str,
    )
    for name in ("member", "topics"):
        if name not in options:
            raise BadLine(f"GROUP: {name}= is missing")
    return Group(name_of(words[0]), "", (), more=more)._replace(**options)


def _assign(words: list[str]) -> Assign:
    group = None
    if words and "/" not in words[0] and not words[0].startswith("token="):
        group, words = name_of(words[0]), words[1:]
    more = words[-1:] == ["more"]
    words = words[: len(words) - more]
    named = [word for word in words if "/" in word and not word.startswith("token=")]
    options = _options([word for word in words if word not in named], hears_overtaken=_said, token=str)
    places: dict[TopicPartition, Position | None] = {}
    for word in named:
        text, at, position = word.partition("@")
        place = partition_of(text)
        if place in places:
            raise BadLine(f"{place}: is given twice")
        places[place] = position_of(position) if at else None
    if not places:
        raise BadLine("ASSIGN: names no partition; expected ASSIGN [<group>] <topic>/<partition>[@<position>] …")
    return Assign(group, tuple(places.items()), more=more)._replace(**options)


def _fetch(words: list[str]) -> Fetch:
    if not words:
        raise BadLine("!fetch: says no size; expected !fetch <max bytes> [wait=<ms>] [<topic>/<partition> …]")
    options = _options([word for word in words[1:] if "=" in word], wait_ms=_whole(0, MAX_WAIT_MS))
    places = _places([word for word in words[1:] if "=" not in word])
    return Fetch(_whole(1, 10**18 - 1)(words[0]), 0, places)._replace(**options)


def _seek(words: list[str]) -> Seek:
    if len(words) != 2:
        raise BadLine("!seek: expected !seek <topic>/<partition> <position>")
    return Seek(partition_of(words[0]), position_of(words[1]))


def _places(words: Sequence[str]) -> tuple[TopicPartition, ...]:
    return tuple(dict.fromkeys(map(partition_of, words)))


def _commit(words: list[str]) -> Commit:
    is_again = words[:1] == ["again"]
    return Commit(_pairs(words[is_again:], "!commit"), is_again)


def _pairs(words: Sequence[str], what: str) -> tuple[tuple[TopicPartition, int], ...]:
    if not words or len(words) % 2:
        raise BadLine(f"{what}: expected {what} <topic>/<partition> <next offset> …")
    return tuple(
        (partition_of(place), offset_of(offset)) for place, offset in zip(words[::2], words[1::2], strict=True)
    )


def _nack(words: list[str]) -> Nack:
    if len(words) < 2:
        raise BadLine("!nack: expected !nack <topic>/<partition> <offset> [delay=<ms>] [reason=<text>]")
    options = _options(words[2:], delay_ms=_whole(0, MAX_DELAY_MS), reason=_reason)
    return Nack(partition_of(words[0]), offset_of(words[1]))._replace(**options)


def _word(word: Word) -> Callable[[list[str]], Word]:
    def decode(words: list[str]) -> Word:
        if words:
            raise BadLine(f"!{word.name}: takes no arguments")
        return word

    return decode


_OPENINGS: dict[str, Callable[[list[str]], Opening]] = {"CONSUME": _consume, "GROUP": _group, "ASSIGN": _assign}
_REQUESTS: dict[str, Callable[[list[str]], Request]] = {
    "!fetch": _fetch,
    "!seek": _seek,
    "!offsets": lambda words: Offsets(_places(words)),
    "!commit": _commit,
    "!given": lambda words: Given(_pairs(words, "!given")),
    "!nack": _nack,
    "!revoked": _word(REVOKED),
    "!beat": _word(BEAT),
    "!leave": _word(LEAVE),
}
