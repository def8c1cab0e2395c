"""From the text of the FIFO to the lines of a block.

A batch is the lines as they will be stored (without seq and time), and for each how far into the text it reaches, so that
a block can be committed together with exactly the bytes it came from. Well-formed lines go through in one piece (`plain`);
only text with something else in it is looked at line by line (`untangle`, `parse`).

A long line arrives as pieces, `+…` and at last `-…`. Lines of other writers may lie between the pieces; `untangle` moves
them in front, so that what is unfinished is always the end of the text and can be carried on as it is.
"""

from kmq import record

# A long line from ingress is at most this much over max_line: it may be a dead.malformed with its header.
_OVER = record.MALFORMED_OVERHEAD


class Batch:
    """Lines ready to be numbered. `ends` is None where each line took its own length and a newline."""

    __slots__ = ("ends", "key", "lines", "used")

    def __init__(self, lines: list[bytes], ends: list[int] | None, used: int, key: bytes) -> None:
        self.lines, self.ends = lines, ends
        self.used = used  # bytes of the text that are done when all lines are framed
        self.key = key  # the routing key that all lines share, or b""


def plain(text: bytes) -> Batch | None:
    """The batch of a text that is well-formed lines and nothing else, or None: the way nearly everything goes."""
    if record.good_prefix(text) != len(text):
        return None
    lines = text.split(b"\n")
    lines.pop()
    return Batch(lines, None, len(text), record.common_key(lines))


def parse(text: bytes, max_line: int) -> Batch:
    """The batch of any whole lines, untangled: control lines are obeyed, what is no message is wrapped."""
    lines: list[bytes] = []
    ends: list[int] = []
    pieces: list[bytes] = []
    held = 0  # bytes in `pieces`
    at = used = 0
    for raw in text.split(b"\n")[:-1]:
        at += len(raw) + 1
        mark = raw[:1]
        if mark == b"+":
            pieces.append(raw[1:])
            held += len(raw) - 1
            if held <= max_line + _OVER:
                continue
            raw = b"".join(pieces)  # ingress never lets a line grow so long: whoever writes this gets it in parts
            line = record.malformed("too_long", raw, held, max_line)
        elif mark == b"-" and pieces:
            pieces.append(raw[1:])
            line = record.admit(b"".join(pieces), max_line)
        elif raw.startswith(b"!b "):
            pieces, held, used = [], 0, at  # ingress started anew: an unfinished long line will not be finished
            continue
        else:
            line = record.admit(raw, max_line)
        pieces, held, used = [], 0, at
        lines.append(line)
        ends.append(at)
    return Batch(lines, ends, used, b"")


def untangle(text: bytes) -> bytes:
    """`text` with the pieces of each long line side by side; the same object where they are already.

    Whole lines keep their order. A long line stands where its last piece stood; one without a last piece goes to
    the end, so that the caller can carry it on.
    """
    if b"\n+" not in text and text[:1] != b"+":
        return text
    tangled = False
    out: list[bytes] = []
    pieces: list[bytes] = []
    for raw in text.split(b"\n")[:-1]:
        mark = raw[:1]
        if mark == b"+":
            pieces.append(raw)
        elif mark == b"-" and pieces:
            out += pieces
            out.append(raw)
            pieces = []
        elif raw.startswith(b"!b ") and pieces:
            pieces, tangled = [], True
        else:
            tangled = tangled or bool(pieces)
            out.append(raw)
    if not tangled:
        return text
    out += pieces
    return b"\n".join(out) + b"\n" if out else b""
