"""Records of topic changes: encoder and decoder. docs/decisions/topic-records.md says why there are any.

    __kmq.topic|<ts>|;request=<name>|create orders incarnation=0 partitions=4 partitioner=murmur2 retention_age=30d
    __kmq.topic|<ts>|;request=<name>|set orders incarnation=17 retention_bytes=10%20GiB segment_age=
    __kmq.topic|<ts>|;request=<name>|grow orders incarnation=17 partitions=8
    __kmq.topic|<ts>|;request=<name>|delete orders incarnation=17

    incarnation   the from_seq of the topic that is changed; 0: there must be none
    request       the request that asked for it (requests.py)
    values        percent-encoded

Invariant   The framer alone writes such records, one in a block of its own, and refuses this key from everybody else.
            What a record says depends on nothing but its text, so a replay of the WAL carries out the same.
"""

import re
from collections import namedtuple
from collections.abc import Iterator

from kmq.message import record

TOPIC = "__kmq"  # the topic of these records; nobody may declare it or write to it
KEY = b"__kmq.topic"
CREATE, SET, GROW, DELETE = "create", "set", "grow", "delete"
VERBS = (CREATE, SET, GROW, DELETE)

_MARK = b"|" + KEY + b"|"
_LINE = re.compile(rb"(?m)^\d+\|[^|\n]*" + re.escape(_MARK) + rb"[^\n]*\n")
_PLAIN = re.compile(r"[A-Za-z0-9._:+-]*")
_ENCODED = re.compile(rb"%([0-9A-F]{2})")


class Change(
    namedtuple("Change", ("verb", "topic", "incarnation", "values", "request", "seq", "ts"), defaults=(0, ""))
):
    """A change. `values` are texts by name. `seq` and `ts`: of the stored record."""

    __slots__ = ()

    @property
    def partitions(self) -> int:
        """Return the number of partitions that it asks for. Raises ValueError if it names none."""
        return int(self.values.get("partitions", ""))

    @property
    def limits(self) -> dict[str, str]:
        """Return the limits among the values."""
        return {name: text for name, text in self.values.items() if name not in ("partitions", "partitioner")}


def encode(change: Change, now: bytes) -> bytes:
    """Return the record as sent, without newline. `now`: its producer_ts."""
    words = [change.verb, change.topic, f"incarnation={change.incarnation}"]
    words += [f"{_quote(name)}={_quote(text)}" for name, text in change.values.items()]
    return b"%b|%b|;request=%b|%b" % (KEY, now, change.request.encode(), " ".join(words).encode())


def decode(line: bytes) -> Change:
    """Return the change in a stored record. Raises ValueError if it is none."""
    seq, ts, key, _, id_field, payload = line.rstrip(b"\n").split(b"|", 5)
    verb, topic, *words = payload.decode("ascii").split(" ")
    pairs = [word.partition("=") for word in words]
    values = {_unquote(name): _unquote(text) for name, _, text in pairs}
    if key != KEY or verb not in VERBS or not record.is_topic_name(topic) or "incarnation" not in values:
        raise ValueError(f"{payload[:80]!r}: is no change of a topic")
    incarnation, request = int(values.pop("incarnation")), id_field.partition(b";request=")[2].decode("ascii")
    return Change(verb, topic, incarnation, values, request, int(seq), ts.decode("ascii"))


def parts(lines: bytes) -> Iterator[tuple[bytes, bool]]:
    """Cut whole stored lines into (lines, False) and (the record of a change, True), in order."""
    at = 0
    for match in _LINE.finditer(lines) if _MARK in lines else ():
        if match.start() > at:
            yield lines[at : match.start()], False
        yield match[0], True
        at = match.end()
    if at < len(lines):
        yield lines[at:], False


def changes(lines: bytes) -> Iterator[Change]:
    """Yield the changes in whole stored lines; records that cannot be read are passed over."""
    for text, is_change in parts(lines):
        if is_change:
            try:
                yield decode(text)
            except ValueError:
                continue


def _quote(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    return "".join(
        char if _PLAIN.fullmatch(char) else "".join(f"%{byte:02X}" for byte in char.encode()) for char in text
    )


def _unquote(text: str) -> str:
    return _ENCODED.sub(lambda match: bytes([int(match[1], 16)]), text.encode()).decode()
