"""Describes columns of rows and of tables by SQL types, and compares them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kmq.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_NAMES = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "halffloat": "float",
    "large_string": "string",
    "string_view": "string",
    "large_binary": "binary",
    "binary_view": "binary",
    "date32[day]": "date",
}


def arrow_schema(rows: "DataFrame") -> "pa.Schema":
    """Return the Arrow schema of the rows, with every column nullable.

    Spark infers for some columns that they are never null. A table's schema must not depend on that.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    schema = StructType()
    for field in rows.schema:
        schema.add(field.name, field.dataType, nullable=True)
    return to_arrow_schema(schema, timezone="UTC")


def described(schema: "pa.Schema", widened: bool = False) -> dict[str, str]:
    """Return column name → SQL type. `widened`: for a format without integers below 32 bits."""
    return {field.name: _sql(field.type, widened) for field in schema}


def compare(to: str, table: Mapping[str, str], rows: Mapping[str, str]) -> None:
    """Raise ConfigError, naming the columns, if a table and the rows differ in columns. Their order does not matter."""
    found = [f"the table has no column {name}" for name in rows if name not in table]
    found += [f"the rows have no column {name}" for name in table if name not in rows]
    both = (name for name in rows if name in table)
    found += [
        f"{name} is {table[name]} in the table, {rows[name]} in the rows" for name in both if table[name] != rows[name]
    ]
    if found:
        raise ConfigError(f"--to {to}: holds a table of other columns: {'; '.join(found)}; name another --to")


def _sql(kind: "pa.DataType", widened: bool) -> str:
    """Return a type as Spark writes it, for each of Arrow's variants of the type."""
    from pyarrow import types

    if types.is_struct(kind):
        return f"struct<{','.join(f'{field.name}:{_sql(field.type, widened)}' for field in kind)}>"
    if types.is_map(kind):
        return f"map<{_sql(kind.key_type, widened)},{_sql(kind.item_type, widened)}>"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"array<{_sql(kind.value_type, widened)}>"
    if types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if types.is_dictionary(kind):
        return _sql(kind.value_type, widened)
    name = str(kind)
    return "int" if widened and name in ("int8", "int16") else _NAMES.get(name, name)
