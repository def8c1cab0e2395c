"""The OpenAPI 3.1 document, made from the declarations in operations.py and schema.py, and the same as a page.

The page needs no script and nothing from another host.
"""

import json
from base64 import b64encode
from hashlib import sha256
from html import escape
from typing import Any

from aiohttp import web

import kmq
from kmq.gateway.http.operations import CONSOLE, GROUPS, OPERATIONS
from kmq.gateway.http.request import BYTES, COMMON, NDJSON, PATH_SCHEMAS, Operation, Parameter, Reply, Schema
from kmq.gateway.http.schema import SCHEMAS
from kmq.wire import refusals

_NDJSON_SCHEMA = {"type": "string", "description": "one JSON object a line"}
_BYTES_SCHEMA = {"type": "string", "description": "bytes or text as they are"}


def document() -> dict[str, Any]:
    """Return the document as a value for JSON."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "KMQ",
            "version": kmq.__version__,
            "description": "Topics and messages of one KMQ broker. docs/http.md has examples.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    parameters = [_parameter("path", Parameter(name, PATH_SCHEMAS[name])) for name in operation.path_names]
    parameters += [_parameter("query", parameter) for parameter in operation.query]
    shown: dict[str, Any] = {"operationId": operation.name, "summary": operation.summary, "tags": [tag_of(operation)]}
    if parameters:
        shown["parameters"] = parameters
    if operation.body is not None:
        content = {kind: _content(kind, operation.body) for kind in operation.body_types}
        shown["requestBody"] = {"required": True, "content": content}
    return shown | {"responses": _responses(operation)}


def tag_of(operation: Operation) -> str:
    """Return the group in which an operation is shown."""
    if operation.path.startswith("/api/admin"):
        return "topics"
    if operation in GROUPS:
        return "groups"
    if operation in CONSOLE:
        return "console"
    if operation.path.startswith("/api"):
        return "messages"
    return "files" if operation.path.startswith("/v1") else "pages"


def _parameter(place: str, parameter: Parameter) -> dict[str, Any]:
    schema = dict(parameter.schema)
    if parameter.default is not None:
        schema["default"] = parameter.default
    return {"name": parameter.name, "in": place, "required": place == "path", "schema": schema}


def _content(kind: str, schema: Schema) -> dict[str, Any]:
    return {"schema": _NDJSON_SCHEMA if kind == NDJSON else _BYTES_SCHEMA if kind in BYTES else schema}


def _reply(reply: Reply) -> dict[str, Any]:
    shown: dict[str, Any] = {"description": reply.help or "as described"}
    if reply.schema is not None:
        shown["content"] = {kind: _content(kind, reply.schema) for kind in reply.types}
    return shown


def codes_of(operation: Operation) -> dict[int, list[str]]:
    """Return the codes of the errors that an operation may answer, by status."""
    found: dict[int, list[str]] = {}
    for code in dict.fromkeys((*operation.errors, *COMMON)):
        found.setdefault(refusals.by_code(code).http, []).append(code)
    return found


def _responses(operation: Operation) -> dict[str, Any]:
    responses = {str(status): _reply(reply) for status, reply in operation.replies.items()}
    for status, codes in sorted(codes_of(operation).items()):
        text = "; ".join(f"{code}: {refusals.by_code(code).text}" for code in codes)
        responses.setdefault(
            str(status),
            {
                "description": text,
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        )
    return responses


# --- the page --------------------------------------------------------------------------------------------------------

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code,pre{font:13px/1.4 ui-monospace,monospace}pre{background:#f4f4f4;padding:.6em;overflow:auto}"
    "td,th{text-align:left;vertical-align:top;padding:.1em 1em .1em 0}summary{cursor:pointer}"
    "summary b{display:inline-block;width:4.5em}details{border-top:1px solid #ddd;padding:.4em 0}"
)
_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def page() -> str:
    """Return the document as HTML."""
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>KMQ HTTP API</title><style>{_STYLE}</style>',
        '<h1>KMQ HTTP API</h1><p>The same for programs: <a href="/openapi.json">/openapi.json</a>.</p>',
    ]
    for tag in dict.fromkeys(tag_of(operation) for operation in OPERATIONS):
        parts.append(f"<h2>{tag}</h2>")
        parts += [_section(operation) for operation in OPERATIONS if tag_of(operation) == tag]
    parts.append("<h2>schemas</h2>")
    parts += [
        f'<details id="{name}"><summary>{name}</summary><pre>{escape(json.dumps(schema, indent=2))}</pre></details>'
        for name, schema in SCHEMAS.items()
    ]
    return "".join([*parts, "</html>\n"])


def _section(operation: Operation) -> str:
    rows = [_row(name, "path", schema) for name, schema in PATH_SCHEMAS.items() if name in operation.path_names]
    rows += [_row(parameter.name, "query", parameter.schema) for parameter in operation.query]
    if operation.body is not None:
        rows.append(f"<tr><td>body<td>{escape(', '.join(operation.body_types))}<td>{_schema(operation.body)}")
    for status, reply in operation.replies.items():
        rows.append(f"<tr><td>{status}<td>{escape(reply.help)}<td>{_schema(reply.schema or {})}")
    for status, codes in sorted(codes_of(operation).items()):
        rows.append(f"<tr><td>{status}<td colspan=2>{', '.join(f'<code>{code}</code>' for code in codes)}")
    return (
        f"<details><summary><b>{operation.method}</b><code>{escape(operation.path)}</code> "
        f"{escape(operation.summary)}</summary><table>{''.join(rows)}</table></details>"
    )


def _row(name: str, place: str, schema: Schema) -> str:
    return f"<tr><td><code>{name}</code><td>{place}<td>{escape(schema.get('description', ''))}"


def _schema(schema: Schema) -> str:
    names = [part["$ref"].rpartition("/")[2] for part in (schema, *schema.get("anyOf", ())) if "$ref" in part]
    return " or ".join(f'<a href="#{name}">{name}</a>' for name in names)


def add_to(app: web.Application) -> None:
    """Register the document and the page. Both are made once."""
    made, shown = json.dumps(document()), page()

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(text=made, content_type="application/json")

    async def docs(request: web.Request) -> web.Response:
        return web.Response(text=shown, content_type="text/html", headers={"Content-Security-Policy": _POLICY})

    app.add_routes([web.get("/openapi.json", openapi), web.get("/docs", docs)])
