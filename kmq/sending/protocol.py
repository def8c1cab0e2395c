"""The lines of the acknowledged protocol besides messages, as a sender writes and reads them.

    !hello acks=1 [producer=<name> [attempt=<run>.<number>] | window=<scope>] [last=?] [reserved=1] [epoch=<n>]
           [token=<token>]
    !ok max_line=<bytes>       or  !err 0 <code> <text>                            the reply to this first line
    !last <id>                                                                     after !ok, if last=? was asked
    !ack <n> <seq>   !dup <n> <seq>   !err <n> <code> <text>                       replies to messages, n counted from 1

kmq/ingress/hello.py reads the first line, kmq/framing/parser.py makes the last.
"""

from kmq.config.values import KIB
from kmq.message.text import request_line
from kmq.sending.failures import Refused

MOST_REPLY = 64 * KIB  # longest line of a broker, in bytes
OK, ERR = "!ok", "!err"


def format_hello(*words: str, epoch: int | None = None, token: str = "", acks: int = 1) -> bytes:
    """Return the first line of a connection; an empty word is left out."""
    own = "" if epoch is None else f"epoch={epoch}", f"token={token}" if token else ""
    return request_line("!hello", f"acks={acks}", *words, *own)


def read_greeting(line: bytes) -> tuple[str, str]:
    """Return the verb of the reply to hello, and its other words: OK with options, or ERR with `<code> <text>`.

    The verb is empty for any other line, which is then returned whole.
    """
    text = line.decode(errors="replace").strip()
    verb, _, rest = text.partition(" ")
    return (verb, rest.removeprefix("0 ")) if verb in (OK, ERR) else ("", text)


def read_last(line: bytes, name: str) -> int:
    """Return the last id that the broker knows of producer `name`; 0 if it knows none. Raises Refused."""
    verb, _, id = line.strip().partition(b" ")
    if verb != b"!last" or not id.isdigit():
        raise Refused(f"protocol the broker says {line[:100]!r} where the last id of {name} was asked for")
    return int(id)


def check_unfinished(line: bytes) -> None:
    """Raise Refused if this part of a line is longer than any line of a broker."""
    if len(line) > MOST_REPLY:
        raise Refused(f"protocol the broker sent {len(line):,} bytes without a newline, beginning with {line[:20]!r}")


class Replies:
    """The replies on one connection."""

    __slots__ = ("_unfinished", "answered", "refusing")

    def __init__(self) -> None:
        self.answered = 0  # messages on this connection
        self.refusing = ""  # why all further messages of this connection are refused; "": they are not
        self._unfinished = b""

    def split(self, data: bytes) -> list[bytes]:
        """Return the whole lines received so far; an unfinished line is kept for the next call. Raises Refused."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        check_unfinished(self._unfinished)
        return lines

    def parse(self, line: bytes) -> tuple[bytes, int, bytes]:
        """Return the verb of a reply, how many messages it answers, and its last words: the seq, or code and text.

        Raises ValueError for any other line, and if all of the messages had replies.
        """
        verb, number, text = line.split(b" ", 2)
        count = int(number) - self.answered
        if count < 1:
            raise ValueError(number)
        self.answered += count
        return verb, count, text
