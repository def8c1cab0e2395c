"""The schema of an archive's payloads: given as DDL, or inferred from a sample at the first start and then fixed."""

import json
import os
from collections.abc import Mapping
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from kmq.errors import ConfigError
from kmq.files import replace_file
from kmq.spark.pinned import pinned
from kmq.spark.pipelines.following import starting
from kmq.spark.pipelines.payloads import infer
from kmq.spark.source.brokers import open_broker
from kmq.spark.source.options import Options
from kmq.spark.tables import Table

INFER, NONE = "infer", "none"  # values in place of DDL
SAMPLE = 10_000  # records that a schema is inferred from


def decide(spark: SparkSession, table: Table, where: Mapping[str, str], schema: str) -> StructType:
    """Return the schema of this table, as decided at its first start: a repeated batch must give the same rows."""
    path = _schema_file(table)
    known = None
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            known = StructType.fromJson(json.load(file))
    if schema == INFER:
        with pinned(spark):
            found = known or infer(_sample(spark, where))
    else:
        found = _given(schema)
    if known not in (None, found):
        raise ConfigError(f"--schema: {path} has another one for this table: {known.simpleString()}")
    return found


def keep(table: Table, fields: StructType | None) -> None:
    """Keep the schema for all later starts."""
    if fields is not None and not os.path.exists(_schema_file(table)):
        replace_file(_schema_file(table), json.dumps(fields.jsonValue(), indent=1).encode())


def _schema_file(table: Table) -> str:
    return f"{table.state}/schema.json"


def _given(schema: str) -> StructType:
    """Return the schema of DDL, or of the DDL in a file."""
    text, wrong = schema, "must be DDL like 'price double, user string', or a file of it"
    if os.path.isfile(schema):
        wrong = "the file must hold DDL like 'price double, user string'"
        try:
            with open(schema, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"--schema {schema!r}: {wrong}: {err}") from err
    try:
        found = StructType.fromDDL(text)
    except Exception as err:  # Spark's parser raises several types
        raise ConfigError(f"--schema {schema[:80]!r}: {wrong}") from err
    if not isinstance(found, StructType) or not found.names:
        raise ConfigError(f"--schema {schema[:80]!r}: {wrong}")
    return found


def _sample(spark: SparkSession, where: Mapping[str, str]) -> DataFrame:
    """Return the first records of each topic."""
    options = Options(starting(where))
    brokers = [open_broker(name, bool(options.paths), options.access) for name in options.brokers]
    names = sorted({topic for broker in brokers for topic in broker.topics() if options.wants(topic)})
    if not names:
        raise ConfigError("--schema infer: none of these topics exists yet; give a schema, or --schema none")
    at = {name: text for name, text in where.items() if not name.lower().startswith(("subscribe", "assign"))}
    reader = spark.read.format("kmq").schema("value binary").options(**at)
    parts = [reader.option("subscribe", topic).load().limit(max(100, SAMPLE // len(names))) for topic in names]
    return reduce(DataFrame.union, parts)
