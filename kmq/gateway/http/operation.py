"""What one method of one path is: its parameters, its body, its replies, and a request whose parameters are checked."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from kmq.gateway.http.shapes import Schema, number, text

JSON, NDJSON = "application/json", "application/x-ndjson"
# What any operation may answer.
COMMON = ("bad_field", "unauthorized", "forbidden", "cross_site", "not_ready", "internal", "damaged")


class Parameter(NamedTuple):
    """A query parameter. `default`: None if there is none."""

    name: str
    schema: Schema
    default: Any = None


class Reply(NamedTuple):
    """What a status other than an error means; `schema`: None without a body."""

    help: str
    schema: Schema | None = None
    types: tuple[str, ...] = (JSON,)


class Call(NamedTuple):
    """A request whose parameters are checked."""

    request: web.Request
    path: Mapping[str, Any]
    query: Mapping[str, Any]


class Operation(NamedTuple):
    """One method of one path. `name` is its operationId; `errors` are codes besides COMMON."""

    method: str
    path: str
    name: str
    summary: str
    replies: Mapping[int, Reply]
    query: tuple[Parameter, ...] = ()
    body: Schema | None = None
    body_types: tuple[str, ...] = (JSON,)
    errors: tuple[str, ...] = ()
    is_api: bool = True  # False: served by a module of its own, and only described here

    @property
    def path_names(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)


Handler = Callable[[Call], Awaitable[web.StreamResponse]]

PATH_SCHEMAS: dict[str, Schema] = {
    "topic": text("name of a topic", minLength=1, maxLength=200),
    "partition": number("number of a partition"),
    "group": text("name of a group", minLength=1, maxLength=200),
    "member": text("name of a member", minLength=1, maxLength=200),
    "file": text("name of a file", minLength=1, maxLength=200),
}
