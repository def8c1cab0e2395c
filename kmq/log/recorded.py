"""What the records of topic changes say of topics: their limits. Other facts of a declaration have a second copy."""

from collections.abc import Iterator

from kmq.log import reader, requests, topic_records
from kmq.log.damage import DamageError

Limits = dict[tuple[str, int], dict[str, str]]  # topic, from_seq → limits as texts


def limits(data: str) -> Limits:
    """Return the limits of every topic that a record has declared, deleted ones too; none if the records are damaged."""
    found: Limits = {}
    try:
        for change in _changes(data):
            if change.verb == topic_records.CREATE:
                found.setdefault((change.topic, change.seq), change.limits)
            elif change.verb == topic_records.SET and (change.topic, change.incarnation) in found:
                requests.apply(found[change.topic, change.incarnation], change.limits)
    except DamageError:
        return {}
    return found


def _changes(data: str) -> Iterator[topic_records.Change]:
    log = reader.partition(data, topic_records.TOPIC, 0)
    offset = log.first_offset
    while True:
        offset, lines = log.read(offset)
        if not lines:
            return
        yield from topic_records.changes(lines)
        offset += lines.count(b"\n")
