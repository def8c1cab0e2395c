"""Redrive: messages of a queue back through the broker under new routing keys. The queue itself is never touched.

The new key is a template: `{routing_key}`, `{topic}` and `{key}` (what follows the topic) stand for the old one's parts.
"""

import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from kmq import record
from kmq.errors import ConfigError
from kmq.log import reader, topics
from kmq.log.reader import Log

_OWN = re.compile(rb";[pw]=[^;]*")  # who sent it first; it is a new message now
_FIELDS = ("routing_key", "topic", "key")
_ANY_BYTES = "surrogateescape"  # a key is UTF-8 by convention only; this way every byte comes out as it went in


def rewrite(template: str, topic: str, routing_key: bytes) -> bytes:
    """The new routing key. Raises ConfigError where the template or what it gives is not one."""
    old = routing_key.decode(errors=_ANY_BYTES)
    key = old[len(topic) + 1 :]
    try:
        new = template.format_map({"routing_key": old, "topic": topic, "key": key})
    except (KeyError, ValueError, IndexError, AttributeError) as err:
        raise ConfigError(f"--to {template!r}: {err}; the fields are {{{'}, {'.join(_FIELDS)}}}") from None
    result = new.encode(errors=_ANY_BYTES)
    reason = record.refusal(result + b"|||")
    if reason or b"|" in result or b"\n" in result:
        raise ConfigError(f"--to {template!r}: gives {new!r}, which is no routing key ({reason or 'separator in it'})")
    return result


Held = list[tuple[Log, int]]  # partitions, each with its end as it was


def hold(data: str, topic: str) -> Held:
    """What a topic holds now, partition by partition. What comes later is not redriven."""
    if not os.path.isdir(f"{data}/topics/{topic}"):
        raise ConfigError(f"topic {topic!r} does not exist; kmq topics list shows those that do")
    logs = [reader.partition(data, topic, number) for number in range(topics.load(data, topic)[0])]
    return [(log, log.end_offset()) for log in logs]


def stored_lines(held: Held) -> Iterator[bytes]:
    """The records of these partitions, in order, without what compaction took away. DamageError at what is not good."""
    for log, end in held:
        offset = 0
        while offset < end:
            first, text = log.read(offset)
            lines = text.split(b"\n")[: max(0, end - first)]
            if not text:
                break
            yield from filter(None, lines)
            offset = first + text.count(b"\n")


def select(held: Held, topic: str, template: str, key_glob: str, from_seq: int) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(old routing key, new routing key, line as sent) of every record to redrive, in order."""
    for line in stored_lines(held):
        seq, _, routing_key, ts, id, payload = line.split(b"|", 5)
        key = routing_key[len(topic) + 1 :].decode(errors=_ANY_BYTES)
        if int(seq) >= from_seq and fnmatchcase(key, key_glob):
            new = rewrite(template, topic, routing_key)
            yield routing_key, new, b"%b|%b|%b|%b\n" % (new, ts, _OWN.sub(b"", id), payload)
