"""A message as JSON, in and out: keys, values and header values are base64, or UTF-8 text with format=text.

Every byte and every null comes back as it was given. What is no UTF-8 is base64 with format=text too; such a message
says so in a field of its own, `encoding`.
"""

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from kmq.gateway.core.broker import bad_field
from kmq.gateway.core.producing import NewMessage
from kmq.gateway.http.schema import SCHEMAS, check
from kmq.message.message import Header, Message

Show = Callable[[bytes | None], str]
_NEW = SCHEMAS["NewMessage"]
_NAMES = frozenset(_NEW["properties"])


# --- out -------------------------------------------------------------------------------------------------------------


def _base64(value: bytes | None) -> str:
    return "null" if value is None else f'"{b2a_base64(value, newline=False).decode()}"'


def _text(value: bytes | None) -> str:
    return "null" if value is None else quoted(value.decode())


class Writer:
    """Writes messages of one partition as JSON objects, each on one line.

    Keys, headers and times come again and again, and making them takes most of the time. Those of one answer are kept.
    """

    def __init__(self, is_text: bool) -> None:
        self._is_text = is_text
        self._keys: dict[bytes, str] = {}  # by routing key
        self._headers: dict[bytes, str] = {}  # by what follows the id in its field
        self._times: dict[bytes, int] = {}  # by the producer's time, where that is one

    def dump(self, message: Message, deliveries: int = 0) -> str:
        """Return one message. `deliveries`: how often it was delivered; 0: it was not given back."""
        more = f',"deliveries":{deliveries}' if deliveries else ""
        if self._is_text:
            try:
                return self._dump(message, _text, more)
            except UnicodeDecodeError:
                return Writer(is_text=False)._dump(message, _base64, f',"encoding":"base64"{more}')
        return self._dump(message, _base64, more)

    def _dump(self, message: Message, show: Show, more: str) -> str:
        _, _, routing_key, time, id, _ = message.fields
        key = self._keys.get(routing_key)
        if key is None:
            key = show(message.key)
            if not message.marks_from > 1:  # else a mark is a mark only from some seq on
                self._keys[routing_key] = key
        tail = id.partition(b";")[2]
        headers = self._headers.get(tail)
        if headers is None:
            headers = self._headers[tail] = _shown(message.headers, show)
        stamp = self._times.get(time)
        if stamp is None:
            stamp = message.timestamp_ms
            if time.replace(b".", b"", 1).isdigit():
                self._times[time] = stamp
        return (
            f'{{"partition":{message.partition},"offset":{message.offset},"key":{key},'
            f'"value":{show(message.value)},"headers":{headers},"timestamp":{stamp}{more}}}'
        )


def _shown(headers: Sequence[Header], show: Show) -> str:
    pairs = (f'{{"name":{quoted(name)},"value":{show(value)}}}' for name, value in headers)
    return f"[{','.join(pairs)}]"


def dump(message: Message, is_text: bool) -> str:
    """Return one message as a JSON object on one line."""
    return Writer(is_text).dump(message)


# --- in --------------------------------------------------------------------------------------------------------------


def load(item: object, is_text: bool, where: str = "", more: Iterable[str] = ()) -> NewMessage:
    """Return the message in a JSON value. `more`: names that the object may have besides. Raises RequestRefused."""
    if item.__class__ is dict and len(item) == 1:
        value = item.get("value", 0)
        if value.__class__ is str:
            read = _read_text if is_text else _read_base64
            return NewMessage(None, read(value, f"{where}.value" if where else "value"))
    if not isinstance(item, dict) or not (item.keys() <= _NAMES and "value" in item):
        item = {name: value for name, value in item.items() if name not in more} if isinstance(item, dict) else item
        check(_NEW, item, where)
    assert isinstance(item, dict)
    path = f"{where}." if where else ""
    for name, value in item.items():
        if name in ("key", "value"):
            if value is not None and not isinstance(value, str):
                raise bad_field(path + name, "must be string or null")
        else:
            check(_NEW["properties"][name], value, path + name)
    return _message(item, is_text and "encoding" not in item, path)


def _message(item: Mapping[str, Any], is_text: bool, path: str) -> NewMessage:
    read = _read_text if is_text else _read_base64
    headers: list[tuple[str, bytes | None]] = []
    for place, header in enumerate(item.get("headers", ())):
        at = f"{path}headers[{place}]."
        headers.append((_utf8(header["name"], f"{at}name"), read(header.get("value"), f"{at}value")))
    timestamp = item.get("timestamp")
    id = item.get("id")
    return NewMessage(
        read(item.get("key"), f"{path}key"),
        read(item["value"], f"{path}value"),
        headers,
        item.get("partition"),
        None if id is None else _utf8(id, f"{path}id"),
        None if timestamp is None else timestamp / 1000,
    )


def _read_base64(value: str | None, where: str) -> bytes | None:
    if value is None:
        return None
    try:
        return a2b_base64(value, strict_mode=bool(value))
    except (Base64Error, ValueError) as err:
        raise bad_field(where, f"must be base64, or add ?format=text for text: {err}") from None


def _read_text(value: str | None, where: str) -> bytes | None:
    return None if value is None else _utf8(value, where).encode()


def _utf8(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad_field(where, "must be text that UTF-8 can write: it holds half a surrogate pair") from None
    return value
