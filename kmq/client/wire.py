"""The lines of the acknowledged protocol besides messages, as a client writes and reads them.

    !hello acks=1 [producer=<name> | window=<scope>] [last=?] [reserved=1] [token=<token>]      first line
    !ok max_line=<bytes>       or  !err 0 <code> <text>                            its reply
    !last <id>                                                                     after !ok, if last=? was asked
    !ack <n> <seq>   !dup <n> <seq>   !err <n> <code> <text>                       replies to messages, n counted from 1

kmq/ingress/hello.py reads the first line, kmq/framing/parser.py makes the last.
"""

from kmq.client.failures import Refused
from kmq.client.ids import Ids
from kmq.message.text import request_line


def format_hello(ids: Ids, window: str, token: str, reserved: bool = False) -> bytes:
    """Return the first line of a connection. `reserved`: it writes to topics of KMQ itself."""
    who = f"producer={ids.name}" if ids.name else ""
    scope = f"window={window}" if window else ""
    options = "last=?" * ids.asks_last, "reserved=1" * reserved, f"token={token}" if token else ""
    return request_line("!hello", "acks=1", who, scope, *options)


class Greeting:
    """The reply to hello. `refusal` is why the broker refused the connection; None: it accepted."""

    __slots__ = ("_more", "max_line", "refusal")

    def __init__(self, data: bytes) -> None:
        """Raises Refused if this is no reply of a KMQ broker."""
        line, _, self._more = data.partition(b"\n")
        verb, _, rest = line.decode(errors="replace").strip().partition(" ")
        if verb not in ("!ok", "!err"):
            raise Refused(f"not_kmq it answers {line[:100]!r} to !hello")
        self.refusal = Refused(rest.removeprefix("0 ")) if verb == "!err" else None
        name, _, value = rest.partition("=")
        self.max_line = int(value) if verb == "!ok" and name == "max_line" and value.isdecimal() else None

    @staticmethod
    def is_whole(data: bytes, asks_last: bool) -> bool:
        """Return True if `data` is all of the reply; `asks_last`: a line `!last` follows `!ok`."""
        return data.endswith(b"\n") and (not asks_last or not data.startswith(b"!ok") or data.count(b"\n") > 1)

    def read_last(self, name: str) -> int:
        """Return the last id that the broker knows of producer `name`; 0 if it knows none."""
        verb, _, id = self._more.strip().partition(b" ")
        if verb != b"!last" or not id.isdigit():
            raise Refused(f"protocol the broker says {self._more[:100]!r} where the last id of {name} was asked for")
        return int(id)


class Replies:
    """The replies on one connection."""

    __slots__ = ("_unfinished", "answered", "refusing")

    def __init__(self) -> None:
        self.answered = 0  # messages on this connection
        self.refusing = ""  # why all further messages of this connection are refused; "": they are not
        self._unfinished = b""

    def split(self, data: bytes) -> list[bytes]:
        """Return the whole lines received so far; an unfinished line is kept for the next call."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return lines

    def count_to(self, number: int) -> int:
        """Return how many messages a reply to the `number`th answers. Raises ValueError if all of them had replies."""
        count = number - self.answered
        if count < 1:
            raise ValueError(number)
        self.answered = number
        return count


__all__ = ["Greeting", "Replies", "format_hello"]
