"""The first line of a connection that speaks the acknowledged protocol.

    !hello acks=0|1|all [producer=<name> | window=<scope>] [token=<token>]

`producer`: ids are decimal and increasing over all connections of that name. `window` (ours, beyond the design): ids are
arbitrary and remembered for a while; what the gateway uses for gRPC's message_id. Neither: acknowledged, stored as often as sent.
"""

import re

MAX_BYTES = 4096  # of the line
_NAME = re.compile(rb"[A-Za-z0-9_.:-]{1,64}")
_FIELDS = (b"acks", b"producer", b"window", b"token")
_USAGE = "expected: !hello acks=0|1|all [producer=<name> | window=<scope>] [token=<token>]"


class Refused(Exception):
    """A hello that is not taken; its text is a code and the reason."""


class Hello:
    """What a producer asked for."""

    __slots__ = ("acks", "producer", "tag", "token")

    def __init__(self, acks: bool, producer: bytes, window: bytes, token: bytes) -> None:
        self.acks, self.producer, self.token = acks, producer, token
        self.tag = b"p=" + producer if producer else b"w=" + window if window else b""


def parse(line: bytes) -> Hello:
    """The hello in `line` (without newline). Raises Refused naming the field and what it may be."""
    verb, *words = line.rstrip(b"\r").split()
    if verb != b"!hello":
        raise Refused(f"bad_hello {_USAGE}")
    fields: dict[bytes, bytes] = {}
    for word in words:
        name, equals, value = word.partition(b"=")
        if not equals or name not in _FIELDS or name in fields:
            raise Refused(f"bad_hello {word[:64].decode(errors='replace')!r}: {_USAGE}")
        fields[name] = value
    acks = fields.get(b"acks", b"")
    if acks not in (b"0", b"1", b"all"):
        raise Refused("bad_hello acks= must be 0, 1 or all")
    for name in (b"producer", b"window"):
        if name in fields and not _NAME.fullmatch(fields[name]):
            raise Refused(f"bad_hello {name.decode()}= must be 1 to 64 of A-Z a-z 0-9 _ . : -")
    if b"producer" in fields and b"window" in fields:
        raise Refused("bad_hello producer= and window= exclude each other")
    return Hello(acks != b"0", fields.get(b"producer", b""), fields.get(b"window", b""), fields.get(b"token", b""))
