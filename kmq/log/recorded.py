"""What the records of topic changes say of topics, where another file does not say it or cannot be read.

Which copy counts, for the partitioner and the growth of a topic:

    router.ckpt     if it names the partitioner of the topic
    the records     else: such a checkpoint may be of a release that knew neither, and that release or the one after it
                    may have written topic.toml again
    topic.toml      if there is no record of the topic's declaration
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from kmq.log import checkpoint, reader, topic_changes, topics
from kmq.log.damage import DamageError
from kmq.log.growth import Since
from kmq.message.routing import CRC32, PARTITIONERS, Table


class Recorded:
    """What the records say of one life of a topic."""

    __slots__ = ("grown", "limits", "partitioner", "partitions")

    def __init__(self, change: topic_changes.Change) -> None:
        self.partitions, self.limits = change.partitions, change.limits
        self.partitioner = PARTITIONERS[change.values.get("partitioner", CRC32.name)]
        self.grown: list[tuple[int, int]] = []


Lives = Mapping[tuple[str, int], Recorded]  # topic, from_seq


def lives(data: str) -> Lives:
    """Return every topic that a record has declared, deleted ones too; none if the records are damaged."""
    found: dict[tuple[str, int], Recorded] = {}
    try:
        for change in _changes(data):
            at = change.topic, change.incarnation
            try:
                if change.verb == topic_changes.CREATE:
                    found.setdefault((change.topic, change.seq), Recorded(change))
                elif change.verb == topic_changes.SET and at in found:
                    topic_changes.apply(found[at].limits, change.limits)
                elif change.verb == topic_changes.GROW and at in found and change.partitions > found[at].partitions:
                    found[at].grown.append((change.seq, found[at].partitions))
                    found[at].partitions = change.partitions
            except (LookupError, ValueError):  # the router has refused it
                continue
    except DamageError:
        return {}
    return found


def _changes(data: str) -> Iterator[topic_changes.Change]:
    log = reader.partition(data, topic_changes.TOPIC, 0)
    offset = log.first_offset
    while True:
        offset, lines = log.read(offset)
        if not lines:
            return
        yield from topic_changes.changes(lines)
        offset += lines.count(b"\n")


def complete(data: str, rows: checkpoint.Rows, since: Mapping[str, Since], known: Lives) -> dict[str, Since]:
    """Return since when each topic is in force, as it counts: also topics that only a record and topic.toml have.

    `rows`, `since`: what router.ckpt says.
    """
    counts = Counter(name for name, _ in rows)
    found = dict(since)
    for name in {*since, *topics.names(data)}:
        stated = since.get(name)
        if stated and stated.partitioner:
            continue
        declared = topics.read(data, name)
        from_seq = stated.from_seq if stated else declared.from_seq
        if from_seq is None or (declared.is_guessed and not stated):
            continue
        record = known.get((name, from_seq))
        if record is None and not stated:
            continue
        grown = stated.grown if stated else ()
        is_life = not declared.is_guessed and declared.from_seq == from_seq
        partitioner = record.partitioner if record else PARTITIONERS[declared.partitioner] if is_life else CRC32
        # A growth that leads to other partitions than the checkpoint has came later, or was refused.
        partitions = counts[name] or declared.partitions
        sources = [each for each in (declared if is_life else None, record) if each and each.partitions == partitions]
        longer = [each.grown for each in sources if list(each.grown[: len(grown)]) == list(grown)]
        found[name] = Since(from_seq, max([grown, *longer], key=len), partitioner)
    return found


def table(data: str) -> Table:
    """Return the routing table that the next start uses, while no router has mended topic.toml."""
    table = topics.table(data)
    try:
        _, rows, since = checkpoint.load(data)
    except (ValueError, LookupError):
        rows, since = {}, {}
    for name, stated in complete(data, rows, since, lives(data)).items():
        topic = table.get(name.encode())
        if topic is not None and topic.from_seq == stated.from_seq:
            topic.grown, topic.partitioner = stated.grown, stated.partitioner
    return table
