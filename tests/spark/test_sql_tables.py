"""Topics in Spark's own SQL: what of its ways to name a source reaches ours, and what we say to those that do not."""

import pytest
from made_data import write_data

from kmq.errors import ConfigError
from kmq.spark import failures


@pytest.fixture
def options(tmp_path):
    """The clause OPTIONS or WITH for five records."""
    data = write_data(tmp_path / "data", [b"orders|0|%d|a" % n for n in range(5)])
    return f"(path '{data}', subscribe 'orders')"


@pytest.fixture
def table(spark, options):
    """A table that CREATE TABLE has made."""
    spark.sql(f"create table orders_made (value binary) using kmq options {options}")
    yield "orders_made"
    spark.sql("drop table orders_made")


def test_a_temporary_view_and_options_of_a_query_reach_the_source(spark, options, table):
    spark.sql(f"create or replace temporary view orders_seen using kmq options {options}")
    try:
        assert spark.sql("select count(*) from orders_seen where offset >= 2").first()[0] == 3
        assert spark.sql(f"select count(*) from {table} with {options}").first()[0] == 5
    finally:
        spark.catalog.dropTempView("orders_seen")


def refusal(spark, statement):
    with pytest.raises(Exception) as refused:
        spark.sql(statement).collect()
    return failures.explain(refused.value)


def test_create_table_is_refused_with_what_to_use(spark, options):
    cause = refusal(spark, f"create table orders_refused using kmq options {options}")
    assert cause.exit_code == ConfigError.exit_code and "use CREATE TEMPORARY VIEW" in str(cause), cause


def test_a_table_whose_options_do_not_arrive_is_refused_with_what_to_use(spark, table):
    for statement in (f"select count(*) from {table}", f"insert into {table} (value) values (cast('a' as binary))"):
        cause = refusal(spark, statement)
        assert cause.exit_code == ConfigError.exit_code, cause
        assert "use CREATE TEMPORARY VIEW" in str(cause) and "WITH (path" in str(cause)
