"""`kmq bq …` as a user types it, against a real Consul."""

import base64
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from brokers import ROOT
from consuls import program
from waiting import PATIENCE_S, until

CONFIG, BUSY, RETRY, INTERRUPTED = 78, 69, 75, 130


class Running:
    """A command that runs; `out` and `err` hold what it has printed so far."""

    def __init__(self, command, env, cwd):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(command, **pipes, env=env, cwd=cwd, text=True)
        self.out, self.err = "", ""
        self._threads = [threading.Thread(target=self._read, args=[name]) for name in ("out", "err")]
        for thread in self._threads:
            thread.start()

    def _read(self, name):
        for line in getattr(self.process, f"std{name}"):
            setattr(self, name, getattr(self, name) + line)

    @property
    def lines(self):
        return [json.loads(line) for line in self.out.splitlines()]

    def wait(self, condition):
        until(lambda: condition(self), instead=lambda: f"{self.out}{self.err}", process=self.process)

    def end(self, number=signal.SIGTERM):
        """Its exit code after this signal."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        return code


class Shell:
    """Commands of one node in a cluster of the test's own."""

    def __init__(self, agent, cwd, **settings):
        self.cluster, self.cwd, self.running = f"test-{uuid.uuid4()}", cwd, []
        self.env = {
            "PATH": f"{Path(sys.executable).parent}:{Path(program()).parent}:/usr/bin:/bin",
            "KMQ_CONSUL": agent.address,
            "KMQ_CLUSTER": self.cluster,
            "KMQ_BROKER": "a",
            "KMQ_SESSION_TTL": "10s",  # in which any follower gets the time to renew it
            "CONSUL_HTTP_ADDR": agent.address,
        } | settings

    def run(self, *words, stdin=b"", **settings):
        env = {name: value for name, value in (self.env | settings).items() if value}
        return subprocess.run(
            ["kmq", "bq", *words], input=stdin, capture_output=True, env=env, cwd=self.cwd, timeout=PATIENCE_S
        )

    def publish(self, *words, stdin=b""):
        done = self.run("publish", *words, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def start(self, *words, **settings):
        command = words if words[0] == "consul" else ["kmq", "bq", *words]
        self.running.append(Running(command, self.env | settings, self.cwd))
        return self.running[-1]

    def node(self, broker="a"):
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        return next((node for node in json.loads(done.stdout)["nodes"] if node["broker"] == broker), None)

    def has_read(self, epoch):
        """Whether the node has processed so much, and has no error."""
        node = self.node()
        return node is not None and node["read"] == epoch and not node["error"]

    def file(self, name):
        path = self.cwd / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def shell(consul, tmp_path):
    made = Shell(consul, tmp_path)
    yield made
    for running in made.running:
        running.end(signal.SIGKILL)


def test_publish_prints_the_epoch_and_follow_prints_every_message_as_json(shell):
    assert shell.publish("greeting", "héllo") == 1
    assert shell.publish("limits", "-", stdin=b'{"limit": 5}\n') == 2
    assert shell.publish("bytes", "-", stdin=b"\xff\x00") == 3
    assert shell.publish("empty") == 4
    follow = shell.start("follow", "--json", "--from", "1")
    follow.wait(lambda follow: len(follow.lines) == 4)
    one, two, three, four = follow.lines
    assert {*one} == {"epoch", "type", "id", "ts", "payload"} and abs(one["ts"] - time.time()) < 600
    assert [(line["epoch"], line["type"]) for line in follow.lines] == [
        (1, "greeting"),
        (2, "limits"),
        (3, "bytes"),
        (4, "empty"),
    ]
    assert (one["payload"], two["payload"], four["payload"]) == ("héllo", '{"limit": 5}\n', "")
    assert base64.b64decode(three["payload_base64"]) == b"\xff\x00" and "payload" not in three
    assert follow.end(signal.SIGINT) == INTERRUPTED and follow.err == ""
    assert (shell.node()["read"], shell.node()["holder"]) == (4, "")


def test_a_new_node_prints_a_snapshot_and_a_known_one_goes_on(shell):
    shell.publish("a", "1")
    new = shell.start("follow", "--json")
    new.wait(lambda new: new.lines)
    assert new.end() == 0
    assert [(line["epoch"], line["type"], line["states"]) for line in new.lines] == [(1, "snapshot", {})]
    shell.publish("a", "2")
    known = shell.start("follow")
    known.wait(lambda known: "epoch=2 type=a" in known.out and "payload=2" in known.out)
    assert known.end() == 0 and "epoch=1" not in known.out


def test_a_command_that_fails_is_run_again_until_it_works(shell):
    shell.publish("one", "first")
    shell.publish("two", "second")
    command = 'echo "$BQ_EPOCH $BQ_TYPE $(cat)" >>ran; test $BQ_EPOCH = 1 || test -e mended || exit 3'
    follow = shell.start("follow", "--from", "1", "--exec", command)
    until(lambda: shell.file("ran").count("2 two second") >= 2, instead=lambda: follow.err)
    assert "kmq: message 2 (two): exit code 3 of: echo" in follow.err
    until(lambda: "exit code 3" in shell.node()["error"])
    assert (shell.node()["read"], shell.node()["lag"]) == (1, 1)
    table = shell.run("status").stdout.decode()
    assert "epoch 2, publisher: nobody now" in table and "exit code 3" in table
    (shell.cwd / "mended").touch()
    until(lambda: shell.has_read(2), instead=lambda: follow.err)
    follow.wait(lambda follow: "processed at last" in follow.err)
    assert follow.err.count("exit code 3") == 1  # said once, however often it was tried
    assert shell.file("ran").startswith("1 one first\n2 two second\n") and shell.file("ran").count("1 one") == 1
    assert follow.end() == 0 and follow.out == ""


def test_a_snapshot_comes_to_the_command_as_json_and_kmq_works_inside(shell):
    shell.publish("a")
    command = 'cat >given; echo "$BQ_TYPE" >type; kmq bq status --json >status'
    follow = shell.start("follow", "--exec", command)
    until(lambda: shell.has_read(1), instead=lambda: follow.err)
    assert follow.end() == 0, follow.err
    assert json.loads(shell.file("given"))["states"] == {} and shell.file("type") == "snapshot\n"
    assert json.loads(shell.file("status"))["epoch"] == 1


def test_sigterm_lets_the_running_command_finish_and_marks_its_message(shell):
    shell.publish("a")
    follow = shell.start("follow", "--from", "1", "--exec", "touch begun; while ! test -e go; do sleep 0.05; done")
    until(lambda: (shell.cwd / "begun").exists(), instead=lambda: follow.err)
    follow.process.send_signal(signal.SIGTERM)
    (shell.cwd / "go").touch()
    follow.process.wait(PATIENCE_S)  # a second signal would end it at once
    assert follow.end() == 0
    assert shell.node()["read"] == 1


def test_a_killed_follower_gets_again_what_it_had_not_marked(shell):
    shell.publish("a")
    killed = shell.start(
        "follow", "--from", "1", "--exec", "echo ran >>ran; kill -9 $PPID; sleep 0.1", KMQ_SESSION_TTL="1s"
    )
    assert killed.process.wait(PATIENCE_S) == -signal.SIGKILL
    again = shell.start("follow", "--from", "1", "--exec", "echo again >>ran")
    until(lambda: shell.has_read(1), instead=lambda: again.err)
    assert again.end() == 0 and shell.file("ran") == "ran\nagain\n"


def test_a_second_follower_of_a_node_is_told_who_follows(shell):
    first = shell.start("follow")
    first.wait(lambda first: "snapshot" in first.out)
    second = shell.run("follow")
    assert second.returncode == BUSY and second.stdout == b""
    assert second.stderr.decode().startswith("kmq: broker a has a subscriber already: ")
    assert second.stderr.decode().rstrip().endswith(f"/{first.process.pid}")
    assert first.end() == 0


def test_a_reader_that_leaves_ends_the_follower_at_once(shell):
    shell.publish("a")
    done = subprocess.run(
        ["bash", "-c", "set -o pipefail; kmq bq follow --json --from 1 | head -1"],
        env=shell.env,
        cwd=shell.cwd,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["epoch"] == 1, done.stderr
    assert shell.node()["holder"] == ""


def test_consul_watch_calls_receive(shell):
    shell.publish("a", "1")
    command = "kmq bq receive --exec 'echo \"$BQ_EPOCH $BQ_TYPE\" >>ran; test $BQ_EPOCH != 2 || test -e mended'"
    watch = shell.start("consul", "watch", "-type=keyprefix", f"-prefix=kmq/{shell.cluster}/bq/", command)
    until(lambda: shell.file("ran") == "1 snapshot\n", instead=lambda: watch.err + watch.out)
    until(lambda: shell.has_read(1))
    shell.publish("b", "2")
    until(lambda: shell.file("ran").count("2 b") >= 2, instead=lambda: watch.err + watch.out)
    assert "exit code 1" in shell.node()["error"]
    shell.publish("c", "3")
    (shell.cwd / "mended").touch()
    until(lambda: shell.has_read(3), instead=lambda: watch.err + watch.out)
    assert shell.file("ran").splitlines()[-1] == "3 c"
    watch.end()


def test_receive_prints_what_is_new_and_ends(shell):
    shell.publish("a", "1")
    watch = ["consul", "watch", "-type=keyprefix", f"-prefix=kmq/{shell.cluster}/bq/"]
    given = subprocess.run(watch, env=shell.env, capture_output=True, timeout=PATIENCE_S, check=True).stdout
    done = shell.run("receive", stdin=given)
    assert done.returncode == 0 and json.loads(done.stdout)["type"] == "snapshot", done.stderr
    assert shell.run("receive", stdin=given).stdout == b""
    other = shell.run("receive", stdin=given, KMQ_CLUSTER="other")
    assert other.returncode == CONFIG and b"watch -prefix=kmq/other/bq/" in other.stderr
    wrong = shell.run("receive", stdin=b"no array")
    assert wrong.returncode == CONFIG and wrong.stderr.startswith(b"kmq: stdin: ") and wrong.stderr.count(b"\n") == 1


def test_a_message_that_is_too_long_or_misnamed_is_refused_in_one_line(shell):
    long = shell.run("publish", "big", "-", stdin=b"x" * 380_001)
    assert long.returncode == CONFIG and b"at most 380,000" in long.stderr and long.stderr.count(b"\n") == 1
    for name in ("no blanks", "snapshot"):
        done = shell.run("publish", name)
        assert done.returncode == CONFIG and f"type '{name}'" in done.stderr.decode()
    assert json.loads(shell.run("status", "--json").stdout)["epoch"] == 0


@pytest.mark.parametrize("words", [["publish", "a"], ["follow"], ["receive"], ["status"]])
def test_with_nothing_configured_one_line_says_what_to_set(shell, words):
    done = shell.run(*words, KMQ_CONSUL="", KMQ_CLUSTER="")
    assert done.returncode == CONFIG and done.stdout == b""
    assert done.stderr.decode() == (
        "kmq: KMQ_CONSUL and KMQ_CLUSTER not set; for development: consul agent -dev, then"
        " export KMQ_CONSUL=127.0.0.1:8500 KMQ_CLUSTER=dev\n"
    )


@pytest.mark.parametrize("words", [["publish", "a"], ["follow"], ["receive"], ["status"]])
def test_without_the_extra_one_line_says_what_to_install(shell, tmp_path, words):
    (tmp_path / "h11.py").write_text("raise ModuleNotFoundError(\"No module named 'h11'\", name='h11')\n")
    done = shell.run(*words, PYTHONPATH=str(tmp_path))
    assert done.returncode == CONFIG
    needs = b"kmq: No module named 'h11'; the Broadcast Queue needs: pip install "
    assert done.stderr.startswith(needs) and done.stderr.endswith(b"[cluster]'\n") and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("value", ["abc", "9" * 20])
def test_an_epoch_that_kmq_did_not_write_is_named_in_one_line(shell, value):
    key = f"kmq/{shell.env['KMQ_CLUSTER']}/epoch"
    url = f"http://{shell.env['KMQ_CONSUL']}/v1/kv/{key}"
    with urllib.request.urlopen(urllib.request.Request(url, value.encode(), method="PUT"), timeout=PATIENCE_S):
        says = f"key {key}: {value!r} is no epoch; KMQ did not write it"
    for words in (("publish", "a"), ("status",)):
        done = shell.run(*words)
        [line] = done.stderr.decode().splitlines()
        assert done.returncode == RETRY and says in line
    follow = shell.start("follow")
    follow.wait(lambda follow: says in follow.err)
    assert "Traceback" not in follow.err and follow.process.poll() is None


@pytest.mark.parametrize(
    ("type", "how"),
    [("state", "set, topics or token"), *((each, f"run {each}") for each in ("verify", "compact", "retain"))],
)
def test_a_type_that_a_fleet_acts_on_is_refused_and_the_right_command_named(shell, type, how):
    done = shell.run("publish", type, "x")
    [line] = done.stderr.decode().splitlines()
    assert done.returncode == CONFIG and line.endswith(f"publish it with: kmq fleet {how}")
    assert json.loads(shell.run("status", "--json").stdout)["epoch"] == 0


def test_a_web_server_that_is_no_consul_is_not_taken_for_an_empty_one(shell, tmp_path):
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            done = shell.run("status", KMQ_CONSUL=f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
    assert done.returncode == RETRY and done.stdout == b""
    [line] = done.stderr.decode().splitlines()
    assert "what answers at KMQ_CONSUL is no Consul: 404" in line


def test_without_consul_publish_and_status_end_with_one_line_and_follow_waits(shell):
    shell.env |= {"KMQ_CONSUL": "127.0.0.1:1"}
    for words in (["publish", "a"], ["status"]):
        done = shell.run(*words)
        assert done.returncode == RETRY, done.stderr
        assert done.stderr.startswith(b"kmq: Consul at http://127.0.0.1:1: ") and done.stderr.count(b"\n") == 1
    follow = shell.start("follow")
    follow.wait(lambda follow: "tried again until it is back" in follow.err)
    assert follow.end() == 0 and follow.err.count("\n") == 1


@pytest.mark.parametrize("command", ["publish", "follow", "receive", "status"])
def test_help_has_examples(shell, command):
    done = shell.run(command, "--help", COLUMNS="80")
    assert done.returncode == 0 and b"Examples:" in done.stdout and b"kmq bq" in done.stdout


def test_the_examples_of_help_work_when_pasted(shell):
    pasted = [
        "kmq bq publish greeting hello",
        "echo '{\"limit\": 5}' | kmq bq publish limits -",
        "kmq bq publish greeting hello --timeout 30",
        "kmq bq status",
        "kmq bq status --json",
        "kmq bq follow --json --from 1 | head -3",
    ]
    helps = b"".join(
        shell.run(command, "--help", COLUMNS="200").stdout for command in ("publish", "follow", "receive", "status")
    ).decode()
    for line in pasted:
        assert line in helps
        done = subprocess.run(["bash", "-c", line], env=shell.env, cwd=ROOT, capture_output=True, timeout=PATIENCE_S)
        assert done.returncode == 0 and done.stdout, (line, done.stderr)


def test_a_follower_that_was_interrupted_has_given_its_place_back(shell):
    def holder():
        return (shell.node() or {}).get("holder", "")

    for _ in range(3):
        follow = shell.start("follow", KMQ_SESSION_TTL="30s")  # a place that is not given back stays taken for long
        end = f"/{follow.process.pid}"
        until(lambda end=end: holder().endswith(end), instead=lambda follow=follow: follow.err)
        assert follow.end(signal.SIGINT) == INTERRUPTED
