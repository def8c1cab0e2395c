"""The CronJob of k8s/overlays/snapshot, run as it is against an API server that knows snapshots alone, over TLS."""

import json
import os
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from brokers import ROOT

OVERLAY = ROOT / "k8s/overlays/snapshot"
SNAPSHOTS = "/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots"


class Cluster:
    """Snapshots of the namespace `shop`, oldest first, and what was asked. Each becomes ready at the second look."""

    def __init__(self, authority, directory):
        self.snapshots, self.asked, self.fails, self.refuses = [], [], False, False
        self.identity = directory
        (directory / "token").write_text("secret-of-the-pod\n")
        (directory / "namespace").write_text("shop")
        (directory / "ca.crt").write_bytes(authority.path.read_bytes())
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue("kubernetes"))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def handler(cluster):
        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                where = urlsplit(self.path)
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size)) if size else None
                cluster.asked.append(self.command)
                code, found = cluster.reply(self.command, where, body, self.headers["Authorization"])
                text = json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *arguments):
                pass

        return Handler

    def reply(self, method, where, body, authorization):
        if self.refuses or authorization != "Bearer secret-of-the-pod":
            return 403, {"kind": "Status", "message": "volumesnapshots is forbidden"}
        if not where.path.startswith(SNAPSHOTS):
            return 404, {}
        name = where.path.removeprefix(SNAPSHOTS).strip("/")
        if method == "POST":
            return 201, self.add(body["metadata"]["labels"]["kmq-snapshot"], body["spec"], looks=0)
        if method == "DELETE":
            self.snapshots = [each for each in self.snapshots if each["metadata"]["name"] != name]
            return 200, {}
        if name:
            (found,) = [each for each in self.snapshots if each["metadata"]["name"] == name]
            found["looks"] += 1
            found["status"] = {"error": {"message": "no space in the pool"}} if self.fails else {}
            found["status"]["readyToUse"] = found["looks"] > 1 and not self.fails
            return 200, found
        key, _, value = parse_qs(where.query)["labelSelector"][0].partition("=")
        return 200, {"items": [each for each in self.snapshots if each["metadata"]["labels"].get(key) == value]}

    def add(self, claim, spec, looks, ready=True):
        number = len(self.snapshots) + 1
        time = f"2026-11-{number:02}T02:15:00Z"
        metadata = {"name": f"{claim}-{number}", "creationTimestamp": time, "labels": {"kmq-snapshot": claim}}
        made = {"metadata": metadata, "spec": spec, "looks": looks, "status": {"readyToUse": ready}}
        self.snapshots.append(made)
        return made

    def names(self):
        return [each["metadata"]["name"] for each in self.snapshots]

    def run(self, **env):
        """The command of the CronJob with its own environment, and `env` over it: exit code, stdout, stderr."""
        pod = yaml.safe_load((OVERLAY / "cronjob.yaml").read_text())["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        (mount,) = container["volumeMounts"]
        command = [each.replace(mount["mountPath"], str(OVERLAY), 1) for each in container["command"][1:]]
        host, port = self.server.server_address
        given = {each["name"]: each["value"] for each in container["env"]} | {"IDENTITY": str(self.identity)}
        given |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port), "WAIT_S": "60"} | env
        done = subprocess.run(
            [sys.executable, *command],
            env=dict(os.environ) | given,
            capture_output=True,
            text=True,
            timeout=90,
        )
        return done.returncode, done.stdout, done.stderr

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def cluster(authority, tmp_path):
    made = Cluster(authority, tmp_path)
    yield made
    made.close()


def test_a_snapshot_is_made_and_the_oldest_beyond_the_number_kept_are_deleted(cluster):
    for _ in range(8):
        cluster.add("data-kmq-0", {}, looks=9)
    cluster.add("data-kmq-1", {}, looks=9)  # of another claim
    code, said, errors = cluster.run(SNAPSHOT_CLASS="fast")
    assert (code, errors) == (0, "")
    assert cluster.names() == [*(f"data-kmq-0-{n}" for n in range(3, 9)), "data-kmq-1-9", "data-kmq-0-10"]
    assert cluster.snapshots[-1]["spec"] == {
        "source": {"persistentVolumeClaimName": "data-kmq-0"},
        "volumeSnapshotClassName": "fast",
    }
    assert "data-kmq-0-10 of data-kmq-0 is ready" in said and "data-kmq-0-1 deleted" in said


def test_snapshots_that_never_became_ready_are_not_counted_among_those_kept(cluster):
    for ready in (True, False, True, False):
        cluster.add("data-kmq-0", {}, looks=9, ready=ready)
    assert cluster.run(KEEP="2")[0] == 0
    assert cluster.names() == ["data-kmq-0-3", "data-kmq-0-4", "data-kmq-0-5"], "4 may become ready yet"
    assert "volumeSnapshotClassName" not in cluster.snapshots[-1]["spec"]


def test_a_driver_that_is_too_slow_fails_the_job_once_and_the_oldest_are_deleted_all_the_same(cluster):
    for _ in range(9):
        cluster.add("data-kmq-0", {}, looks=9)
    cluster.fails = True
    code, said, errors = cluster.run(KEEP="2", WAIT_S="0.1")
    assert code == 1 and "data-kmq-0-10 is not ready after 0.1 s: no space in the pool" in errors
    assert cluster.names() == ["data-kmq-0-8", "data-kmq-0-9", "data-kmq-0-10"], "the new one may become ready yet"
    assert "data-kmq-0-7 deleted" in said
    job = yaml.safe_load((OVERLAY / "cronjob.yaml").read_text())["spec"]["jobTemplate"]["spec"]
    assert cluster.asked.count("POST") == 1 and job["backoffLimit"] == 0, "each retry would make one more"


def test_where_all_are_late_none_of_those_that_can_be_restored_is_deleted(cluster):
    for _ in range(3):
        cluster.add("data-kmq-0", {}, looks=9)
    cluster.fails = True
    assert [cluster.run(KEEP="3", WAIT_S="0.1")[0] for _ in range(2)] == [1, 1]
    assert cluster.names() == [f"data-kmq-0-{n}" for n in range(1, 6)] and "DELETE" not in cluster.asked


def test_a_refusal_of_the_api_server_is_shown(cluster):
    cluster.refuses = True
    code, _, errors = cluster.run()
    assert code == 1 and "403" in errors and "volumesnapshots is forbidden" in errors


def test_to_keep_none_is_refused_before_anything_is_made(cluster):
    code, _, errors = cluster.run(KEEP="0")
    assert code == 78 and "KEEP=0: must be at least 1" in errors
    assert cluster.asked == []


def test_the_role_allows_what_the_job_asks_for_and_nothing_more(cluster):
    for _ in range(8):
        cluster.add("data-kmq-0", {}, looks=9)
    assert cluster.run()[0] == 0
    verbs = {"POST": {"create"}, "GET": {"get", "list"}, "DELETE": {"delete"}}
    account = [*yaml.safe_load_all((OVERLAY / "account.yaml").read_text())]
    (role,) = [each for each in account if each["kind"] == "Role"]
    assert role["rules"] == [
        {
            "apiGroups": ["snapshot.storage.k8s.io"],
            "resources": ["volumesnapshots"],
            "verbs": ["create", "get", "list", "delete"],
        }
    ]
    assert set().union(*(verbs[method] for method in cluster.asked)) == set(role["rules"][0]["verbs"])
