"""The probes: what a container's kubelet is told, and what it costs to ask."""

import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from brokers import environment

from kmq import probe
from kmq.broker.stats import ADMISSIONS, FRESH_S, PROCESSES, STATES, StatsPage
from kmq.config.settings import load
from kmq.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from kmq.log.identity import open_data

ROOT = Path(__file__).resolve().parents[2]
# Beside what a stage must not import (test_house.py): what a look at one page of shared memory has no need of.
HEAVY = {"posix_ipc", "ctypes", "socket", "json", "zlib", "asyncio", "logging", "typing", "inspect", "pathlib"}


@pytest.fixture
def environ(data, tmp_path):
    """Settings of one broker, as environment."""
    return {"KMQ_INSTANCE": f"unit-probe-{os.getpid()}", "KMQ_DATA": data, "KMQ_PIPES": f"{tmp_path}/pipes"}


@pytest.fixture
def settings(environ):
    return load(environ, "/nonexistent.toml")


@pytest.fixture
def page(settings):
    """The stats page of processes that are all ready."""
    page = StatsPage(settings.instance, open_data(settings.data), settings.data)
    for number, row in enumerate(page.rows.values(), 1):
        row.pid, row.state = number, STATES.index("ready")
        row.heartbeat = time.monotonic_ns() + 10**12  # ahead: however long a test takes, it lives
    yield page
    os.unlink(page.path)


@pytest.fixture
def readyz(page):
    """A gateway's HTTP port that answers /readyz with `status` and `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(self.server.status if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(self.server.body)

        def log_message(self, *args): ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.status, server.body = 200, b"{}"
        page.rows["gateway"].port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def silent_for(row, seconds):
    row.heartbeat = time.monotonic_ns() - int(seconds * 1e9)


@pytest.mark.parametrize("name", PROCESSES)
def test_each_process_answers_for_itself_alone(settings, page, readyz, name):
    for other in PROCESSES:
        if other != name:
            page.rows[other].wipe()
    assert probe.reason("live", name, settings) == ""
    assert probe.reason("ready", name, settings)[:6] == ("down: " if name == "gateway" else "")  # it is asked for all
    page.rows[name].wipe()
    assert probe.reason("live", name, settings) == f"{name} has not been started"


@pytest.mark.parametrize("state", sorted(set(STATES) - {"ready", "following"}))
def test_what_starts_recovers_waits_or_drains_is_alive_and_not_ready(settings, page, state):
    page.rows["router"].state = STATES.index(state)
    assert probe.reason("live", "router", settings) == ""
    assert probe.reason("ready", "router", settings).startswith(
        {"": "starting: ", "unled": "no_leader: "}.get(state, f"{state}: ")
    )


def test_who_has_no_work_because_another_broker_leads_is_ready(settings, page):
    page.rows["framer"].state = STATES.index("following")
    assert probe.reason("live", "framer", settings) == probe.reason("ready", "framer", settings) == ""


@pytest.mark.parametrize("lacks", ["disk_full", "quota"])
def test_who_refuses_for_lack_of_room_is_alive_and_not_ready_and_says_what_to_do(settings, page, lacks):
    page.rows["ingress"].admission = ADMISSIONS.index(lacks)
    assert probe.reason("live", "ingress", settings) == ""
    assert re.fullmatch(rf"{lacks}: .+; .+ resumes by itself", probe.reason("ready", "ingress", settings))
    assert probe.reason("ready", "framer", settings) == "", "it does its job"


@pytest.mark.parametrize(("kind", "longest_s"), [("live", probe.LIVE_S), ("ready", FRESH_S)])
def test_silence_counts_from_its_limit_on(settings, page, kind, longest_s):
    silent_for(page.rows["framer"], longest_s - 1)
    assert probe.reason(kind, "framer", settings) == ""
    silent_for(page.rows["framer"], longest_s + 0.01)
    assert f"framer has given no sign of life for {longest_s:.0f}." in probe.reason(kind, "framer", settings)


def test_the_page_of_another_data_directory_or_none_says_nothing_about_us(settings, page, environ, tmp_path):
    theirs = load(environ | {"KMQ_DATA": f"{tmp_path}/other"}, "/nonexistent.toml")
    nobody = load(environ | {"KMQ_INSTANCE": "unit-probe-nobody"}, "/nonexistent.toml")
    for other in (theirs, nobody):
        assert probe.reason("live", "ingress", other) == "ingress has not been started"


def test_the_gateway_is_ready_when_the_broker_is(settings, page, readyz):
    assert probe.reason("ready", "gateway", settings) == ""
    readyz.status, readyz.body = 503, b'{"ok": false, "reason": "router is recovering", "advice": "wait"}'
    assert probe.reason("ready", "gateway", settings) == "router is recovering; wait"
    assert probe.reason("live", "gateway", settings) == ""


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff"])
def test_an_answer_that_is_none_is_not_ready(settings, page, readyz, body):
    readyz.status, readyz.body = 503, body
    assert probe.reason("ready", "gateway", settings).startswith("gateway does not answer: ")


def test_a_gateway_that_nobody_can_connect_to_is_not_ready(settings, page, readyz):
    readyz.server_close()
    assert probe.reason("ready", "gateway", settings).startswith("gateway does not answer: ")


def ask(environ, *argv, code="import sys; from kmq.probe import main; sys.exit(main(sys.argv[1:]))"):
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(command, env=environment(**environ), cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_exit_code_is_the_answer_and_the_reason_is_printed(environ, page):
    done = ask(environ, "live", "durability")
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_OK, "", "")
    page.rows["durability"].state = STATES.index("disk_full")
    done = ask(environ, "ready", "durability")
    assert (done.returncode, done.stdout[:11], done.stderr) == (EXIT_FAILED, "disk_full: ", "")


@pytest.mark.parametrize("argv", [(), ("live",), ("alive", "router"), ("live", "broker"), ("live", "router", "x")])
def test_a_question_that_is_none_is_answered_with_the_usage(environ, argv):
    done = ask(environ, *argv)
    assert (done.returncode, done.stdout) == (EXIT_CONFIG, "")
    assert (
        done.stderr
        == "usage: python -m kmq.probe live|ready ingress|framer|durability|router|gateway|agent|replica|tier\n"
    )


def test_a_wrong_setting_is_the_answer(environ):
    done = ask(environ | {"RB_SLOT": "8"}, "live", "router")
    assert (done.returncode, done.stderr) == (EXIT_CONFIG, "")
    assert done.stdout == "environment: unknown setting RB_SLOT; did you mean RB_SLOTS?\n"


def test_asking_imports_little(environ, page):
    code = "import sys; from kmq.probe import main; main(sys.argv[1:]); print(*sys.modules)"
    loaded = set(ask(environ, "ready", "router", code=code).stdout.split())
    assert {"kmq.probe", "kmq.broker.stats"} <= loaded
    assert not loaded & HEAVY and not [name for name in loaded if name.startswith(("kmq.links", "kmq.log"))]
