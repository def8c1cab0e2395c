"""k8s/overlays/spark-stream: the archive of overlays/spark as a Deployment that goes on and on."""

import shutil
import sys

import pytest
import schemas
from brokers import ROOT

sys.path.append(str(ROOT / "tests" / "spark"))

from spark_job import find, rendered
from typer.testing import CliRunner

from kmq.cli.app import app
from kmq.spark.streaming.streams import STOP_S

OVERLAY = ROOT / "k8s/overlays/spark-stream"
pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="the overlay is rendered by kubectl")


def spec():
    return find("Deployment", overlay=OVERLAY)["spec"]


def driver():
    (container,) = spec()["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("version", ["1.29", "1.32"])
def test_every_document_is_of_its_schema(version):
    for each in rendered(OVERLAY):
        schemas.validate(each, version)
    assert {each["kind"] for each in rendered(OVERLAY)} ^ {each["kind"] for each in rendered()} == {"Job", "Deployment"}


def test_the_stream_is_the_jobs_pod_but_for_how_it_ends():
    job, stream = find("Job")["spec"]["template"], spec()["template"]
    assert stream["metadata"] == job["metadata"]
    assert spec()["selector"]["matchLabels"].items() <= stream["metadata"]["labels"].items()
    ends = {"containers", "restartPolicy", "terminationGracePeriodSeconds"}
    differs = {name for name in job["spec"] | stream["spec"] if job["spec"].get(name) != stream["spec"].get(name)}
    assert differs == ends
    (was,) = job["spec"]["containers"]
    differs = {name for name in was | driver() if was.get(name) != driver().get(name)}
    assert differs == {"command", "args", "env", "startupProbe", "livenessProbe"}
    # What says where: brokers, topics, table, and what Spark is told of its pods.
    kept = {word for word in was["args"] if word.startswith(("--brokers", "--pattern", "--schema", "--to", "--conf"))}
    assert kept <= set(driver()["args"])


def test_one_driver_at_a_time_and_time_for_it_to_end_in_order():
    assert (spec()["replicas"], spec()["strategy"]) == (1, {"type": "Recreate"})
    assert spec()["template"]["spec"]["terminationGracePeriodSeconds"] > STOP_S
    assert driver()["command"][0] == "kmq", "SIGTERM reaches Python and not spark-submit's JVM"
    assert "--continuous" in driver()["args"]


def commands():
    return [driver()["command"] + driver()["args"], *(driver()[name]["exec"]["command"] for name in PROBES)]


PROBES = ("startupProbe", "livenessProbe")


def test_what_the_driver_and_its_probes_run_are_commands_of_kmq():
    for command in commands():
        assert command[0] == "kmq"
        for more, code in (["--help"], 0), (["--no-such-option"], 2):
            assert CliRunner().invoke(app, [*command[1:], *more]).exit_code == code, command
    (to,) = (word.partition("=")[2] for word in driver()["args"] if word.startswith("--to="))
    assert all(to in driver()[name]["exec"]["command"] for name in PROBES)
