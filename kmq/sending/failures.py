"""Why a message was not stored, as a producer raises it: the broker refused it, or did not reply in time."""

from kmq.errors import KmqError, RetryError
from kmq.wire import refusals

ANSWER_S = 30.0  # longest time for a reply; a connection that takes longer is replaced
# The same for a client with several addresses: a broker that hangs, or is cut off, keeps its connections and does not
# answer, while another broker leads its shard. Longer than the pause after the loss of a follower (KMQ_REPLICA_LAG).
ELSEWHERE_S = 6.0


class Refused(KmqError):
    """The broker refused a message or the connection, and stored nothing. `code` is the first word of `reason`."""

    def __init__(self, reason: str, line: bytes = b"") -> None:
        self.code, _, said = reason.partition(" ")
        self.reason, self.line = reason, line
        row = refusals.find(self.code)
        text = f"refused by the broker: {reason}"
        if not said and row.code == self.code:
            text += f": {row.text}"
        if line:  # logs show its topic and length, but none of its content
            topic = line.partition(b"|")[0].partition(b".")[0][:200].decode(errors="replace") if b"|" in line else ""
            text += f" (a message of {len(line):,} bytes{f' for topic {topic!r}' * bool(topic)})"
        super().__init__(text)


class Fenced(Refused):
    """A newer producer of the same name has connected, so this producer has ended."""


class NotAnswered(RetryError, TimeoutError):
    """No reply came in time: the message may or may not be stored. It is safe to send it again with the same id."""


_ADVICE = {
    "id_reused": "id {id} was stored before, as seq {rest}, with other content, so this is no retry;"
    " give this message an id above the last one",
    "id_too_old": "id {id} is below the last one stored, and not known as stored itself, because a producer's ids must"
    " rise; give this message an id above the last one, unless it is a late retry",
}


def refused_message(reason: str, line: bytes) -> Refused:
    """Return the error for the message in `line`. If its id was refused, the error names the id and what to do."""
    code, _, rest = reason.partition(" ")
    if code in _ADVICE:
        id = line.split(b"|", 3)[2].partition(b";")[0].decode(errors="replace") if line.count(b"|") > 1 else ""
        reason = f"{code} {_ADVICE[code].format(id=id, rest=rest)}"
    return Refused(reason, line)


__all__ = ["Fenced", "NotAnswered", "Refused", "refused_message"]
