"""Every pipeline that writes, against a broker that takes nobody without TLS, a client certificate and a token."""

import json
import time

import pytest
from fixed_port import payloads
from secured import Secured

from kmq.cli import spark_options
from kmq.errors import ConfigError


def secure(broker, authority, tmp_path, gateway):
    """The broker, and the groups of options with which a command reads from it and writes to it."""
    made = Secured(broker, authority, tmp_path, gateway)
    (tmp_path / "token").write_text(made.token)
    files = {"token_file": str(tmp_path / "token"), "ca": made.ca, "cert": made.cert, "key": made.key}
    made.target = spark_options.TargetOptions(**{f"to_{name}": path for name, path in files.items()}, timeout="60s")
    if gateway:
        broker.wait(lambda: (broker.pipes / "https.port").exists(), "a gateway")
        made.origin = spark_options.From(brokers=f"https://localhost:{made.port('https')}", patience="60s", **files)
    return made


def send(spark, secured, topic, *values):
    frame = spark.createDataFrame([(value,) for value in values], "value string").coalesce(1)
    options = secured.options | {"topic": topic, "kmq.producer": f"to-{topic}"}
    frame.write.format("kmq").mode("append").options(**options).save()
    secured.broker.wait(lambda: len(secured.broker.lines(topic)) == len(values), "what was sent")


@pytest.mark.sampled(0.5)
def test_dead_letters_metrics_and_redrives_go_over_tls_as_the_command_says(spark, broker, authority, tmp_path):
    from kmq.spark.pipelines import archive, metrics, redrive

    secured = secure(broker, authority, tmp_path, gateway=True)
    assert secured.broker.kmq("topics", "create", "orders.dlq").returncode == 0
    send(spark, secured, "orders", '{"n": 1}', "bad", '{"n": 2}')
    where = secured.origin.options() | {"subscribe": "orders"}
    connection = spark_options.TargetOptions(timeout="60s").options(
        secured.origin
    )  # what was given for reading holds for writing too
    written = {"producers": secured.producers, "connection": connection}
    done = archive.run(spark, where, str(tmp_path / "archive"), schema="n int", **written)
    assert (done.rows, done.bad) == (2, 1)
    secured.broker.wait(lambda: payloads(secured.broker, "orders.dlq") == [b"bad"], "the dead letter")
    found = redrive.run(spark, secured.origin.options(), "orders.dlq", "'again'", **written)
    assert found.records == 1
    secured.broker.wait(lambda: [line[-4:] for line in secured.broker.lines("again")] == [b"|bad"], "the redriven one")
    first = float(secured.broker.lines("orders")[-1].split(b"|")[1])
    secured.broker.wait(lambda: time.time() > first + 3, "the end of the first window")
    send(spark, secured, "later", "x")
    metrics.run(
        *(spark, secured.origin.options() | {"subscribe": "orders,later"}),
        topic="figures",
        producers=secured.producers,
        window="1 second",
        checkpoint=str(tmp_path / "figures"),
        connection=connection,
        watermark="1 second",
    )
    secured.broker.wait(lambda: payloads(secured.broker, "figures"), "the metrics")
    assert {json.loads(each)["topic"] for each in payloads(secured.broker, "figures")} == {"orders"}


def test_a_mirror_goes_over_tls_as_the_command_says(spark, broker, authority, new_broker, tmp_path):
    from kmq.spark.pipelines import mirror

    secured = secure(broker, authority, tmp_path, gateway=False)
    source = new_broker()
    source.gateway = False
    source.up()
    source.send_lines([b"orders|1|%d|%d" % (n, n) for n in range(5)])
    source.wait_routed(5)
    where = {"path": str(source.data), "subscribe": "orders"}
    with pytest.raises(ConfigError, match=r"tls://localhost:\d+: .*certificate"):
        mirror.run(spark, where, secured.producers, checkpoint=str(tmp_path / "at"))
    connection = secured.target.options()
    assert mirror.run(spark, where, secured.producers, connection=connection, checkpoint=str(tmp_path / "at")).rows == 5
    assert mirror.run(spark, where, secured.producers, connection=connection, checkpoint=str(tmp_path / "at")).rows == 0
    secured.broker.wait(lambda: payloads(secured.broker, "orders") == [b"%d" % n for n in range(5)], "the copies")
