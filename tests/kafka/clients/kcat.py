"""kcat, a command of Debian: librdkafka too, but what it is given and shows are words and bytes of a shell.

One process sends consecutive rows that have the same partition and headers. kcat shows all headers of a record as one
text, `name=value,name=value`: that is here one header without a name.
"""

import itertools
import secrets
import subprocess
import sys

import record_lines
from record_lines import PATIENCE_S, Header, Row

_FORMAT = "%p %o %T %K %S %k%s%h"
_NUMBERS = 5


def _kcat(bootstrap: str, *words: str | bytes, text: bytes = b"") -> bytes:
    command: list[str | bytes] = ["kcat", "-b", bootstrap, *words]
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S).stdout


def produce(bootstrap: str, topics: dict[str, str]) -> None:
    rows = [*record_lines.read(sys.stdin)]
    for topic, codec in topics.items():
        for (partition, headers, has_key, has_value), some in itertools.groupby(rows, _run):
            between, after = secrets.token_hex(8), secrets.token_hex(8)
            words: list[str | bytes] = [
                "-D",
                between,
                *(["-K", after] if has_key else []),
                *([] if has_value else ["-Z"]),
            ]
            for name, value in headers:
                words += ["-H", name if value is None else name.encode() + b"=" + value]
            texts = [(row.key + after.encode() if row.key is not None else b"") + (row.value or b"") for row in some]
            settings = ["-X", f"compression.codec={codec}", "-X", "message.max.bytes=2000000"]
            words += ["-P", "-t", topic, "-p", str(partition), *settings]
            _kcat(bootstrap, *words, text=between.encode().join(texts))


def _run(row: Row) -> tuple[int, tuple[Header, ...], bool, bool]:
    return row.partition, row.headers, row.key is not None, row.value is not None


def consume(bootstrap: str, topics: dict[str, str]) -> None:
    for topic, count in topics.items():
        between = secrets.token_hex(8).encode()
        shown = _FORMAT + between.decode()
        text = _kcat(bootstrap, "-C", "-q", "-t", topic, "-o", "beginning", "-c", count, "-f", shown)
        rows, at = [], 0
        while at < len(text):
            *numbers, _ = text[at : at + 100].split(b" ", _NUMBERS)
            partition, offset, timestamp, key_size, value_size = map(int, numbers)
            key_at = at + sum(len(number) + 1 for number in numbers)
            value_at = key_at + max(0, key_size)
            headers_at = value_at + max(0, value_size)
            key = None if key_size < 0 else text[key_at:value_at]
            value = None if value_size < 0 else text[value_at:headers_at]
            end = text.index(between, headers_at)
            headers = (("", text[headers_at:end]),) if headers_at < end else ()
            rows.append(Row(partition, key, value, headers, timestamp, topic, offset))
            at = end + len(between)
        sys.stdout.write(record_lines.write(rows))


if __name__ == "__main__":
    asked = record_lines.asked()
    {"produce": produce, "consume": consume}[asked.command](asked.bootstrap, asked.topics)
