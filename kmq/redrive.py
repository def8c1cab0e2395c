"""Redrive: messages of a queue back through the broker under new routing keys. The queue itself is never touched.

The new key is a template: `{routing_key}`, `{topic}` and `{key}` (what follows the topic) stand for the old one's parts.
"""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase

from kmq import record
from kmq.errors import ConfigError
from kmq.log import segment, topics

_FIELDS = ("routing_key", "topic", "key")


def rewrite(template: str, topic: str, routing_key: bytes) -> bytes:
    """The new routing key. Raises ConfigError where the template or what it gives is not one."""
    old = routing_key.decode("latin-1")
    key = old[len(topic) + 1 :]
    try:
        new = template.format_map({"routing_key": old, "topic": topic, "key": key})
    except (KeyError, ValueError, IndexError) as err:
        raise ConfigError(f"--to {template!r}: {err}; the fields are {{{'}, {'.join(_FIELDS)}}}") from None
    result = new.encode("latin-1", errors="replace")
    reason = record.refusal(result + b"|||")
    if reason or b"|" in result or b"\n" in result:
        raise ConfigError(f"--to {template!r}: gives {new!r}, which is no routing key ({reason or 'separator in it'})")
    return result


def stored_lines(data: str, topic: str) -> Iterator[bytes]:
    """All records of a topic, partition by partition, each in order."""
    if not os.path.isdir(f"{data}/topics/{topic}"):
        raise ConfigError(f"topic {topic!r} does not exist; kmq topics list shows those that do")
    for partition in range(topics.load(data, topic)[0]):
        for _, path in segment.listing(f"{data}/topics/{topic}/{partition}"):
            with open(path, "rb") as file:
                for line in file:
                    if line.endswith(b"\n") and line != b"\n":
                        yield line[:-1]


def select(data: str, topic: str, template: str, key_glob: str, from_seq: int) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(old routing key, new routing key, line as sent) of every record to redrive, in order."""
    for line in stored_lines(data, topic):
        seq, _, routing_key, rest = line.split(b"|", 3)
        key = routing_key[len(topic) + 1 :].decode("latin-1")
        if int(seq) >= from_seq and fnmatchcase(key, key_glob):
            new = rewrite(template, topic, routing_key)
            yield routing_key, new, b"%b|%b\n" % (new, rest)
