"""Which id the next message gets: the number after the last one, the user's own, or none."""

from secrets import token_hex

from kmq.client.options import Options
from kmq.message.ids import MADE_UP, MAX_ID_DIGITS
from kmq.message.text import Headers, format_headers, make_id, wrong_type


class Ids:
    """The ids of one producer or window.

    Provisional   A producer with a name chosen by the user may queue messages before its first connection has told the
                  last id that the broker knows. These ids count from 1, and are raised by that last id on connecting.
                  Once the user gives an id, ids continue after it and are final.
    """

    def __init__(self, options: Options) -> None:
        self.name = options.producer
        self.prefix = ""  # of the generated ids of a window
        self.are_made = False  # all ids are generated, according to the options
        self.asks_last = self.is_provisional = bool(options.producer) and options.first_id is None
        self._next = 0
        self._provisional = 0  # number of provisional ids, once is_provisional is False
        if options.window:
            self.prefix = token_hex(8)
        elif options.dedupe:
            self.are_made = options.first_id is None
            self._next = 1 if options.first_id is None else options.first_id
            self.name = self.name or f"{MADE_UP}{token_hex(12)}"  # the broker forgets generated names first

    @property
    def last(self) -> int:
        """Return the id before the next one that is made."""
        return self._next - 1

    def make(self) -> bytes:
        """Return the next id; b"" if messages have none."""
        number = self._next
        if self.name:
            self._next = number + 1
            return b"%d" % number
        if not self.prefix:
            return b""
        self._next = number + 1
        return f"{self.prefix}-{number}".encode()

    @property
    def next_number(self) -> int | None:
        """Return the number that a producer's next message gets; None if messages have no numbers."""
        return self._next if self.name else None

    def skip(self, count: int) -> None:
        """Continue after `count` more numbers, which were given to messages."""
        self._next += count

    def make_field(self, id: str | int | None, headers: Headers | None) -> bytes:
        """Return the id field with its headers, for the user's `id` or a generated id."""
        if id is None:
            return self.make() + format_headers(headers or ())
        if isinstance(id, bool) or not isinstance(id, str | int):
            raise wrong_type("id", id, "str or int")
        if self.name:
            text = str(id)
            if not text.isdecimal() or not text.isascii() or len(text) > MAX_ID_DIGITS:
                raise ValueError(
                    f"id {id!r}: a producer's id must be a number of at most {MAX_ID_DIGITS} digits, above the last one"
                )
            if self.is_provisional:
                self.is_provisional, self._provisional = False, self.last
            self._next = max(self._next, int(id) + 1)
        return make_id(str(id), headers or ())

    def resume(self, last: int) -> None:
        """Continue after the broker's `last` id plus the provisional ids, which are raised by `last`."""
        made = self.last if self.is_provisional else self._provisional
        self._next = max(self._next, last + made + 1)
        self.asks_last = self.is_provisional = False


__all__ = ["Ids"]
