"""A message of the Broadcast Queue, as it lies under `bq/<epoch>`: one header line, then the payload as it is.

    id=<32 hex digits> type=<type> ts=<seconds> [expires=<seconds>]

Times are seconds since the epoch of Unix, with six decimals.
"""

import re
import time
import uuid
from typing import NamedTuple

from kmq.cluster.keys import decode_fields, encode_fields
from kmq.errors import ConfigError

MAX_BYTES = 380_000  # with the header, and the state keys that are changed with it: as base64 it fits into a Txn
TYPE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")

SNAPSHOT = "snapshot"  # what stands for the type where a snapshot is shown: no message has it


class Message(NamedTuple):
    """What every subscriber gets. `epoch` is 0 until it is published."""

    type: str
    payload: bytes
    id: str
    ts: float
    expires: float = 0.0  # a command is not carried out later; 0: it never expires
    epoch: int = 0

    @classmethod
    def new(cls, type: str, payload: bytes, lasts_s: float = 0.0) -> "Message":
        """Return a message made now. Raises ConfigError if the type is none."""
        if not TYPE.fullmatch(type):
            raise ConfigError(f"type {type!r}: must match {TYPE.pattern}")
        if type == SNAPSHOT:
            raise ConfigError(f"type {type!r}: is kept for snapshots; choose another name")
        now = round(time.time(), 6)
        return cls(type, payload, uuid.uuid4().hex, now, now + lasts_s if lasts_s else 0.0)

    def encode(self) -> bytes:
        """Return the value of its key."""
        expires = f"{self.expires:.6f}" if self.expires else ""
        return encode_fields(id=self.id, type=self.type, ts=f"{self.ts:.6f}", expires=expires) + b"\n" + self.payload

    @classmethod
    def decode(cls, value: bytes, epoch: int) -> "Message":
        """Return the message of a key. Raises ValueError that names the epoch if it is none."""
        header, newline, payload = value.partition(b"\n")
        fields = decode_fields(header)
        try:
            if not newline:
                raise ValueError("no header line")
            return cls(
                fields["type"], payload, fields["id"], float(fields["ts"]), float(fields.get("expires", 0)), epoch
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"message {epoch} of the Broadcast Queue: {error!r}; KMQ did not write it") from None


def check_size(message: Message, states: dict[str, bytes]) -> None:
    """Raise ConfigError if this message is too long to be published together with these state keys."""
    size, others = len(message.encode()), sum(len(key) + len(value) for key, value in states.items())
    if size + others > MAX_BYTES:
        beside = f" and {others:,} of the states that it changes" if others else ""
        raise ConfigError(
            f"message of type {message.type}: {size:,} bytes with its header{beside}; at most {MAX_BYTES:,}"
        )
