"""One judgement of a broker: `kmq status`, /readyz, gRPC health, the metrics and the probes say the same, and why."""

import json
import os
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from brokers import ROOT
from certificates import Authority
from chaos.loopfs import disk_of
from waiting import until

from kmq.config.settings import STAGES

MIB = 1 << 20
HEALTH, SERVING = "/grpc.health.v1.Health/Check", b"\x08\x01"
SMALL = {"RB_SLOTS": 1024, "RB_BYTES": 256 << 10, "KMQ_MAX_LINE": 64 << 10}  # little is on the way, and kept room for


@pytest.fixture
def cleanup():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def files(authority, tmp_path):
    """A function that puts a certificate for `until` days in place: the files of a server, and settings that name them."""
    made = tmp_path / "cert.pem", tmp_path / "key.pem"

    def put(until, since=-1):
        for path, source in zip(
            reversed(made), reversed(authority.issue("server", until=until, since=since)), strict=True
        ):
            shutil.copy(source, path)
        ports = dict.fromkeys(("KMQ_TLS_PORT", "KMQ_HTTPS_PORT", "KMQ_GRPCS_PORT", "KMQ_EGRESS_TLS_PORT"), 0)
        return {"KMQ_TLS_HOST": "127.0.0.1", "KMQ_TLS_CERT": made[0], "KMQ_TLS_KEY": made[1]} | ports

    return put


@pytest.fixture
def started(new_broker):
    """A function that brings a broker with its gateway up."""

    def up(data=None, **settings):
        broker = new_broker(data)
        broker.env |= {name: str(value) for name, value in settings.items()}
        broker.up()
        return broker

    return up


def is_serving(broker):
    with grpc.insecure_channel(f"127.0.0.1:{(broker.pipes / 'grpc.port').read_text().strip()}") as channel:
        return channel.unary_unary(HEALTH)(b"", wait_for_ready=True, timeout=30) == SERVING


def probe(broker, kind, name):
    return broker.run("python", "-m", "kmq.probe", kind, name)


def statuses(broker):
    """`kmq status` in its three forms."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda options: broker.kmq("status", *options), ((), ("--logfmt",), ("--json",))))


def faces(broker):
    """What each of those who can be asked says: the code of the first reason, or ""."""
    text, logfmt, as_json = statuses(broker)
    report = json.loads(as_json.stdout)
    status, body = broker.get("/readyz")
    said = json.loads(body)
    metrics = broker.get("/metrics")[1].splitlines()
    gateway = probe(broker, "ready", "gateway")

    def first(pattern, text):
        return next(iter(re.findall(pattern, text, re.MULTILINE)), "")

    found = {
        "status": first(r"^not ready: (\w+): .+; .+", text.stdout),
        "--logfmt": first(r"^reason=(\w+) about=\S+ why=.+ advice=.+", logfmt.stdout),
        "--json": next((reason["code"] for reason in report["reasons"] if reason["why"] and reason["advice"]), ""),
        "readyz": said["code"] if said["advice"] or not said["code"] else "no advice",
        "metrics": first(r'^kmq_not_ready{reason="(\w+)"} 1.0', "\n".join(metrics)),
        "probe": gateway.stdout.partition(":")[0],
    }
    is_ready = {code.returncode == 0 for code in (text, logfmt, as_json, gateway)}
    is_ready |= {status == 200, said["ok"], report["ready"], "kmq_ready 1.0" in metrics, is_serving(broker)}
    return set(found.values()), is_ready


def wait_faces(broker, code):
    """Until all say this code, or that the broker is ready. It is one moment only where nothing changes meanwhile."""
    seen = []

    def agree():
        seen[:] = faces(broker)
        return seen == [{code}, {not code}]

    until(agree, f"{code or 'ready'} everywhere", lambda: f"{seen}\n{broker.log()[-2000:]}")


def fill_until_refused(broker, code):
    """Acknowledged messages, one by one, until one is refused with this code."""
    port = int((broker.pipes / "ingress.port").read_text())
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock, sock.makefile("rb") as replies:
        sock.sendall(b"!hello acks=1\n")
        reply = replies.readline()
        while not reply.startswith(b"!err "):
            assert reply.startswith((b"!ok ", b"!ack ")), reply
            sock.sendall(b"test.fill|0||" + b"x" * 30_000 + b"\n")
            reply = replies.readline()
    assert reply.split()[2] == code.encode()


class Reserved:
    """A program of the broker itself. `how`: what it may do; `spare`: use what is kept free for messages on their way."""

    def __init__(self, broker, how):
        port, token = ((broker.pipes / name).read_text().strip() for name in ("ingress.port", "local.token"))
        self.sock = socket.create_connection(("127.0.0.1", int(port)), timeout=30)
        self.sock.sendall(f"!hello acks=1 reserved={how} token={token}\n".encode())
        self.replies = self.sock.makefile()
        self.hello = self.replies.readline().split()

    def send(self):
        """The words of the reply to a message, or to the hello if that is refused."""
        if self.hello[0] == "!ok":
            self.sock.sendall(b"test.spare|0||x\n")
        reply = self.replies.readline().split() if self.hello[0] == "!ok" else self.hello
        self.sock.close()
        return reply


def logged(broker):
    """What the gateway has logged, in turn: the code of each not_ready, "" for each ready_again."""
    not_ready = r"warn stage=gateway event=not_ready reason=(\w+) "
    return re.findall(rf"level=(?:{not_ready}|info stage=gateway event=ready_again)", broker.log())


def assert_refused_everywhere(broker, code):
    """And yet everything is alive."""
    wait_faces(broker, code)
    broker.wait(
        lambda: probe(broker, "ready", "ingress").stdout.startswith(f"{code}: "), "it from the probe of ingress"
    )
    stages = ("ingress", "durability", "gateway")
    broker.wait(lambda: not any(probe(broker, "live", name).returncode for name in stages), "all alive")
    assert broker.get("/healthz")[0] == 200
    broker.wait(lambda: code in logged(broker), "a log line")


def assert_ready_again(broker):
    """And each change was logged once. A start that takes long is one, too, and so is a process without CPU for long."""
    wait_faces(broker, "")
    broker.wait(lambda: probe(broker, "ready", "ingress").returncode == 0, "ingress ready")
    broker.wait(lambda: logged(broker)[-1] == "", "a log line")
    changes = logged(broker)
    assert [code for code, before in zip(changes, ["", *changes], strict=False) if code == before] == []


def test_a_reached_quota_is_said_by_all_who_are_asked_until_there_is_room(new_broker):
    broker = new_broker()
    broker.env |= {name: str(value) for name, value in SMALL.items()} | {"KMQ_DATA_QUOTA": str(20 * MIB)}
    broker.data.mkdir()
    ballast = broker.data / "ballast"  # it is there when the broker measures: what comes later is seen by the next walk
    ballast.write_bytes(b"x" * (8 * MIB))
    broker.up()
    wait_faces(broker, "")
    before = Reserved(broker, "spare"), Reserved(broker, "1")
    fill_until_refused(broker, "quota")
    assert_refused_everywhere(broker, "quota")
    since = Reserved(broker, "spare"), Reserved(broker, "1")
    said = [each.send() for each in (*before, *since)]
    assert [reply[:2] for reply in said] == [["!ack", "1"], ["!err", "1"], ["!ack", "1"], ["!err", "0"]]
    ballast.unlink()
    assert_ready_again(broker)


@pytest.mark.root
def test_a_full_disk_is_said_by_all_who_are_asked_until_there_is_room(started, tmp_path, cleanup):
    disk = disk_of("ext4", 100 * MIB, tmp_path, cleanup)
    broker = started(disk.path / "data", **SMALL)
    wait_faces(broker, "")
    ballast = disk.fill(4 * MIB)
    assert_refused_everywhere(broker, "disk_full")
    ballast.unlink()
    assert_ready_again(broker)


def reasons_of(broker):
    """The code and the advice of each reason, as each form of `kmq status` has them."""
    text, logfmt, as_json = statuses(broker)
    return [
        re.findall(r"^not ready: (\w+): .+?; (start.+|it is.+|its supervisor.+)$", text.stdout, re.MULTILINE),
        re.findall(r'^reason=(\w+) about=\S+ why=.+ advice="(.+)"$', logfmt.stdout, re.MULTILINE),
        [(reason["code"], reason["advice"]) for reason in json.loads(as_json.stdout)["reasons"]],
    ]


def test_a_broker_that_was_killed_is_down_and_status_says_how_to_start_it(started):
    broker = started()
    broker.kill()
    broker.wait(lambda: not broker.processes(), "the end of the gateway")
    broker.wait(lambda: all(broker.status()[name]["state"] == "dead" for name in STAGES), "silence")
    for reasons in reasons_of(broker):
        assert [code for code, _ in reasons] == ["down"] and reasons[0][1].startswith("start it with: kmq up; "), (
            reasons
        )
    broker.up()
    wait_faces(broker, "")


def test_a_stage_whose_supervisor_was_killed_too_is_not_promised_to_come_back(started):
    broker = started()
    broker.kill("supervisor", "router")
    broker.wait(lambda: broker.status()["router"]["state"] == "dead", "silence")
    advice = "its supervisor was killed, so nobody starts it again; start it with: kmq down && kmq up"
    for reasons in reasons_of(broker):
        assert ("dead", advice) in reasons and not any("within seconds" in each for _, each in reasons), reasons


def test_a_stage_that_is_stopped_is_promised_a_new_start_only_while_its_supervisor_lives(started):
    broker = started()
    os.kill(broker.pids()["router"], signal.SIGSTOP)
    broker.wait(lambda: broker.status()["router"]["state"] == "silent", "silence")
    assert dict(reasons_of(broker)[1])["silent"].endswith(" loses nothing, it is started again")
    broker.kill("supervisor")
    again = "but its supervisor was killed, so then start it with: kmq down && kmq up"
    assert dict(reasons_of(broker)[1])["silent"].endswith(f" loses nothing, {again}")


@pytest.mark.root
@pytest.mark.parametrize("missing", ["", "gateway.owner"])
def test_kmq_up_on_a_full_disk_says_so_and_is_ready_when_there_is_room(new_broker, tmp_path, cleanup, missing):
    """The FIFOs and the port files lie on that disk too, as on a machine where nobody has said where they are to lie.

    Without its lock file the gateway cannot even begin: there is no room to make it.
    """
    disk = disk_of("ext4", 100 * MIB, tmp_path, cleanup)
    broker = new_broker(disk.path / "data")
    broker.pipes = disk.path / "pipes"
    broker.env |= {name: str(value) for name, value in SMALL.items()} | {"KMQ_PIPES": str(broker.pipes)}
    broker.up()
    broker.down()
    if missing:
        (broker.pipes / missing).unlink()
    ballast = disk.fill(0)
    result = broker.kmq("up", patience_s=50)  # well before it gives up waiting for a broker that is not ready
    assert result.returncode == 1
    assert re.match(r"kmq: up, but not ready: disk_full: .+; make room on that disk", result.stderr), result.stderr
    assert re.search(r"^not ready: disk_full: ", broker.kmq("status").stdout, re.MULTILINE)
    ballast.unlink()
    broker.wait(lambda: broker.kmq("status", "--logfmt").returncode == 0, "ready")
    broker.wait(lambda: broker.status().get("gateway", {}).get("state") == "ready", "the gateway, started again")
    assert broker.get("/readyz")[0] == 200


def warned(broker):
    """The warnings that each shows, by code; the broker is ready all the time."""
    text, logfmt, as_json = statuses(broker)
    status, body = broker.get("/readyz")
    metrics = broker.get("/metrics")[1]
    assert ({done.returncode for done in (text, logfmt, as_json)}, status, is_serving(broker)) == ({0}, 200, True)
    return [
        set(re.findall(r"^(certificate_\w+): .+; replace the file", text.stdout, re.MULTILINE)),
        set(re.findall(r"^warning=(\w+) about=\S+ why=.+ advice=", logfmt.stdout, re.MULTILINE)),
        {warning["code"] for warning in json.loads(as_json.stdout)["warnings"]},
        {warning["code"] for warning in json.loads(body)["warnings"]},
        set(re.findall(r'^kmq_warning{reason="(\w+)"} 1.0', metrics, re.MULTILINE)),
    ]


def days_left(broker):
    """Process → days until its certificate expires, as the metrics have it."""
    found = re.findall(
        r'^kmq_certificate_expires_seconds{file="\S+cert.pem",stage="(\w+)"} (\S+)$', broker.get("/metrics")[1], re.M
    )
    return {stage: round((float(value) - time.time()) / 86_400, 1) for stage, value in found}


def test_certificates_are_warned_of_before_they_expire_and_named_when_they_have(started, files):
    """Replaced at run time, with nobody connecting: so is an expired one found by those who look."""
    broker = started(**files(until=3))
    logged = []
    for days, code in ((3, "certificate_expires"), (-0.5, "certificate_expired"), (60, "")):
        files(days)
        broker.wait(lambda code=code: warned(broker) == [{code} - {""}] * 5, f"{code or 'no warning'} everywhere")
        broker.wait(lambda days=days: days_left(broker) == {"ingress": days, "gateway": days}, "both have it")
        logged += [code] if code else []
        for stage in ("ingress", "gateway"):
            said = re.findall(rf"level=warn stage={stage} event=(certificate_\w+) file=\S+cert.pem", broker.log())
            assert list(dict.fromkeys(said)) == logged and len(said) <= 3  # the first file is put there twice


def test_a_certificate_of_tomorrow_and_a_client_authority_that_expires_are_warned_of(started, files, tmp_path):
    trusted = Authority(tmp_path, "trusted", until=2).path
    broker = started(**files(until=60, since=1), KMQ_TLS_CLIENT_CA=trusted)
    broker.wait(lambda: warned(broker) == [{"certificate_not_yet_valid", "certificate_expires"}] * 5, "both warnings")
    assert f"certificate_expires: KMQ_TLS_CLIENT_CA={trusted} expires in 2.0 days" in broker.kmq("status").stdout


def numbers(value, path=""):
    """The paths of all numbers in a document; an item of a list or a measured thing stands for all."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, "latency.<what>" if path == "latency" else f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, f"{path}[]")
    elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield path


def test_every_number_of_the_status_is_on_its_page(started):
    broker = started()
    assert broker.kmq("produce", "t", "-m", "x", "--acks").returncode == 0
    found = set(numbers(json.loads(broker.kmq("status", "--json").stdout))) - {"latency.<what>"}
    page = (ROOT / "docs" / "status-json.md").read_text()
    shown = set(re.findall(r"(?m)^\| `(\S+)` \|", page))
    of_shard = {
        each for each in shown if each.startswith("followers[].")
    }  # empty here; test_shard_status looks at them
    assert of_shard and found == shown - of_shard
