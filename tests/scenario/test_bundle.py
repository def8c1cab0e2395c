"""`kmq bundle`: what a bug report needs, and no payload, token or key, whatever state the broker is in."""

import io
import json
import os
import signal
import stat
import subprocess
import tarfile

import pytest
from brokers import Broker

CONFIG = 78
TOKEN = "orders.Zk3vY8wq1nR5tB7mC0xL2pS6dF9gH4jK-aQ_eWrTyUi"
PEM = f"-----BEGIN PRIVATE KEY-----\n{'Ab3+Cd5/' * 8}\n-----END PRIVATE KEY-----\n"
SECRETS = (
    "consul-pl4nted",
    "typo-pl4nted",
    "toml-pl4nted",
    "url-pl4nted",
    "payl0ad-planted",
    "f1le-planted",
    "Ab3+Cd5/",
    TOKEN[7:],
)


def unpacked(path):
    """Name → content of the files in a bundle."""
    with tarfile.open(**({"fileobj": path} if isinstance(path, io.BytesIO) else {"name": path})) as tar:
        return {
            member.name.removeprefix("kmq-bundle/"): file.read()
            for member in tar.getmembers()
            if (file := tar.extractfile(member)) is not None
        }


def bundle(broker, *arguments, **settings):
    result = broker.kmq("bundle", "b.tar.gz", *arguments, **settings)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    path = broker.root / "b.tar.gz"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = unpacked(path)
    path.unlink()
    return found


def test_a_bundle_without_a_broker_says_what_is_missing(broker):
    found = bundle(broker)
    manifest = found["MANIFEST"].decode()
    assert {"config.json", "versions.json", "status.json", "doctor.json"} <= set(found)
    assert json.loads(found["status.json"])["ready"] is False and json.loads(found["doctor.json"])["checks"]
    for name in ("metrics.txt", "stats-page.json", "data.txt", "log/", "verify.txt"):
        assert f"\n  {name} " in manifest.partition("left out, or cut:")[2], name
    assert list(broker.root.iterdir()) == []


def test_a_bundle_never_overwrites_a_file_and_leaves_none_behind_if_it_fails(broker):
    (broker.root / "b.tar.gz").write_text("mine")
    for arguments in (["b.tar.gz"], ["no/such/place.tar.gz"], ["c.tar.gz", "--verify-for", "soon"]):
        result = broker.kmq("bundle", *arguments)
        assert result.returncode == CONFIG and "Traceback" not in result.stderr
    assert [path.name for path in broker.root.iterdir()] == ["b.tar.gz"] and (
        broker.root / "b.tar.gz"
    ).read_text() == "mine"


@pytest.mark.root
def test_a_bundle_of_a_pod_whose_root_is_read_only_goes_to_standard_output(broker):
    def kmq_bundle(arguments):
        command = f"mount -o remount,bind,ro / && exec kmq bundle {arguments}"
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", command],
            env=broker.env,
            cwd=broker.root,
            capture_output=True,
            timeout=300,
        )

    refused = kmq_bundle("")
    assert refused.returncode == CONFIG and b"Read-only file system" in refused.stderr
    assert b"kmq bundle - >" in refused.stderr
    done = kmq_bundle("- --no-verify")
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert b" files, " in done.stderr and b"verify.txt: --no-verify" in done.stderr
    found = unpacked(io.BytesIO(done.stdout))
    assert json.loads(found["status.json"])["ready"] is False and json.loads(found["doctor.json"])["checks"]


def test_a_bundle_is_not_written_to_a_terminal(broker):
    shown = broker.run("script", "--quiet", "--return", "--command", "kmq bundle -", "/dev/null")
    assert shown.returncode == CONFIG and "kmq bundle - > bundle.tar.gz" in shown.stdout


def plant(broker):
    """Secrets wherever somebody may have left them."""
    (broker.root / "kmq.toml").write_text('# toml-pl4nted\nKMQ_CONSUL = "http://me:url-pl4nted@127.0.0.1:1"\n')
    with (broker.pipes / "kmq.log").open("a") as log:
        log.write(
            f"level=info token={TOKEN} url=http://me:url-pl4nted@h:1\n{PEM}reason=\"not an index line: b'payl0ad-planted'\"\n"
        )
        log.write("level=info event=the_last_line reason=consul-pl4nted\n")
    (broker.data / "key.pem").write_text(f"{PEM}f1le-planted")
    (broker.data / "topics/test/topic.toml").parent.mkdir(parents=True, exist_ok=True)
    for name in ("one.log", "kmq.log.1"):  # as where KMQ_PIPES is the data directory
        (broker.pipes / name).symlink_to(broker.data / "test.log")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A broker with its gateway, tokens and some messages, and its token."""
    made = Broker(tmp_path_factory.mktemp("bundle") / "broker")
    made.env["KMQ_TOKENS"] = str(made.root / "tokens")
    made.env["KMQ_CONSUL_TOKEN"] = "consul-pl4nted"
    token = made.kmq("token", "new", "orders").stdout.strip()
    made.up()
    sent = made.kmq("produce", "test.k", "--acks", text="payl0ad-planted\n" * 100)
    assert sent.returncode == 0, sent.stderr
    yield made, token
    made.close()


def test_a_bundle_of_a_running_broker_is_whole_and_holds_no_secret(running):
    broker, token = running
    plant(broker)
    (broker.pipes / "kmq.log.2").mkdir()  # not readable, also for root
    found = bundle(broker)
    manifest = found["MANIFEST"].decode()
    for name in ("status.json", "log-stat.json", "topics.json", "groups.json", "stats-page.json", "config.json"):
        assert json.loads(found[name]) is not None, name
    assert json.loads(found["status.json"])["ready"] is True
    assert json.loads(found["stats-page.json"])["rows"]["durability"]["seq"] >= 100
    assert b"kmq_ready 1.0" in found["metrics.txt"] and b"no damage" in found["verify.txt"]
    assert b"event=ready" in found["log/kmq.log"] and b"event=the_last_line" in found["log/kmq.log"]
    assert "Not a directory" not in manifest and b"# test\n" in found["topics.toml.txt"]
    assert b"topics/test/0/" in found["data.txt"] and b"key.pem" in found["data.txt"]
    assert "log/kmq.log.2            is no regular file" in manifest and "log/kmq.log.1 " in manifest
    assert str(broker.data) in found["config.json"].decode()
    shown = b"\n".join(found.values()).decode()
    local = (broker.pipes / "local.token").read_text().strip()
    hashed = (broker.root / "tokens").read_text().split("$")[-1].strip()
    left = [secret for secret in (*SECRETS, token, token[7:], local, local[6:], hashed) if secret in shown]
    assert left == [], [line for line in shown.splitlines() if any(secret in line for secret in left)]


def test_a_bundle_does_not_wait_for_a_gateway_that_hangs(running):
    broker, _ = running
    gateway = broker.pids()["gateway"]
    os.kill(gateway, signal.SIGSTOP)
    try:
        found = bundle(broker, "--verify-for", "1ms")
    finally:
        os.kill(gateway, signal.SIGCONT)
    manifest = found["MANIFEST"].decode()
    assert "metrics.txt              no answer within its time" in manifest and "groups.json" in manifest
    assert "verify.txt               had not ended after 0.001 s" in manifest
    assert json.loads(found["stats-page.json"])["rows"]["router"]["pid"]


def test_a_bundle_of_wrong_settings_has_them_and_no_value_that_may_be_a_secret(broker):
    found = bundle(broker, "--no-verify", KMQ_PORT="typo-pl4nted", KMQ_TOKEN="consul-pl4nted")
    assert "--no-verify" in found["MANIFEST"].decode() and "verify.txt" not in found
    problem = json.loads(found["config.json"])
    assert problem["problem"] and problem["unknown"][0]["name"] == "KMQ_TOKEN"
    shown = b"\n".join(found.values())
    assert b"KMQ_PORT" in shown and b"pl4nted" not in shown
