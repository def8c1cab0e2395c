"""What the records of topic changes say of a topic: its limits. Other facts of a declaration have a second copy."""

from collections.abc import Iterator

from kmq.log import reader, requests, topic_records
from kmq.log.damage import DamageError


def limits(data: str, topic: str, from_seq: int) -> dict[str, str] | None:
    """Return the limits of the topic in force from `from_seq` on; None if it was not declared by a record."""
    found: dict[str, str] | None = None
    try:
        for change in _changes(data):
            if change.topic != topic:
                continue
            if change.verb == topic_records.CREATE and change.seq == from_seq:
                found = change.limits
            elif change.verb == topic_records.SET and change.incarnation == from_seq and found is not None:
                requests.apply(found, change.limits)
    except DamageError:
        return None
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
