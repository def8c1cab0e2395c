"""Short words for JSON schemas: what schema.py and console_schema.py are written in."""

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
MOST_OFFSET = (1 << 63) - 1
REF = "#/components/schemas/"


def ref(name: str) -> Schema:
    return {"$ref": REF + name}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def record(required: Sequence[str] = (), /, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has these properties and no others."""
    shape: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return shape | ({"required": [*required]} if required else {})


def text(help: str, **more: Any) -> Schema:
    return {"type": "string", "description": help, **more}


def number(help: str, least: int = 0, most: int = MOST_OFFSET, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "description": help, **more}


def or_null(schema: Schema) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}
