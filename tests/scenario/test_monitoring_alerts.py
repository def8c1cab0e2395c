"""The dashboard and the alerts of k8s/components/alerts on a real Prometheus that scrapes a real broker.

Real faults fire the alerts whose fault lasts seconds. The others, and the time that an alert waits, are shown by promtool:
it plays the series of this broker, with one fault in them.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.request

import alerting
import pytest
import yaml
from brokers import Broker
from consuls import free_ports
from grpc_client import Client
from pages import text
from prometheuses import Prometheus
from promtools import program
from staged_series import FAULTS, HOURS, Recorded

pytestmark = pytest.mark.sampled(0.5, group="file")  # none needs another: each run takes a part

MIB = 1 << 20
QUOTA = 40 * MIB
BALLAST = 16 * MIB  # beside the messages: less than half of the quota, so that nothing says it fills
WAIT = "1s"  # instead of the minutes of `for`
# Panels that have nothing to show here, and why.
EMPTY = {
    "Why not ready: A": "the broker is ready",
    "Warnings: A": "nothing is wrong",
    "Fleet: A": "it belongs to no fleet",
    "Fleet: B": "it belongs to no fleet",
    "Time since the last compaction: A": "no pass was due",
}
# What the machine that runs the tests may have of its own, and what a busy one does to any broker.
OF_THE_MACHINE = {"KmqDiskLow", "KmqInodesLow", "KmqSlowSync", "KmqSlowAcks", "KmqClockSuspect"}
OF_THE_MACHINE |= {"KmqSilent", "KmqFlapping", "KmqScrapeFails"}
OF_THE_MACHINE |= {"KmqDiskFills"}  # foretold out of minutes, in which others write to that disk


def quick(group):
    """The group with alerts that wait a second."""
    return group | {"rules": [rule | ({"for": WAIT} if "for" in rule else {}) for rule in group["rules"]]}


class Watched:
    """A broker with TLS and a small quota, and a Prometheus that watches it."""

    def __init__(self, root, authority):
        self.authority, self.broker = authority, Broker(root / "broker")
        self.files = root / "cert.pem", root / "key.pem"
        self.certificate(until=60)
        tls = dict.fromkeys(("KMQ_TLS_PORT", "KMQ_HTTPS_PORT", "KMQ_GRPCS_PORT", "KMQ_EGRESS_TLS_PORT"), 0)
        tls |= {"KMQ_TLS_HOST": "127.0.0.1", "KMQ_TLS_CERT": self.files[0], "KMQ_TLS_KEY": self.files[1]}
        small = {"RB_SLOTS": 1024, "RB_BYTES": 256 << 10, "KMQ_MAX_LINE": 64 << 10, "KMQ_DATA_QUOTA": QUOTA}
        small |= {"KMQ_HTTP_PORT": free_ports(1)[0]}  # it is started again, and then is the same target
        self.broker.env |= {name: str(value) for name, value in (tls | small).items()}
        # There from the start: a process counts strange files now and then only, and durability might be the first to see them.
        self.ballast = self.broker.data / "ballast"
        self.broker.data.mkdir()
        with open(self.ballast, "wb") as file:
            file.write(b"x" * BALLAST)
            os.fsync(file)  # the quota counts blocks, and some file systems give them to a file only now
        self.broker.up()
        address = f"127.0.0.1:{small['KMQ_HTTP_PORT']}"
        groups = [quick(group) for group in alerting.groups()]
        self.prometheus = Prometheus(root / "prometheus", {"kmq-pods": [address]}, groups)

    def certificate(self, until):
        """Put a certificate in place that is valid for so many days from now."""
        for path, source in zip(
            reversed(self.files), reversed(self.authority.issue("server", until=until, since=-2)), strict=True
        ):
            shutil.copy(source, path)

    def use(self):
        """A bit of everything that a client does."""
        broker = self.broker
        for options in ((), ("--set", "cleanup=compact", "--set", "segment_bytes=1MiB")):
            assert broker.kmq("topics", "create", "table" if options else "jobs", *options).returncode == 0
        assert broker.kmq("produce", "jobs", text="one\ntwo\nthree\n").returncode == 0
        assert broker.kmq("consume", "jobs", "--group", "report", "--count", "1").returncode == 0
        with Client(int((broker.pipes / "grpc.port").read_text())) as client:
            client.produce("jobs", b"four")
        port = (broker.pipes / "http.port").read_text().strip()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/groups", timeout=30) as reply:
            assert reply.status == 200

    def hello(self, line):
        """What ingress replies to a new connection that begins so."""
        port = int((self.broker.pipes / "ingress.port").read_text())
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock, sock.makefile("rb") as replies:
            sock.sendall(line)
            return replies.readline()

    @contextlib.contextmanager
    def stopped(self, name):
        pid = self.broker.pids()[name]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def wait_firing(self, *names):
        """Until these alerts fire; all say what they mean, with nothing left to fill in."""
        self.prometheus.wait(lambda: set(names) <= set(self.prometheus.alerts()), f"{names} fire")
        for name, alert in self.prometheus.alerts().items():
            said = " ".join(alert["annotations"].values())
            assert "<no value>" not in said and "<error" not in said and "{{" not in said, (name, said)

    def wait_silent(self, *names):
        self.prometheus.wait(lambda: not set(names) & set(self.prometheus.alerts()), f"{names} end")

    def close(self):
        self.prometheus.close()
        self.broker.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory, authority):
    program("prometheus")
    made = Watched(tmp_path_factory.mktemp("watched"), authority)
    try:
        made.use()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def recorded(watched):
    """What the broker shows while nothing is wrong."""
    return Recorded(watched.broker.get("/metrics")[1])


def test_every_panel_of_the_dashboard_shows_series_or_says_why_not(watched, recorded):
    queries = alerting.queries()
    assert set(EMPTY) <= set(queries)
    missing = {}

    def are_all_there():
        missing.clear()
        missing.update({name: each for name, each in queries.items() if not watched.prometheus.query(each)})
        return set(missing) == set(EMPTY)

    with contextlib.suppress(AssertionError):
        watched.prometheus.wait(are_all_there, "series")
    assert set(missing) == set(EMPTY), missing


def test_every_series_that_an_alert_asks_for_is_there(watched):
    for rule in alerting.rules():
        watched.prometheus.query(rule["expr"])
        for each in set(alerting.selectors(rule["expr"])):  # a scrape that failed takes all away
            watched.prometheus.wait(lambda each=each: watched.prometheus.query(each), f"{each} of {rule['alert']}")


def test_nothing_fires_while_nothing_is_wrong(watched, recorded):
    def rules():
        return [rule for group in watched.prometheus.ask("rules")["groups"] for rule in group["rules"]]

    watched.prometheus.wait(lambda: all(rule["health"] != "unknown" for rule in rules()), "an evaluation of each")
    found = rules()
    assert len(found) == len(alerting.rules())
    assert {rule["name"]: rule.get("lastError") for rule in found if rule["health"] != "ok"} == {}
    assert set(watched.prometheus.alerts()) - OF_THE_MACHINE == set()


def test_the_scaler_of_keda_gets_nothing_for_a_group_that_does_not_exist_and_then_its_lag(watched, recorded):
    """The query and the remedy of docs/monitoring.md: no series is not 0, and one command begins the group."""
    page = text("docs/monitoring.md")
    (scaler,) = [b for b in re.findall(r"(?ms)^```text\n(.*?)^```", page) if "kind: ScaledObject" in b]
    (trigger,) = yaml.safe_load(scaler)["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    (begin,) = re.findall(r"`kmq (consume mails [^`]*)`", page)

    def lag():
        return [each["value"][1] for each in watched.prometheus.query(query)]

    broker, prometheus = watched.broker, watched.prometheus
    assert broker.get("/api/groups/mailers")[0] == 404
    assert lag() == [] and trigger["metadata"]["ignoreNullValues"] == "false"
    assert broker.kmq("topics", "create", "mails").returncode == 0
    assert broker.kmq("produce", "mails", text="one\ntwo\n").returncode == 0
    prometheus.wait(lambda: prometheus.query('sum(kmq_end_offset{topic="mails"}) == 2'), "the messages are seen")
    assert lag() == [], "messages of a topic that nobody reads in a group are no lag"
    done = broker.kmq(*begin.split())
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["one", "two"]), done.stderr
    prometheus.wait(lambda: lag() == ["0"], "a group that has read all")
    assert broker.kmq("produce", "mails", text="three\n").returncode == 0
    prometheus.wait(lambda: lag() == ["1"], "its lag")


def test_a_stopped_stage_fires(watched, recorded):
    with watched.stopped("router"):
        watched.wait_firing("KmqSilent")
    watched.wait_silent("KmqSilent")


def test_a_killed_stage_fires_unclean_end(watched, recorded):
    watched.broker.kill("router")
    watched.wait_firing("KmqUncleanEnd")


def test_a_reached_quota_fires(watched, recorded):
    port = int((watched.broker.pipes / "ingress.port").read_text())
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock, sock.makefile("rb") as replies:
            sock.sendall(b"!hello acks=1\n")
            while not (reply := replies.readline()).startswith(b"!err "):
                assert reply.startswith((b"!ok ", b"!ack ")), reply
                sock.sendall(b"jobs|0||" + b"x" * 60_000 + b"\n")
        watched.wait_firing("KmqQuota")
    finally:  # or no test behind this one would get a line in
        watched.ballast.unlink()
    watched.wait_silent("KmqQuota")


def test_an_expired_certificate_fires(watched, recorded):
    watched.certificate(until=7)
    watched.wait_firing("KmqCertificateExpires")
    watched.certificate(until=-1)
    watched.wait_firing("KmqCertificateExpired")
    watched.certificate(until=60)
    watched.wait_silent("KmqCertificateExpired", "KmqCertificateExpires")


def test_lines_that_are_no_messages_and_clients_without_a_token_fire(watched, recorded):
    watched.broker.send_lines([b"no message"] * 500)
    for _ in range(60):
        assert watched.hello(b"!hello acks=1 reserved=1 token=local.00\n").startswith(b"!err 0 unauthorized")
    watched.wait_firing("KmqRefused", "KmqUnauthorized")


def test_a_broker_that_is_down_and_one_that_drops_and_refuses_fire(watched, recorded):
    watched.broker.down()
    watched.wait_firing("KmqScrapeFails")
    watched.broker.up(RB_OVERFLOW_POLICY_FRAMED="drop_oldest")
    watched.wait_silent("KmqScrapeFails")
    with watched.stopped("durability"):
        watched.broker.send_lines([b"jobs|0||" + b"x" * 1000] * 3000)

    def is_counted():  # errors count from when the broker is seen to be ready again
        for _ in range(20):
            assert watched.hello(b"!hello acks=1\n").startswith(b"!err 0 drop_oldest")
        return "KmqErrors" in watched.prometheus.alerts()

    watched.prometheus.wait(is_counted, "an alert of errors")
    watched.wait_firing("KmqDropped", "KmqErrors")


# --- every alert, by promtool ----------------------------------------------------------------------------------------


def play(directory, tests):
    """What promtool finds wrong with these tests of the rules."""
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": alerting.groups()}))
    (directory / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    done = subprocess.run(
        [program("promtool"), "test", "rules", directory / "tests.yaml"], capture_output=True, text=True, timeout=300
    )
    return done.stdout + done.stderr if done.returncode else ""


def test_promtool_finds_the_rules_good(tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": alerting.groups()}))
    done = subprocess.run(
        [program("promtool"), "check", "rules", "--lint-fatal", tmp_path / "rules.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_fault_that_fires_it():
    assert {rule["alert"] for rule in alerting.rules()} == set(FAULTS)


def test_healthy_hours_fire_nothing(recorded, tmp_path):
    assert play(tmp_path, [recorded.healthy(HOURS)]) == ""


def test_every_alert_is_fired_by_its_fault_alone_and_not_before_its_time(recorded, tmp_path):
    assert play(tmp_path, [recorded.test_of(rule, FAULTS[rule["alert"]]) for rule in alerting.rules()]) == ""


def test_promtool_would_notice_an_alert_that_does_not_fire(recorded, tmp_path):
    rule = next(rule for rule in alerting.rules() if rule["alert"] == "KmqDiskFull")
    assert "KmqDiskFull" in play(tmp_path, [recorded.test_of(rule, {})])
