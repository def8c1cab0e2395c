"""A client of the HTTP API that believes the OpenAPI document: every answer must be one that the document names."""

import json
import re
from functools import cache
from http.client import HTTPConnection, HTTPMessage
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator

from kmq.gateway.http import openapi

PATIENCE_S = 60.0
NDJSON = "application/x-ndjson"


class Answer(NamedTuple):
    """`value`: the JSON value, a list of them for NDJSON, the text for anything else."""

    status: int
    value: Any
    headers: HTTPMessage

    @property
    def refusal(self) -> tuple[int, str, str]:
        """(status, code, field) of an error."""
        return self.status, self.value["code"], self.value.get("field", "")


@cache
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(openapi.document()))
    return found


@cache
def _paths() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    return [(re.compile(re.sub(r"{\w+}", "[^/]+", path)), methods) for path, methods in document()["paths"].items()]


def operation(method: str, target: str) -> dict[str, Any] | None:
    """The operation that the document has for a request; None if it has none."""
    path = urlsplit(target).path
    found = next((methods for pattern, methods in _paths() if pattern.fullmatch(path)), {})
    shown: dict[str, Any] | None = found.get(method.lower())
    return shown


@cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema) | {"components": document()["components"]})


def check(method: str, target: str, status: int, kind: str, text: str) -> Any:
    """Return the value of an answer. Fails unless the document has it."""
    shown = operation(method, target)
    if shown is None:
        assert status in (401, 404, 405), f"{method} {target}: {status}, and the document does not have it"
        return json.loads(text)
    assert str(status) in shown["responses"], f"{method} {target}: {status} is not in the document: {text[:500]}"
    content = shown["responses"][str(status)].get("content")
    if content is None:
        return text
    assert kind in content, f"{method} {target}: {status} as {kind}; the document has {[*content]}"
    if kind == NDJSON:
        return [json.loads(line) for line in text.splitlines()]
    value = json.loads(text) if kind == "application/json" else text
    _validator(json.dumps(content[kind]["schema"])).validate(value)
    return value


class Api:
    """One connection to a gateway, kept open."""

    def __init__(self, port: int, token: str = "") -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._token = token

    def close(self) -> None:
        self._connection.close()

    def call(self, method: str, target: str, body: Any = None, **headers: str) -> Answer:
        """`body`: bytes as they are, anything else as JSON. Header names have _ for -."""
        shown = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._token:
            shown["Authorization"] = f"Bearer {self._token}"
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request(method, target, sent, shown)
        response = self._connection.getresponse()
        text, kind = response.read().decode(), response.headers.get_content_type()
        return Answer(response.status, check(method, target, response.status, kind, text), response.headers)

    def get(self, target: str, **headers: str) -> Answer:
        return self.call("GET", target, **headers)

    def post(self, target: str, body: Any, **headers: str) -> Answer:
        return self.call("POST", target, body, **headers)

    def lines(self, target: str, values: list[Any]) -> Answer:
        """POST a message a line."""
        body = "".join(json.dumps(value) + "\n" for value in values).encode()
        return self.call("POST", target, body, Content_Type=NDJSON)
