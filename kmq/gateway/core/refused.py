"""How the gateway refuses a request: with a code. Each door looks up the status of the code in kmq/refusals.py."""

from kmq import refusals
from kmq.errors import KmqError
from kmq.refusals import Refusal


class RequestRefused(KmqError):
    """A request is refused. `code` is a code of kmq/refusals.py, or an unknown code from a newer broker."""

    def __init__(self, code: str, text: str = "") -> None:
        self.code = code
        super().__init__(text or refusals.find(code).text)

    @property
    def refusal(self) -> Refusal:
        return refusals.find(self.code)
