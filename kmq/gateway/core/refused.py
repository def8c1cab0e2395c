"""How the gateway refuses a request: with a code. Each door looks up the status of the code in kmq/refusals.py."""

from kmq import refusals
from kmq.errors import KmqError
from kmq.refusals import Refusal


class RequestRefused(KmqError):
    """A request is refused. `code` is a code of kmq/refusals.py, or an unknown code from a newer broker.

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
