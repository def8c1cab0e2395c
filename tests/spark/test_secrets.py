"""Tokens and passwords are options of readers and writers: nothing that Spark shows of a query may show them."""

import fixed_port
import pytest
from commands import PATIENCE_S
from fixed_port import routed
from pyspark.errors import PySparkException

SECRET = "geheim-4711"
OPTIONS = {"kmq.token": SECRET}


def executions(spark):
    """What the SQL tab and the event log say of each query so far."""
    found = spark._jsparkSession.sharedState().statusStore().executionsList()
    shown = [found.apply(at) for at in range(found.size())]
    return [f"{each.description()}\n{each.details()}\n{each.physicalPlanDescription()}" for each in shown]


@pytest.fixture
def other_names(spark):
    """A session whose user has redaction look for names of their own, which takes the place of Spark's."""
    conf = spark._jsparkSession.sessionState().conf()
    conf.setConfString("spark.redaction.regex", "credential")
    yield
    conf.unsetConf("spark.redaction.regex")


@pytest.fixture
def seen(spark, other_names, broker, tmp_path, capfd):
    """What is shown of a read, a write and a stream, by whom."""
    fixed_port.up(broker)
    broker.send_lines([b"orders|1|%d|%d" % (n, n) for n in range(5)])
    broker.wait_routed(5)
    before = len(executions(spark))
    reading = {"path": str(broker.data), "subscribe": "orders", **OPTIONS}
    writing = {"kmq.producers": fixed_port.address(broker), "topic": "copy", **OPTIONS}
    frame = spark.read.format("kmq").options(**reading).load()
    frame.explain("formatted")
    frame.explain("extended")
    given = ", ".join(f"`{name}` '{text}'" for name, text in reading.items())
    spark.sql(f"create or replace temporary view secrets using kmq options ({given})").collect()
    spark.sql("explain extended select count(*) from secrets").show(truncate=False)
    frame.select("value").write.format("kmq").mode("append").options(**writing, **{"kmq.producer": "one"}).save()
    stream = spark.readStream.format("kmq").options(**reading, startingOffsets="earliest").load().select("value")
    stream = stream.writeStream.format("kmq").options(**writing, checkpointLocation=str(tmp_path / "c"))
    query = stream.trigger(availableNow=True).start()
    assert query.awaitTermination(PATIENCE_S) and query.exception() is None
    query.explain(True)
    routed(broker, 15)
    said = capfd.readouterr()
    return {
        "explain": said.out,
        "log": said.err,
        "progress": str([progress.json for progress in query.recentProgress]),
        "executions": "\n".join(executions(spark)[before:]),
        "checkpoint": "".join(
            path.read_text(errors="replace") for path in (tmp_path / "c").rglob("*") if path.is_file()
        ),
    }


def test_a_token_is_in_nothing_that_is_shown_of_a_query(seen):
    assert "kmq" in seen["explain"] and "kmq" in seen["executions"].lower()
    assert [where for where, text in seen.items() if SECRET in text] == []


def test_a_token_is_in_no_error(spark, tmp_path):
    for options in ({"path": str(tmp_path)}, {"kmq.bootstrap.servers": "127.0.0.1:1", "kmq.patience": "1ms"}):
        with pytest.raises(PySparkException) as error:
            spark.read.format("kmq").options(**options, **OPTIONS, subscribe="orders").load().count()
        assert SECRET not in str(error.value)
    frame = spark.sql("select 'x' value")
    for more in ({"kmq.timeout": "1ms"}, {"kmq.tokne": SECRET}, {"topics": "t"}):
        options = {"kmq.producers": "127.0.0.1:1", "topic": "t", "kmq.producer": "one", **OPTIONS, **more}
        with pytest.raises(PySparkException) as error:
            frame.write.format("kmq").mode("append").options(**options).save()
        assert SECRET not in str(error.value)
