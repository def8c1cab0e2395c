"""How many `!err` replies ingress has sent or passed on, by class, in its row of the stats page."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kmq.broker.stats import Row

_AUTH = (b"unauthorized",)
_LIMIT = (b"disk_full", b"quota", b"connections", b"producers_full", b"too_many_topics", b"busy")
_ORDER = (b"fenced", b"id_reused", b"id_too_old", b"drop_oldest", b"stopping")


class Errs:
    """The counts of one process. Without a row, nothing is counted."""

    def __init__(self, row: "Row | None" = None) -> None:
        self._row = row

    def count(self, refusal: bytes, n: int = 1) -> None:
        """Count `n` messages or connections that were refused. `refusal`: the code, perhaps with its text."""
        row, code = self._row, refusal.partition(b" ")[0]
        if row is None:
            return
        if code in _AUTH:
            row.errs_auth += n
        elif code in _LIMIT:
            row.errs_limit += n
        elif code in _ORDER:
            row.errs_order += n
        else:
            row.errs_format += n

    def count_reply(self, reply: bytes) -> None:
        """Count a reply of the framer: `!err <n> <code> <text>`."""
        self.count(reply.split(b" ", 2)[-1])
