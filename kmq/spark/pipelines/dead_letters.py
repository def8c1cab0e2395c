"""Dead letters: records that do not match an archive's schema go back to `<topic>.dlq` of their broker.

Invariant   A dead letter is always stored once, however often its batch is run: the broker knows it by producer (the
            archive and the record's partition) and id (offset + 1).
Crash       The dead letters of a batch are sent before its commit. If the broker is down, the archive stops before the
            commit, so that no record counts as archived that is not.
"""

import os
import time
from functools import reduce
from operator import add

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kmq.config.settings import load
from kmq.errors import ConfigError, KmqError
from kmq.log import topics as declarations
from kmq.message.letters import DLQ
from kmq.spark.sink.targets import Destination, Target, producer
from kmq.spark.source.brokers import Directory, open_broker
from kmq.spark.source.options import Options

MAX_LINE = 1 << 20  # bytes, if the broker does not tell
_BESIDE = ("routing_key", "producer_ts", "id", "reason")  # parts of a dead letter's line besides headers and payload
_ADOPT_S = 30.0  # how long a router may take to adopt a new topic


def dead_letters(bad: DataFrame, archive: str, max_line: int = MAX_LINE) -> DataFrame:
    """Return rows of `parse` that have a reason as messages to <topic>.dlq, for format("kmq").

    Payload, key, producer_ts and headers are kept. New headers are `reason`, `from` (topic-partition-offset) and the
    old `id`. Headers with names that only raw lines can have (one letter, or encoded characters) are in header `other`,
    as JSON. A payload that becomes too long for a line is cut, and header `len` tells its length; its origin has all of
    it.
    """
    source = F.sha2(F.concat_ws("|", "broker", "topic"), 256).substr(1, 16)
    text, size = F.col("value").cast("string"), F.octet_length("value")
    beside = (F.octet_length(F.coalesce(each, F.lit(""))) for each in (*map(F.col, _BESIDE), F.to_json("headers")))
    room = F.lit(max_line - 1024) - 3 * reduce(add, beside)  # percent-encoded: three bytes for one
    plain = F.is_valid_utf8(text) & ~text.rlike(
        r"[\x00-\x08\x0a-\x1f\x7f]"
    )  # other payloads are sent as base64: four bytes for three
    short = F.greatest((room * 3 / 4).cast("int"), F.lit(0))
    cut = size > F.when(plain, room).otherwise(short)
    odd = F.map_filter(
        "headers", lambda name, _: ~_is_plain(name) & ~name.isin("p", "w", "enc")
    )  # headers that tell how it was stored
    ours = {
        "reason": F.col("reason"),
        "from": F.concat_ws("-", "topic", "partition", "offset"),
        "id": F.col("id"),
        "len": F.when(cut, size.cast("string")),  # a header that is null is not sent
        "other": F.when(F.size(odd) > 0, F.to_json(odd)),
    }
    names = F.array_distinct(F.map_keys("headers"))  # a name may come twice
    kept = F.filter(names, lambda name: _is_plain(name) & ~name.isin("enc", *ours))
    theirs = F.map_from_arrays(kept, F.transform(kept, lambda name: F.element_at("headers", name)))
    why = F.create_map(*(part for name, text in ours.items() for part in (F.lit(name), text)))
    letters = bad.select(
        F.concat(F.concat("topic", F.lit(f"{DLQ}.@")).cast("binary"), _dot_and_key()).alias("routing_key"),
        "producer_ts",
        F.concat_ws("-", F.lit(f"archive-{archive}"), source, "partition").alias("producer"),
        (F.col("offset") + 1).alias("id"),
        F.map_concat(theirs, why).alias("headers"),
        F.when(cut, F.substring("value", F.lit(1), short)).otherwise(F.col("value")).alias("value"),
    )
    return letters.repartition("producer").sortWithinPartitions("producer", "id")


def _dot_and_key() -> Column:
    """Return `.<key>` of a routing key, binary, whether or not a mark precedes the key; empty without a key."""
    behind = F.expr("substring(routing_key, octet_length(topic) + 1)")
    mark = F.regexp_extract(behind.cast("string"), r"\A(\.@[0-9]*)(?:\.|\z)", 1)
    return F.when(mark != "", F.substring(behind, F.length(mark) + 1, F.lit((1 << 31) - 1))).otherwise(behind)


def _is_plain(name: Column) -> Column:
    return name.rlike("^[A-Za-z0-9_.-]{2,}$")


class DeadLetters:
    """The way of dead letters back to the brokers their records came from."""

    def __init__(self, options: Options, to: Destination) -> None:
        """Raise ConfigError if a broker cannot be reached: better at the start than at the first bad record."""
        self._options = options
        self._connection = to.connection_like(options.token)
        given = [part.strip() for part in to.producers.split(",") if part.strip()]
        hint = "give --producers host:port for each, or --bad keep or drop"
        if given and len(given) != len(options.brokers):
            raise ConfigError(f"--producers {to.producers!r}: there are {len(options.brokers)} brokers; {hint}")
        if not given and not (options.paths and list(map(os.path.realpath, options.paths)) == [_own_data()]):
            raise ConfigError(
                f"bad records go to <topic>{DLQ} at the broker they are from, but where it listens is unknown; {hint}"
            )
        self._max_line = MAX_LINE
        self._addresses = dict(zip(options.brokers, given, strict=True)) if given else {}
        self._declared: set[tuple[str, str]] = set()
        self._check_reachable(hint)

    def _check_reachable(self, hint: str) -> None:
        for name in self._options.brokers:
            target = self._target(name)
            try:
                target.check()
                with producer(target.address, target.access) as probe:
                    self._max_line = min(self._max_line, probe.connect(timeout=_ADOPT_S))
            except (KmqError, TimeoutError, ValueError) as err:
                raise ConfigError(
                    f"bad records could not be sent to {target.address}: {err}; start the broker, {hint}"
                ) from err

    def _target(self, broker: str) -> Target:
        """Return the broker's address as it is now: a broker that was restarted may have another port."""
        return Target.of(self._addresses.get(broker, ""), self._connection)

    def send(self, bad: DataFrame, query: str) -> None:
        """Store these records in their dead-letter topics, each once however often this is called."""
        bad = bad.persist()  # without it each use would parse the whole batch again
        try:
            found = sorted((row.broker, row.topic) for row in bad.select("broker", "topic").distinct().collect())
            for broker, topic in found:
                self._declare(broker, f"{topic}{DLQ}")
            for broker in {broker for broker, _ in found}:
                target = self._target(broker)
                letters = dead_letters(
                    bad.where(F.col("broker") == broker), query.replace("-", "")[:12], self._max_line
                )
                where = "path" if self._options.paths else "kmq.bootstrap.servers"  # to compare those that come again
                writer = letters.write.format("kmq").mode("append").options(**target.options).option(where, broker)
                writer.option("kmq.probe", "false").save()  # the start has looked: one that is away now is waited for
        finally:
            bad.unpersist()

    def _declare(self, broker: str, name: str) -> None:
        """Declare a dead-letter topic: without a declaration orders.dlq would be key `dlq` of topic orders."""
        if (broker, name) in self._declared:
            return
        at = open_broker(broker, bool(self._options.paths), self._options.access)
        if isinstance(at, Directory):
            if name not in at.topics():
                declarations.declare(at.path, name, 1)
            deadline = time.monotonic() + _ADOPT_S
            while declarations.load(at.path, name)[1] is None:
                if time.monotonic() > deadline:
                    raise ConfigError(f"topic {name!r}: the router of {broker} has not adopted it; is the broker up?")
                time.sleep(0.05)
        elif name not in at.topics():
            raise ConfigError(f"topic {name!r} is needed at {broker} for bad records: kmq topics create {name}, there")
        self._declared.add((broker, name))


def _own_data() -> str:
    return os.path.realpath(load().data)
