"""Records as lines of text: what a client program of this folder reads to produce, and prints of what it has consumed.

    topic TAB partition TAB offset TAB timestamp TAB key TAB value [TAB name:value]…

Key, value, and a header's name and value are base64; `-` is null. What a producer is not told is `-` too: topic,
offset, and a timestamp that the client takes from its own clock. No JSON, for which Java would need a library.
"""

import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from typing import NamedTuple

Header = tuple[str, bytes | None]


class Row(NamedTuple):
    """A record. `timestamp`: ms, None: as the client's clock says."""

    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()
    timestamp: int | None = None
    topic: str = "-"
    offset: int = -1


def write(rows: Iterable[Row]) -> str:
    """Return rows as lines."""
    return "".join(map(_line, rows))


def _line(row: Row) -> str:
    offset = "-" if row.offset < 0 else row.offset
    timestamp = "-" if row.timestamp is None else row.timestamp
    headers = [f"{_shown(name.encode())}:{_shown(value)}" for name, value in row.headers]
    fields = [row.topic, row.partition, offset, timestamp, _shown(row.key), _shown(row.value), *headers]
    return "\t".join(map(str, fields)) + "\n"


def _shown(value: bytes | None) -> str:
    return "-" if value is None else b64encode(value).decode()


def read(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the rows in lines."""
    for line in lines:
        topic, partition, offset, timestamp, key, value, *headers = line.rstrip("\n").split("\t")
        yield Row(
            int(partition),
            _meant(key),
            _meant(value),
            tuple(_header(header) for header in headers),
            None if timestamp == "-" else int(timestamp),
            topic,
            -1 if offset == "-" else int(offset),
        )


def offsets_behind(rows: Iterable[Row]) -> dict[tuple[str, int], int]:
    """Return topic and partition → the offset behind the last of these rows, which are in order."""
    return {(row.topic, row.partition): row.offset + 1 for row in rows}


def _header(text: str) -> Header:
    name, _, value = text.partition(":")
    return b64decode(name).decode(), _meant(value)


def _meant(text: str) -> bytes | None:
    return None if text == "-" else b64decode(text)


# --- what a client program is asked --------------------------------------------------------------------------------


class Asked(NamedTuple):
    """produce <bootstrap> <topic>=<codec>… < rows   or   consume <bootstrap> <topic>=<count>… > rows
    or   transact <bootstrap> < steps > answers.

    Each topic has the partitions 0 and 1, and is sent all the rows. What is consumed begins with offset 0. It is what a
    reader of committed records is shown.
    """

    command: str
    bootstrap: str
    topics: dict[str, str]


PARTITIONS = (0, 1)
PATIENCE_S = 60


def asked() -> Asked:
    """Return what the command line says."""
    command, bootstrap, *pairs = sys.argv[1:]
    return Asked(command, bootstrap, dict(pair.split("=") for pair in pairs))


# --- transactions ----------------------------------------------------------------------------------------------------


def transact(steps: object) -> None:
    """Call the method of `steps` that each line of the input names. Print the rows that it returns, and `done`; or why not.

    init TAB <id>      make a producer with this transactional id
    begin, commit, abort
    send TAB <row>
    flush              wait until all that was sent is acknowledged
    join TAB <group> TAB <topic>    make a consumer, which begins with the first offset
    poll               read a few records, if some come soon
    offsets            send to the transaction behind which records the last poll has ended
    leave              close the consumer
    """
    for line in sys.stdin:
        step, _, rest = line.rstrip("\n").partition("\t")
        words: list[Row] | list[str] = [*read([rest])] if step == "send" else rest.split("\t") if rest else []
        try:
            sys.stdout.write(write(getattr(steps, step)(*words) or ()) + "done\n")
        except Exception as err:
            print(repr(err).replace("\n", " ").replace("\t", " "))
        sys.stdout.flush()
