"""The routing table as columns: what kmq.message.routing decides for a line, as expressions over rows of a DataFrame.

    routing = Routing({"data": topics.table("data")})               # broker → its table, from kmq.log.topics
    frame.select("line", routing.topic("routing_key", "seq"), routing.partition("routing_key", "seq"))

Exact       For every routing key that can be stored the columns equal `resolve` and `Topic.partition_of`, byte by byte,
            even if the key is not UTF-8: Spark keeps the bytes of a text as they are, and cuts text at a dot byte by
            byte. The topic is empty if it was deleted after the record was stored. `murmur2` works on the hex digits of
            the key. Products of two 32-bit numbers there are below 2^63, so bigint never overflows.
Cost        The table is one constant map. Spark looks up a constant by hash (4.3, from 1,000 entries on), so a table of
            10,000 topics costs no more than a table of ten. Each row costs one lookup per number of dots that declared
            topics have (in most tables one or none), not per dot of the key: a key of a million dots is no slower.
            `murmur2` is evaluated row by row: about a microsecond for four bytes of a key.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F

from kmq.message.record import NO_PARTITION
from kmq.message.routing import MURMUR2, RUN, Table

# --- murmur2 ---------------------------------------------------------------------------------------------------------

_MASK, _M, _SEED = 0xFFFFFFFF, 0x5BD1E995, 0x9747B28C
_DIGIT = "(?:3[0-9]|[46][1-6])"  # a hex digit, in hex
_TOKEN = f"(25{_DIGIT}{{2}}|..)"  # %XX, or one byte
_RUN_BITS = RUN.bit_length() - 1
assert RUN == 1 << _RUN_BITS


def murmur2(key: Column) -> Column:
    """Return the number, bigint, of a binary key that is not null, as it is stored."""
    digits = _let(F.hex(key), lambda text: F.when(F.contains(text, F.lit("25")), _decoded(text)).otherwise(text))
    return _let(digits, _hash)


def turn(seq: Column) -> Column:
    """Return the number of the run of seqs to which a message without a key belongs, bigint."""
    return F.shiftright(seq.cast("bigint"), _RUN_BITS)


def _let(value: Column, body: Callable[[Column], Column]) -> Column:
    """Return body(value), with the value computed once."""
    return F.element_at(F.transform(F.array(value), body), 1)


def _decoded(digits: Column) -> Column:
    """Apply kmq.message.routing.decoded to hex digits."""
    return F.array_join(F.transform(F.regexp_extract_all(digits, F.lit(_TOKEN), 1), _byte), "")


def _byte(token: Column) -> Column:
    """Return the two hex digits of a byte. A token of %XX has the digits 25 and those of two characters; return XX."""
    return F.when(F.length(token) == 6, F.unhex(F.substring(token, 3, 4)).cast("string")).otherwise(token)


def _hash(digits: Column) -> Column:
    count = F.shiftright(F.length(digits), 3)  # whole words of four bytes
    places = F.when(count > 0, F.sequence(F.lit(1), count)).otherwise(F.array().cast("array<int>"))
    words = F.transform(places, lambda place: _word(F.substring(digits, place * 8 - 7, F.lit(8))))
    words = F.transform(words, lambda word: _times(word.bitwiseXOR(F.shiftright(word, 24))))
    rest = F.substring(digits, count * 8 + 1, F.lit(8))
    seed = F.lit(_SEED).cast("bigint").bitwiseXOR(F.shiftright(F.length(digits), 1).cast("bigint"))
    mixed = F.aggregate(words, seed, lambda found, word: _times(found).bitwiseXOR(word))
    tail = _little_endian(F.rpad(rest, 8, "0"))
    mixed = _let(mixed, lambda found: F.when(rest == "", found).otherwise(_times(found.bitwiseXOR(tail))))
    mixed = _let(mixed, lambda found: _times(found.bitwiseXOR(F.shiftright(found, 13))))
    return _let(mixed, lambda found: found.bitwiseXOR(F.shiftright(found, 15)).bitwiseAND(F.lit(0x7FFFFFFF)))


def _word(digits: Column) -> Column:
    return _times(_little_endian(digits))


def _times(number: Column) -> Column:
    return (number * F.lit(_M).cast("bigint")).bitwiseAND(F.lit(_MASK))


def _little_endian(digits: Column) -> Column:
    """Return eight hex digits as a number whose first byte is the lowest."""
    swapped = F.concat(*(F.substring(digits, at, 2) for at in (7, 5, 3, 1)))
    return F.conv(swapped, 16, 10).cast("bigint")


# --- routing ---------------------------------------------------------------------------------------------------------

_TO_THE_END = (1 << 31) - 1
_MARK = r"\.@([0-9]*)(?:\.|\z)"
_MARKED = rf"\A([A-Za-z0-9_][A-Za-z0-9_.-]{{0,199}}){_MARK}"  # kmq.message.record.marked
_PARTITIONS, _FROM_SEQ, _IS_MURMUR2 = 0, 1, 2


class Routing:
    """The tables of some brokers. An undeclared topic is the text before the key's first dot, with one partition."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        """`tables`: broker → table. A single table is used for all rows, whatever their broker."""
        self._by_broker = len(tables) > 1
        bounds = {
            self._name(broker, name.decode()): topic.bounds()
            for broker, table in tables.items()
            for name, topic in table.items()
            if topic.lives
        }
        ends = {name: seqs[1::2] for name, seqs in bounds.items()}
        self.knows_deleted = bool(bounds)
        self._bounds, self._ends = (_constant(table) for table in (bounds, ends))
        grown = {
            self._name(broker, name.decode()): topic
            for broker, table in tables.items()
            for name, topic in table.items()
            if topic.grown and not topic.is_gone
        }
        self._has_grown = bool(grown)
        self._grown_from = _constant({name: [seq for seq, _ in topic.grown] for name, topic in grown.items()})
        self._counts = _constant(
            {name: [*(before for _, before in topic.grown), topic.partitions] for name, topic in grown.items()}
        )
        rows = {
            self._name(broker, name.decode()): (topic.partitions, topic.from_seq, int(topic.partitioner is MURMUR2))
            for broker, table in tables.items()
            for name, topic in table.items()
            if topic.partitions > 1 or b"." in name  # other topics route like undeclared ones
            if not topic.is_gone
        }
        self._marks_from = {broker: table.marks_from for broker, table in tables.items()}
        labels = {name.count(b".") + 1 for table in tables.values() for name in table}
        self._labels = sorted(labels - {1}, reverse=True)  # numbers of labels that topics have, the largest first
        self._rows = _constant(rows)
        self._knows_murmur2 = any(row[_IS_MURMUR2] for row in rows.values())

    def topic(self, routing_key: Column | str, seq: Column | str, broker: Column | str = "broker") -> Column:
        """Return the topic, text: from a mark, else the longest topic in force, else the first label; empty if
        deleted.
        """
        marked = self._marked(routing_key, seq, broker, 1)
        name = F.when(marked != "", marked).otherwise(self._longest(routing_key, seq, broker))
        if not self.knows_deleted:
            return name
        last_end = F.element_at(self._at(self._ends, name, broker), -1)
        return F.when(last_end > _column(seq), F.lit("")).otherwise(name)

    def _longest(self, routing_key: Column | str, seq: Column | str, broker: Column | str) -> Column:
        text = _column(routing_key).cast("string")
        prefixes = [F.substring_index(text, ".", count) for count in self._labels]
        in_force = [F.when(self._is_in_force(name, seq, broker), name) for name in prefixes]
        return F.coalesce(*in_force, F.substring_index(text, ".", 1))

    def _is_in_force(self, name: Column, seq: Column | str, broker: Column | str) -> Column:
        since = self._row(name, broker)[_FROM_SEQ] <= _column(seq)
        if not self.knows_deleted:
            return since
        passed = F.filter(self._at(self._bounds, name, broker), lambda bound: bound <= _column(seq))
        return F.coalesce(since, F.lit(False)) | F.coalesce(F.size(passed) % 2 == 1, F.lit(False))

    def key(self, routing_key: Column | str, seq: Column | str, broker: Column | str = "broker") -> Column:
        """Return the message key, binary: the part after the topic or the mark; null without a key."""
        binary = _column(routing_key).cast("binary")
        topic, digits = (self._marked(routing_key, seq, broker, group) for group in (1, 2))
        mark_end = F.length(topic) + 2 + F.length(digits)
        # Positions count from 1, and a dot follows the mark.
        behind_mark = F.when(F.length(binary) > mark_end, _from(binary, mark_end + 2))
        rest = _from(binary, F.length(self._longest(routing_key, seq, broker)) + 2)
        return F.when(topic != "", behind_mark).otherwise(F.when(F.length(rest) > 0, rest))

    def partition(self, routing_key: Column | str, seq: Column | str, broker: Column | str = "broker") -> Column:
        """Return the partition, int: from the mark, else by the key, else by the seq."""
        name = self.topic(routing_key, seq, broker)
        partitions = self._partitions(name, seq, broker)
        digits, key = self._marked(routing_key, seq, broker, 2), self.key(routing_key, seq, broker)
        marked = F.when(F.length(digits) > 18, F.lit(NO_PARTITION)).otherwise(
            F.least(digits.cast("bigint"), F.lit(NO_PARTITION))
        )
        hashed, run = F.crc32(key), _column(seq)
        if self._knows_murmur2:
            is_murmur2 = self._row(name, broker)[_IS_MURMUR2] == 1
            hashed = F.when(is_murmur2, murmur2(key)).otherwise(hashed)
            run = F.when(is_murmur2, turn(run)).otherwise(run)
        number = F.when(digits != "", marked).when(key.isNotNull(), hashed).otherwise(run)
        return (number % partitions).cast("int")

    def _partitions(self, name: Column, seq: Column | str, broker: Column | str) -> Column:
        """Return how many partitions a topic had for a record with this seq."""
        now = F.coalesce(self._row(name, broker)[_PARTITIONS], F.lit(1))
        if not self._has_grown:
            return now
        passed = F.filter(self._at(self._grown_from, name, broker), lambda at: at <= _column(seq))
        return F.coalesce(F.element_at(self._at(self._counts, name, broker), F.size(passed) + 1), now)

    def _marked(self, routing_key: Column | str, seq: Column | str, broker: Column | str, group: int) -> Column:
        """Return the topic (group 1) or the digits (2) of a valid mark, text; empty without a mark."""
        text = _column(routing_key).cast("string")
        first = F.lit(next(iter(self._marks_from.values()), 0))
        if self._by_broker:
            first = F.from_json(F.lit(json.dumps(self._marks_from)), "map<string,bigint>")[_column(broker)]
        counts = F.contains(text, F.lit(".@")) & (_column(seq) >= first)
        return F.when(counts, F.regexp_extract(text, _MARKED, group)).otherwise("")

    def _row(self, name: Column, broker: Column | str) -> Column:
        """Return (partitions, from_seq) of a topic; null if the table lacks the topic."""
        return self._at(self._rows, name, broker)

    def _at(self, table: Column, name: Column, broker: Column | str) -> Column:
        return F.element_at(table, F.concat(_column(broker), F.lit("|"), name) if self._by_broker else name)

    def _name(self, broker: str, topic: str) -> str:
        return f"{broker}|{topic}" if self._by_broker else topic


def unambiguous(topic: Column, key: Column, routing_key: Column) -> Column:
    """Return the routing key, binary, for another broker, so that a part of the key here does not become a mark
    there.
    """
    rest = _from(routing_key, F.octet_length(topic) + 2)
    looks_marked = F.contains(routing_key.cast("string"), F.lit(".@")) & (rest == key)
    return F.when(looks_marked, exact(topic, key)).otherwise(routing_key)


def exact(topic: Column, key: Column) -> Column:
    """Return a binary routing key that leads to `topic`, whatever is declared: kmq.message.routing.exact as a
    column.
    """
    marked = F.concat(topic, F.lit(".@"))
    name = F.when(F.contains(topic, F.lit(".")), marked).otherwise(topic).cast("binary")
    return F.coalesce(F.concat(marked.cast("binary"), F.lit(b"."), key), name)


def _from(binary: Column, position: Column) -> Column:
    return F.substring(binary, position, F.lit(_TO_THE_END))


def _constant(rows: Mapping[str, Sequence[int]]) -> Column:
    return F.from_json(F.lit(json.dumps(rows)), "map<string,array<bigint>>")


def _column(named: Column | str) -> Column:
    return F.col(named) if isinstance(named, str) else named
