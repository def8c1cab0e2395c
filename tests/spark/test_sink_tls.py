"""format("kmq") to a broker with TLS, client certificates and tokens: what goes through, what is refused, what nobody may see."""

import time

import pytest
from commands import PATIENCE_S
from consuls import free_ports
from fixed_port import payloads, routed
from pyspark.errors import PySparkException
from secured import Secured


@pytest.fixture
def secured(broker, authority, tmp_path):
    return Secured(broker, authority, tmp_path)


def write(spark, options, count=10):
    frame = spark.range(count, numPartitions=2).selectExpr("cast(id as string) value")
    frame.write.format("kmq").mode("append").options(**{"topic": "t", "kmq.producer": "one", **options}).save()


def test_rows_go_over_tls_with_a_client_certificate_and_a_token(spark, secured, tmp_path):
    write(spark, secured.options)
    tmp_path.joinpath("in").mkdir()
    tmp_path.joinpath("in", "1.txt").write_text("streamed\n")
    stream = spark.readStream.format("text").load(str(tmp_path / "in")).writeStream.format("kmq")
    options = {**secured.options, "kmq.timeout": "30s", "topic": "t", "checkpointLocation": str(tmp_path / "c")}
    query = stream.options(**options).trigger(availableNow=True).start()
    assert query.awaitTermination(PATIENCE_S) and query.exception() is None
    routed(secured.broker, 11)
    assert set(payloads(secured.broker, "t")) == {b"streamed", *(b"%d" % n for n in range(10))}


def test_what_no_waiting_mends_is_one_line_before_any_task(spark, secured):
    """All that `check` tells: tests/scenario/test_sink_addresses.py."""
    changes = {
        r"tls://localhost:\d+: its certificate is not trusted: .*; options kmq": {
            "kmq.ssl.ca.location": secured.other_ca
        },
        r"refuses the connection: unauthorized .*; option kmq.token": {"kmq.token": "spark.wrong"},
        r"no-such-host.invalid:5443: this host is not known": {
            "kmq.producers": f"{secured.producers},no-such-host.invalid"
        },
    }
    for says, change in changes.items():
        with pytest.raises(PySparkException, match=says) as error:
            write(spark, secured.options | change)
        assert "kmq.errors.ConfigError" in str(error.value) and "producer one-" not in str(error.value), says
        assert secured.token not in str(error.value)
    routed(secured.broker, 0)


def test_a_task_does_not_wait_for_what_no_waiting_mends(spark, secured):
    began = time.monotonic()
    with pytest.raises(
        PySparkException, match=r"producer one-\d at tls://localhost:\d+: its certificate is not trusted"
    ):
        write(
            spark,
            secured.options | {"kmq.ssl.ca.location": secured.other_ca, "kmq.probe": "false", "kmq.timeout": "1000s"},
        )
    assert time.monotonic() - began < PATIENCE_S


def test_a_broker_that_is_only_restarting_is_waited_for(spark, secured):
    """As a stream starts, too: nobody is at the port, and nothing is wrong with it."""
    (port,) = free_ports(1)
    secured.broker.env["KMQ_TLS_PORT"] = str(port)
    options = secured.options | {"kmq.producers": f"tls://localhost:{port}"}
    secured.broker.down()
    with pytest.raises(PySparkException, match="nothing listens on localhost"):
        write(spark, options | {"kmq.timeout": "1500ms"})
    secured.broker.up()
    write(spark, options)
    routed(secured.broker, 10)
