"""54 records of which each has something that some broker, client or line of text has stumbled over."""

from record_lines import Header, Row

NOW = 1_764_279_133_123  # ms
LATEST = 10**15 - 1  # ms, of which a line can say the seconds
EVERY_BYTE = bytes(range(256))
_FOUR_BYTES = "\N{CAT}\N{MUSICAL SYMBOL G CLEF}"
LONG = 782_000  # bytes that fit into a line of the default KMQ_MAX_LINE as base64

_KEYS: dict[str, bytes | None] = {
    "key null": None,
    "key empty": b"",
    "key of 1 byte": b"k",
    "key NUL": b"\0",
    "key 0xff": b"\xff",
    "key binary": EVERY_BYTE,
    "key with dots and @": b"eu.@1.@.north@sea.",
    "key @0": b"@0",
    "key of separators": b"|;%=,: \t\r\n",
    "key percent": b"%2E%zz%",
    "key of 4-byte letters": _FOUR_BYTES.encode(),
    "key of 1,000 bytes": b"0123456789" * 100,
}
_VALUES: dict[str, bytes | None] = {
    "value null": None,
    "value empty": b"",
    "value text": b"plain text",
    "value binary": EVERY_BYTE,
    "value newline": b"\n",
    "value lines": b"one\ntwo\n",
    "value line": "gr\u00fcn|;enc=lf|\r\n".encode(),
    "value line and newline": b"one\n\n",
    "value CR": b"a\r",
    "value tab": b"\ta\t",
    "value NUL": b"\0",
    "value |": b"|",
    "value ;": b";enc=b64|",
    "value %": b"%00%",
    "value .": b".",
    "value of blanks": b"  ",
    "value of 4-byte letters": _FOUR_BYTES.encode(),
    "value invalid UTF-8": b"caf\xe9 \xed\xa0\x80",
    "value with a byte order mark": b"\xef\xbb\xbftext",
    "value escape sequence": b"\x1b[2J\x7f",
    "value base64": b"YWJj",
    "value that is a line": b"1|2.000000|orders.@0.eu|0|7;p=a;enc=b64|YWJj",
    "value of repeated text": b"all work and no play, " * 1000,
}
_HEADERS: dict[str, list[Header]] = {
    "header empty value": [("trace", b"")],
    "header null value": [("trace", None)],
    "header empty name": [("", b"x")],
    "headers duplicated": [("a", b"1"), ("a", b"2"), ("a", b"1")],
    "headers in no order": [("z", b"1"), ("a", b"2"), ("m", b"3")],
    "headers of KMQ's names": [("enc", b"b64"), ("reason", b"r"), ("len", b"1"), ("replays", b"9")],
    "headers of one letter": [("p", b"me"), ("w", b"1"), ("x", b"")],
    "headers of a dead letter": [("origin_topic", b"t"), ("origin_offset", b"0"), ("group", b"g"), ("error", b"e")],
    "header binary": [("raw", EVERY_BYTE)],
    "header value of separators": [("odd", b"a;b=c|d%e,f\r\n")],
    "header name of separators": [("a;b|c%d, e.f=g", b"1")],
    "headers of 4-byte letters": [(_FOUR_BYTES, _FOUR_BYTES.encode())],
    "100 headers": [(f"name-{number}", b"%d" % number) for number in range(100)],
}
_TIMES = {"time now": NOW, "time 1 ms": 1, "time 0": 0, "time latest": LATEST}

_LONG: dict[str, bytes | None] = {
    "long text": b"0123456789abcdef" * (LONG // 16),
    "long binary": (EVERY_BYTE * LONG)[:LONG],
}


def _records() -> dict[str, Row]:
    """Return the records by name. Keys and values are sent to partition 0, headers and times to partition 1."""
    made = {name: Row(0, key, b"of " + name.encode()) for name, key in _KEYS.items()}
    made |= {name: Row(0, b"k", value) for name, value in _VALUES.items()}
    made |= {name: Row(1, b"k", b"of " + name.encode(), tuple(headers)) for name, headers in _HEADERS.items()}
    made |= {name: Row(1, b"k", b"of " + name.encode(), timestamp=timestamp) for name, timestamp in _TIMES.items()}
    return made


SHORT = _records()
LONG_ONES = {name: Row(1, b"k", value) for name, value in _LONG.items()}
