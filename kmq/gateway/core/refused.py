"""How the gateway refuses a request: with a code. Each door looks up the status of the code in kmq/wire/refusals.py."""

from kmq.client.failures import NotAnswered, Refused
from kmq.errors import KmqError
from kmq.wire import refusals
from kmq.wire.refusals import Refusal

_MEANING = {"too_long": "with its id, and as base64 unless it is printable text, the record is over KMQ_MAX_LINE bytes"}


class RequestRefused(KmqError):
    """A request is refused. `code` is a code of kmq/wire/refusals.py, or an unknown code from a newer broker.

    `fields`: what a program may want to know besides: `field` (which field is wrong), `seq`, `first` and `end`.
    """

    def __init__(self, code: str, text: str = "", **fields: str | int) -> None:
        self.code, self.fields = code, fields
        super().__init__(text or refusals.find(code).text)

    @property
    def refusal(self) -> Refusal:
        return refusals.find(self.code)


def bad_field(field: str, what: str) -> RequestRefused:
    """Return the refusal of one field: `what` says what is wrong and what it must be."""
    return RequestRefused("bad_field", f"{field}: {what}", field=field)


def refusal_of(err: KmqError) -> RequestRefused:
    """Return the refusal for a message that a producer of the gateway has given up."""
    if isinstance(err, Refused):
        return RequestRefused(err.code, err.reason.partition(" ")[2] or _MEANING.get(err.code, ""))
    return RequestRefused("not_answered" if isinstance(err, NotAnswered) else "stopping", str(err))
