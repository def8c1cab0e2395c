"""A message as JSON, in and out: keys, values and header values are base64, or UTF-8 text with format=text.

Every byte and every null comes back as it was given. What is no UTF-8 is base64 with format=text too; such a message
says so in a field of its own, `encoding`.
"""

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from kmq.client.message import Message
from kmq.gateway.core.producing import NewMessage
from kmq.gateway.core.refused import bad_field
from kmq.gateway.http.schema import SCHEMAS, check

Show = Callable[[bytes | None], str]
_NEW = SCHEMAS["NewMessage"]
_NAMES = frozenset(_NEW["properties"])


# --- out -------------------------------------------------------------------------------------------------------------


def _base64(value: bytes | None) -> str:
    return "null" if value is None else f'"{b2a_base64(value, newline=False).decode()}"'


def _text(value: bytes | None) -> str:
    return "null" if value is None else quoted(value.decode())


def dump(message: Message, is_text: bool) -> str:
    """Return one message as a JSON object on one line."""
    if is_text:
        try:
            return _dump(message, _text, "")
        except UnicodeDecodeError:
            return _dump(message, _base64, ',"encoding":"base64"')
    return _dump(message, _base64, "")


def _dump(message: Message, show: Show, more: str) -> str:
    headers = message.headers
    shown = "[]"
    if headers:
        pairs = (f'{{"name":{quoted(name)},"value":{show(value)}}}' for name, value in headers)
        shown = f"[{','.join(pairs)}]"
    return (
        f'{{"partition":{message.partition},"offset":{message.offset},"key":{show(message.key)},'
        f'"value":{show(message.value)},"headers":{shown},"timestamp":{message.timestamp_ms}{more}}}'
    )


# --- in --------------------------------------------------------------------------------------------------------------


def load(item: object, is_text: bool, where: str = "", more: Iterable[str] = ()) -> NewMessage:
    """Return the message in a JSON value. `more`: names that the object may have besides. Raises RequestRefused."""
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
