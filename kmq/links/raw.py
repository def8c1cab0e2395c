"""The text of the FIFO `raw`: what its lines are besides messages, with encoder and decoder side by side.

    <message>                          sent by nobody who waits for a reply
    !c <connection> <n> <k> l=<bytes> [p=<producer>|w=<scope>]
                                       header of a group: the k lines behind it are messages n… of an acknowledged
                                       connection
    !e <code>                          in a group, in the place of a message that ingress has refused itself
    +<bytes> … -<bytes>                a line too long for one write, in fragments; each fragment is a line of its own
    !l <connection> p=<producer>       asks for the last id stored of a producer
    !b <boot>                          a new ingress has started: long lines that are unfinished will never be finished

Invariant   A group is written at once, so it is at most PIPE_BUF bytes and lies in one piece. It is never cut: its
            header says whom to reply to. `l=` saves the reader looking for the group's end.
            A long message of a group has its fragments before the header, all but the last.
"""

import re

from kmq.ids import NAME_PATTERN
from kmq.settings import PIPE_BUF

MAX_GROUP = 128  # messages in a group: with their numbers, names and replies they fit a block of the smallest ring
GROUP, REFUSED, STARTED = b"!c ", b"!e ", b"!b "
_CONNECTION, _NAME = rb"\d{1,20}\.\d{1,20}", NAME_PATTERN.encode()
# connection, n, k, bytes, `p` or `w`, producer or scope
HEADER = re.compile(rb"!c (%b) (\d{1,18}) (\d{1,3})(?: l=(\d{1,4}))?(?: ([pw])=(%b))?\n" % (_CONNECTION, _NAME))
LAST_ID = re.compile(rb"!l (%b) p=(%b)" % (_CONNECTION, _NAME))  # connection, producer
_FRAGMENT = PIPE_BUF - 2  # bytes of a long line in one write, beside the mark and the newline


class Sender:
    """Whom a group of messages comes from: the name that replies carry, and how many messages it has passed on."""

    __slots__ = ("name", "sent", "tag")

    def __init__(self, name: bytes, tag: bytes = b"") -> None:
        self.name = name
        self.tag = b" " + tag if tag else b""  # ` p=<producer>` or ` w=<scope>`
        self.sent = 0  # messages written to the FIFO, and so the n of the last message

    def header(self, count: int, nbytes: int) -> bytes:
        return b"!c %b %d %d l=%d%b\n" % (self.name, self.sent + 1, count, nbytes, self.tag)

    def question(self) -> bytes:
        """Return the line that asks the framer for the last id of this producer."""
        return b"!l %b%b\n" % (self.name, self.tag)

    @property
    def header_room(self) -> int:
        """Bytes that the longest header takes."""
        return len(self.name) + len(self.tag) + 40


def fragments(line: bytes, header_room: int = 0) -> bytes:
    """Return `line` (without newline), too long for one write, as the lines that carry it through the FIFO.

    The last fragment leaves `header_room` bytes of its write for the header of a group.
    """
    tail = min(len(line) % _FRAGMENT or _FRAGMENT, _FRAGMENT - header_room)
    cuts = [line[at : min(at + _FRAGMENT, len(line) - tail)] for at in range(0, len(line) - tail, _FRAGMENT)]
    return b"".join(b"+%b\n" % cut for cut in cuts) + b"-%b\n" % line[len(line) - tail :]


def reassemble(text: bytes) -> bytes:
    """Return whole lines with the fragments of each long line side by side; the same object if they already are.

    Whole lines keep their order. A long line stands where its last fragment stood, before the group header of that
    fragment. A long line without a last fragment goes to the end, so that the caller can carry it on.
    """
    if b"+" not in text or (b"\n+" not in text and text[:1] != b"+"):  # looking for one byte is ten times faster
        return text
    is_mixed = False
    out: list[bytes] = []
    held: list[bytes] = []
    lines = text.split(b"\n")[:-1]
    for at, line in enumerate(lines):
        mark = line[:1]
        if mark == b"+":
            held.append(line)
        elif mark == b"-" and held:
            out += held
            out.append(line)
            held = []
        elif line.startswith(STARTED) and held:
            held, is_mixed = [], True
        elif line.startswith(GROUP) and held and (at + 1 == len(lines) or lines[at + 1].startswith(b"-")):
            out += held  # the last fragment follows the header, or has not been read yet
            out.append(line)
            held = []
        else:
            is_mixed = is_mixed or bool(held)
            out.append(line)
    if not is_mixed:
        return text
    out += held
    return b"\n".join(out) + b"\n" if out else b""


def whole(text: bytes) -> int:
    """Return how many bytes from the start are whole lines, and groups that are there to their last line."""
    end = text.rfind(b"\n") + 1
    at = text.rfind(b"\n" + GROUP, 0, end) + 1
    header = HEADER.match(text, at)
    if header is None:
        return end
    count, nbytes = int(header[3]), int(header[4] or 0)
    is_there = header.end() + nbytes <= end if nbytes else text.count(b"\n", header.end()) >= count
    return end if is_there else at
