"""topics/<topic>/topic.toml: the declaration of a topic, and the seq from which on it is in force.

    partitions = 4
    partitioner = "murmur2"          for life (kmq/message/routing.py); without this line: crc32
    from_seq = 17                    written by the router
    grown = "90:1"                   by the router, if the topic has grown: before seq 90 it had one partition
    grown_crc32 = 123                of the three lines above
    segment_bytes = "256 MiB"        these replace the settings of the broker, in the same notation. The router
    segment_age = "1d"               reads them when it starts or adopts the topic, and writes them on request
    retention_age = "30d"            (topic_changes.py)
    retention_bytes = "10 GiB"
    cleanup = "compact"              delete (default) or compact: only the latest record of each key has to stay
    delete_retention = "2d"          how long compaction keeps a tombstone; 1d without it
    tier = "on"                      old records go to KMQ_TIER; off (default): not. local_retention_age and
    local_retention_bytes = "1 GiB"  local_retention_bytes say what stays on the disk; as retention_* without them
    max_deliveries = 5               a message nacked so often becomes a dead letter; none (default): no limit
    message_timestamp_type = "LogAppendTime"    Kafka's consumers see recv_ts; CreateTime (default): producer_ts
    kafka_settings = "compression.type=lz4;flush.ms=1000"    set by Kafka's clients, returned to them, no effect

A declaration without `from_seq` is pending: `declare` makes it, and the router adopts it with the next seq that it will
route. No other process can choose a correct `from_seq`, because only the router knows what has been routed.

`grown` is in router.ckpt, too. It says from which seq on the topic has more partitions, and how many it had before;
`partitions` is the number after the last growth. `17:1,90:2`: one before seq 17, then two until seq 90.
docs/decisions/topic-growth.md
"""

import errno
import os
import re
import zlib
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from kmq.errors import ConfigError, CorruptError
from kmq.files import replace_file, sync_directory
from kmq.log import identity, reader, rows, topic_changes
from kmq.log.damage import DamageError
from kmq.log.deletions import Deleted
from kmq.log.segment import COMPACT, LIMITS, Limits
from kmq.message import record, routing
from kmq.message.routing import Growth, Table, Topic, key_behind

MAX_PARTITIONS = 1024
_IS_THERE = (errno.EEXIST, errno.ENOTEMPTY)
CRC32 = routing.CRC32.name
DEFAULT_PARTITIONER = routing.DEFAULT.name  # of topics declared from now on
PARTITIONERS = tuple(routing.PARTITIONERS)
KEYED = "its records have keys, and new records of a key would go to another partition than its stored ones"
_SAMPLE = 1000  # records that are looked at for keys, from each end of a partition
_GROWTH = re.compile(r"\d{1,18}:\d{1,4}(?:,\d{1,18}:\d{1,4})*")


class Since(namedtuple("Since", ("from_seq", "grown", "partitioner"), defaults=((), None))):
    """The seq from which a topic is in force, how it has grown, and its partitioner (None: not known here)."""

    __slots__ = ()


def encode_growth(grown: Growth) -> str:
    return ",".join(f"{seq}:{before}" for seq, before in grown)


def decode_growth(text: str) -> Growth:
    """Return the growth in a text; "": it has not grown. Raises ValueError if the text is damaged."""
    if not text:
        return ()
    if not _GROWTH.fullmatch(text):
        raise ValueError(f"{text[:40]!r}: must be <seq>:<partitions before it>, separated by commas")
    pairs = [tuple(map(int, pair.split(":"))) for pair in text.split(",")]
    if sorted(set(pairs)) != pairs or any(low[1] >= high[1] for low, high in pairwise(pairs)):
        raise ValueError(f"{text[:40]!r}: seqs and partitions must rise")
    return [(seq, before) for seq, before in pairs]


def growth_crc(partitions: int, from_seq: int | None, grown: Growth) -> int:
    """Return the crc32 that topic.toml has beside its growth: a wrong digit would route records to other partitions."""
    return zlib.crc32(f"{partitions}|{from_seq}|{encode_growth(grown)}".encode())


def toml_path(data: str, name: str) -> str:
    return f"{data}/topics/{name}/topic.toml"


class Declaration:
    """What topic.toml says. `from_seq` is None while pending. `limits` replace settings, and are texts."""

    __slots__ = ("from_seq", "grown", "is_guessed", "limits", "partitioner", "partitions")

    def __init__(
        self,
        partitions: int,
        from_seq: int | None = None,
        limits: dict[str, str] | None = None,
        grown: Growth = (),
        partitioner: str = CRC32,
    ) -> None:
        self.partitions, self.from_seq, self.limits, self.grown = partitions, from_seq, limits or {}, grown
        self.partitioner = partitioner
        self.is_guessed = False  # True: derived from the directories, because the file cannot be read

    @classmethod
    def of(cls, topic: Topic, limits: dict[str, str] | None = None) -> "Declaration":
        """Return the declaration of a topic in force."""
        return cls(topic.partitions, topic.from_seq, limits, topic.grown, topic.partitioner.name)

    def topic(self, name: str, default_from: int | None = None) -> Topic:
        """Return this declaration as a topic named `name`. `default_from`: its from_seq if it is pending."""
        from_seq = default_from if self.from_seq is None else self.from_seq
        assert from_seq is not None
        partitioner = routing.PARTITIONERS[self.partitioner]
        return Topic(name, self.partitions, from_seq, (), self.grown, partitioner)

    def text(self) -> bytes:
        return "".join(f"{line}\n" for line in self.lines()).encode()

    def lines(self) -> list[str]:
        lines = [f"partitions = {self.partitions}"]
        if self.partitioner != CRC32:
            lines.append(f'partitioner = "{self.partitioner}"')
        if self.from_seq is not None:
            lines.append(f"from_seq = {self.from_seq}")
        lines += _growth_lines(self.partitions, self.from_seq, self.grown)
        return lines + [_limit_line(name, value) for name, value in self.limits.items()]


def _growth_lines(partitions: int, from_seq: int | None, grown: Growth) -> list[str]:
    if not grown:
        return []
    return [f'grown = "{encode_growth(grown)}"', f"grown_crc32 = {growth_crc(partitions, from_seq, grown)}"]


def with_growth(text: str, topic: Topic) -> str:
    """Return the text of a topic.toml with other partitions and growth. All other lines stay as they are."""
    rest = [line for line in text.splitlines() if not re.match(r"\s*(partitions|from_seq|grown|grown_crc32)\s*=", line)]
    first = Declaration(topic.partitions, topic.from_seq, None, topic.grown).lines()
    return "\n".join([*first, *rest]) + "\n"


def _limit_line(name: str, value: str) -> str:
    return f"{name} = {value}" if value.isdigit() else f'{name} = "{value}"'


def with_limits(text: str, changes: dict[str, str]) -> str:
    """Return the text of a topic.toml with other limits; "" removes a limit. All other lines stay as they are."""
    lines = text.splitlines()
    for name, value in changes.items():
        at = [number for number, line in enumerate(lines) if re.match(rf"\s*{name}\s*=", line)]
        place = at[0] if at else next((n for n, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
        lines = [line for number, line in enumerate(lines) if number not in at]
        if value:
            lines.insert(place, _limit_line(name, value))
    return "\n".join(lines) + "\n"


def _in_range(partitions: int) -> int:
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise ValueError(f"partitions = {partitions}: must be between 1 and {MAX_PARTITIONS}")
    return partitions


def _partitioner(table: Mapping[str, object]) -> str:
    """Return the name of the partitioner in a topic.toml. Raises ValueError for an unknown name."""
    damaged = next((key for key in table if _differs_in_one(key, "partitioner")), None)
    if damaged is not None:  # without the line, keys would be routed to other queues
        raise ValueError(f"{damaged}: must be partitioner")
    named = table.get("partitioner", CRC32)
    if named not in PARTITIONERS:
        raise ValueError(f"partitioner = {named}: must be {' or '.join(PARTITIONERS)}")
    return str(named)


def _differs_in_one(text: str, other: str) -> bool:
    """Return True if one byte was flipped between two texts."""
    return len(text) == len(other) and sum(a != b for a, b in zip(text, other, strict=True)) == 1


def read(data: str, name: str) -> Declaration:
    """Return the declaration of a topic.

    If the file is missing or unreadable, the declaration is derived from the partitions that exist. A power cut may
    leave the file empty only for topics that messages created, because only those are written without a sync. They
    have one partition, and are in force from the start.
    """
    try:
        with open(toml_path(data, name), "rb") as file:
            return parse(file.read().decode())
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        try:
            found = sum(entry.isdigit() for entry in os.listdir(f"{data}/topics/{name}"))
        except FileNotFoundError:  # deleted a moment ago
            return Declaration(1)
        guessed = Declaration(max(1, found), Deleted.of(data).last_seq(name) + 1)
        guessed.is_guessed = True
        return guessed


def parse(text: str) -> Declaration:
    """Parse the text of a topic.toml. Raises KeyError or ValueError if it is invalid."""
    import tomllib

    table = tomllib.loads(text)
    partitions, from_seq = _in_range(int(table["partitions"])), table.get("from_seq")
    from_seq = None if from_seq is None else int(from_seq)
    grown = decode_growth(table.get("grown", ""))
    if grown and table.get("grown_crc32") != growth_crc(partitions, from_seq, grown):
        raise ValueError("grown_crc32 does not match")
    limits = {each: str(table[each]) for each in LIMITS if each in table}
    return Declaration(partitions, from_seq, limits, grown, _partitioner(table))


def has_grown(old: Topic, new: Topic) -> bool:
    """Return True if `new` is the same topic, with more partitions from a later seq on."""
    count = len(old.grown)
    is_same = _life(old) == (new.name, new.from_seq, list(new.grown[:count]), new.partitioner)
    return is_same and len(new.grown) > count and new.grown[count][1] == old.partitions


def _life(topic: Topic) -> tuple[object, ...]:
    return topic.name, topic.from_seq, list(topic.grown), topic.partitioner


def fault(data: str, name: str, since: Since | None = None, at_start: bool = False) -> str:
    """Return what is wrong with a declaration, or "". `since`: the topic by router.ckpt and the records.

    `at_start`: report only faults with which the router must not start. Missing partitions are no such fault: the
    router makes them.
    """
    found = sum(entry.isdigit() for entry in os.listdir(f"{data}/topics/{name}"))
    try:
        with open(toml_path(data, name), "rb") as file:
            text = file.read()
        declared = parse(text.decode())
        if not at_start:
            Limits().with_changes(declared.limits)
    except (FileNotFoundError, KeyError, TypeError, ValueError, ConfigError) as err:
        return f"cannot be read: {err}"
    partitions, from_seq = declared.partitions, declared.from_seq
    if from_seq is None:
        has = any(size for number in range(found) for size in _sizes(f"{data}/topics/{name}/{number}"))
        return "has no from_seq, but the topic has records" if has else ""
    if partitions < found or (partitions > found and not at_start):
        return f"says {partitions} partitions, but there are {found}"
    if not text.endswith(b"\n"):  # the router writes a final newline; a number that was cut still parses
        return "is cut"
    if since is not None and since.from_seq != from_seq:
        return f"says from_seq {from_seq}, but router.ckpt says {since.from_seq}"
    if since is not None and list(since.grown) != list(declared.grown[: len(since.grown)]):
        return f"says grown {encode_growth(declared.grown)!r}, but it has grown {encode_growth(since.grown)!r}"
    if since is not None and since.partitioner.name != declared.partitioner:
        return f"says partitioner {declared.partitioner}, but the topic has {since.partitioner.name}"
    return ""


def _sizes(directory: str) -> list[int]:
    return [entry.stat().st_size for entry in os.scandir(directory)] if os.path.isdir(directory) else []


def load(data: str, name: str) -> tuple[int, int | None]:
    """Return (partitions, from_seq) of a topic; from_seq is None while the declaration is pending."""
    found = read(data, name)
    return found.partitions, found.from_seq


def is_compacted(data: str, name: str) -> bool:
    """Return True if compaction may have removed records of this topic: then a bare newline in a queue is no loss."""
    return read(data, name).limits.get("cleanup") == COMPACT


def from_seq_of(data: str, name: str) -> int | None:
    """Return the from_seq of a topic; None while the declaration is pending, and if its file cannot be read."""
    found = read(data, name)
    return None if found.is_guessed else found.from_seq


def names(data: str) -> list[str]:
    """Return the names of all topics, in order, without misnamed directories (see `check_names`)."""
    left = {name for name, _ in left_over(data)}
    return sorted(name for name in _directories(data) if name not in left and record.is_topic_name(name))


def unknown(name: str, candidates: Iterable[str], noun: str = "topic") -> ConfigError:
    """Return the error for an unknown topic or group; it suggests the nearest name among `candidates`."""
    import difflib  # for this error alone

    nearest = difflib.get_close_matches(name, candidates, 1, 0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"see: kmq {noun}s list"
    return ConfigError(f"{noun} {name!r} does not exist; {hint}")


def left_over(data: str) -> list[tuple[str, int]]:
    """Return (name, partitions) of deleted topics whose directory is still there, because of a kill."""
    found = []
    for name, lives in Deleted.of(data).lives.items():
        if os.path.isdir(f"{data}/topics/{name}"):
            declared = read(data, name)
            if declared.from_seq is not None and declared.from_seq <= lives[-1][1]:
                found.append((name, declared.partitions))
    return found


def misnamed(data: str) -> list[str]:
    """Return the directories in topics/ whose name no topic can have. Each may be a damaged topic."""
    return sorted(name for name in _directories(data) if not record.is_topic_name(name) and name != "lost+found")


def printable(name: str) -> str:
    """Return a printable form of a directory's name, which may hold any bytes."""
    return repr(os.fsencode(name))[2:-1]


def check_names(data: str) -> None:
    """Raise CorruptError if a directory in topics/ is misnamed."""
    for name in misnamed(data):
        raise CorruptError(
            f"{data}/topics/{printable(name)}: is not a topic's name; move it away, or run kmq verify --repair"
        )


def _directories(data: str) -> Iterator[str]:
    return (entry.name for entry in os.scandir(f"{data}/topics") if not entry.name.startswith(".") and entry.is_dir())


def listing(data: str) -> list[tuple[str, int, int | None]]:
    """Return (name, partitions, from_seq) of all topics, in order."""
    return [(name, *load(data, name)) for name in names(data)]


def table(data: str) -> Table:
    """Return the routing table for `kmq.message.routing.resolve`: topics in force, and deleted topics."""
    declared = ((name, read(data, name)) for name in names(data))
    in_force = [each.topic(name) for name, each in declared if each.from_seq is not None]
    return routing.table(in_force, Deleted.of(data).lives, identity.marks_from(data))


def declare(
    data: str,
    name: str,
    partitions: int,
    limits: dict[str, str] | None = None,
    own: bool = False,
    partitioner: str = DEFAULT_PARTITIONER,
) -> None:
    """Declare a topic; it is pending until the router adopts it. Raises ConfigError if an argument is invalid.

    `own`: a topic that KMQ writes for itself.
    """
    check(name, Declaration(partitions, None, limits, (), partitioner), own)
    check_letters(name, limits or {})
    if os.path.isdir(f"{data}/topics/{name}"):
        raise ConfigError(f"topic {name!r} already exists with {load(data, name)[0]} partition(s)")
    check_links(data, Topic(name, partitions, 1), is_new=True)
    request: topic_changes.TopicRequest | None = None
    try:
        texts = {"partitions": str(partitions), "partitioner": partitioner, **(limits or {})}
        # The request first: a declaration without one gets no record.
        request = topic_changes.submit(data, topic_changes.CREATE, name, texts)
        make(data, name, Declaration(partitions, None, limits, (), partitioner), is_new=True)
    except OSError as err:
        if request is not None and err.errno in _IS_THERE and (load(data, name)[1] or not request.is_waiting):
            return  # the router was faster
        if request is not None:
            request.remove()
        raise ConfigError(f"topic {name!r}: could not be declared: {err.strerror}") from err


def check(name: str, declared: Declaration, is_own: bool = False) -> None:
    """Raise ConfigError if a topic cannot be declared like this. `is_own`: a topic that KMQ writes for itself."""
    partitions, partitioner = declared.partitions, declared.partitioner
    if partitioner not in PARTITIONERS:
        raise ConfigError(f"partitioner {partitioner!r}: must be {' or '.join(PARTITIONERS)}")
    Limits().with_changes(declared.limits)
    if not (record.is_own_topic(name) if is_own else record.is_topic(name)):
        raise ConfigError(
            f"topic {name!r}: must match [A-Za-z0-9_][A-Za-z0-9_.-]{{0,199}} and not begin with append, dropped or __"
        )
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise ConfigError(f"partitions={partitions}: must be between 1 and {MAX_PARTITIONS}")


def check_letters(name: str, limits: Mapping[str, str]) -> None:
    """Raise ConfigError if `limits` make dead letters and the topic's name is too long for its dead letter topic.

    Called when a change is requested, not when it is carried out: a record of an older release must keep its effect.
    """
    most = record.MAX_TOPIC - len(record.DLQ)
    own = limits.get("max_deliveries", "")
    if own and len(name) > most and Limits().with_changes({"max_deliveries": own}).max_deliveries:
        raise ConfigError(
            f"max_deliveries: not for a topic whose name has {len(name)} characters, because dead letters go to"
            f" <topic>{record.DLQ}: at most {most}; take a shorter name, or none for max_deliveries"
        )


def check_tier(data: str, name: str, changes: Mapping[str, str], own: Mapping[str, str], in_shard: bool) -> None:
    """Raise ConfigError if old records of a topic cannot go to KMQ_TIER, or would be in a table. `own`: limits to be.

    Called when a change is requested; the router refuses a table of rows, too.
    """
    if changes.get("tier") == "on" and in_shard:
        raise ConfigError("tier: old records of a shard's topics do not go to KMQ_TIER yet")
    Limits().with_changes({limit: text for limit, text in own.items() if limit in ("tier", "cleanup") and text})
    if changes.get("cleanup") == COMPACT and has_rows(data, name):
        raise ConfigError(
            "cleanup: not compact while old records lie in KMQ_TIER; set tier=off, and wait until retention has dropped"
            " them or delete them (kmq topics truncate)"
        )


def has_rows(data: str, name: str) -> bool:
    """Return True if some records of a topic lie in KMQ_TIER, or it is not known."""
    try:
        return any(
            rows.of(f"{data}/topics/{name}/{number}").rows
            for number in os.listdir(f"{data}/topics/{name}")
            if number.isdigit()
        )
    except FileNotFoundError:
        return False
    except DamageError:
        return True


def check_links(data: str, topic: Topic, is_new: bool = False) -> None:
    """Raise ConfigError if a symlink that a topic needs is there. `is_new`: even if it leads to this topic."""
    for link in topic.log_names():
        path = f"{data}/{link}"
        if os.path.lexists(path) and (is_new or not (os.path.islink(path) and _leads_to(path, topic.name))):
            raise ConfigError(f"topic {topic.name!r}: its symlink {link} already exists and leads to another queue")


def check_growth(data: str, name: str, now: int, wanted: int) -> None:
    """Raise ConfigError if a topic with `now` partitions cannot get `wanted`."""
    if name.startswith("__"):
        raise ConfigError(f"topic {name!r}: belongs to KMQ itself and has one partition")
    if wanted < now:
        raise ConfigError(f"topic {name!r}: has {now} partitions, and can never have fewer")
    if wanted > MAX_PARTITIONS:
        raise ConfigError(f"partitions={wanted}: must be between 1 and {MAX_PARTITIONS}")
    for link in Topic(name, wanted, 1).log_names():
        path = f"{data}/{link}"
        if os.path.lexists(path) and not (os.path.islink(path) and _leads_to(path, name)):
            raise ConfigError(f"topic {name!r}: cannot grow, because {link} exists and leads to another queue")


def has_keys(data: str, topic: str, partitions: int) -> bool:
    """Return True if some of the oldest and newest records of a topic have keys, or cannot be read."""
    for number in range(partitions):
        log = reader.local(data, topic, number)
        try:
            starts = (log.first_offset, max(log.first_offset, log.end_offset() - _SAMPLE))
            lines = [line for start in starts for line in log.read(start)[1].split(b"\n") if line]
        except DamageError:
            return True
        if any(key_behind(topic.encode(), record.routing_key_of(line)) is not None for line in lines):
            return True
    return False


def _leads_to(link: str, name: str) -> bool:
    return os.readlink(link).startswith(f"topics/{name}/")


def drop_single_link(data: str, topic: Topic) -> bool:
    """Remove <topic>.log of a topic that has more partitions; return True if it was there."""
    path = f"{data}/{topic.name}.log"
    if topic.partitions == 1 or not os.path.islink(path) or not _leads_to(path, topic.name):
        return False
    os.unlink(path)
    return True


def make(data: str, name: str, declaration: Declaration, is_new: bool = False) -> None:
    """Make a topic: on disk with its declaration, or not at all. `is_new`: raises OSError if its directory is there."""
    directory, making = f"{data}/topics/{name}", f"{data}/topics/.new-{name}-{os.urandom(4).hex()}"
    if not is_new and os.path.isdir(directory):
        replace_file(f"{directory}/topic.toml", declaration.text())
        return
    os.mkdir(making)
    try:
        replace_file(f"{making}/topic.toml", declaration.text())
        os.rename(making, directory)
    except OSError as err:
        import shutil  # here, because the import costs each stage half a MiB of memory

        shutil.rmtree(making)
        if is_new or err.errno not in _IS_THERE:
            raise
        replace_file(f"{directory}/topic.toml", declaration.text())  # declared a moment ago
    sync_directory(f"{data}/topics")
