"""`kmq top` on a real terminal before a real broker: keys, sizes, ends, and the terminal as it was before."""

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from brokers import PATIENCE_S, Broker
from rich.cells import cell_len
from waiting import attempts, meanwhile, until

_PLACED = re.compile(r"\x1b\[(\d+);1H|(\x1b\[2J)|(\x1b\[[0-9;?]*[A-Za-z])")
_CUT = re.compile(r"\x1b(\[[0-9;?]*)?\Z")  # a sequence whose end has not been read yet
INTERRUPTED = 130


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A broker with a gateway and some messages. The tests leave it up."""
    made = Broker(tmp_path_factory.mktemp("top") / "b")
    made.up()
    made.send_lines([b"orders.%d|0|%d|x" % (n, n) for n in range(50)])
    made.wait_routed(50)
    yield made
    made.close()


class Terminal:
    """`kmq top` on a pseudo-terminal, and what its screen shows."""

    def __init__(self, broker, *options, columns=80, rows=24, **env):
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.slave)
        self.raw, self.lines, self._rest, self._row = "", {}, "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        kept = {name: value for name, value in broker.env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            ["kmq", "top", *options],
            env=kept | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | env,
            cwd=broker.root,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            preexec_fn=self._own,
        )

    def _own(self):
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys):
        os.write(self.master, keys.encode())

    def look(self, seconds=0.05):
        """Read what was written, and return the screen."""
        while select.select([self.master], [], [], seconds)[0]:
            try:
                text = os.read(self.master, 65536)
            except OSError:  # the last process that had it is gone
                break
            text = self._decoder.decode(text)
            self.raw += text
            self._draw(self._rest + text)
            seconds = 0
        return "\n".join(self.lines.get(row, "") for row in range(1, 60))

    def _draw(self, text):
        cut = _CUT.search(text)
        text, self._rest = (text[: cut.start()], cut[0]) if cut else (text, "")
        at = 0
        for found in [*_PLACED.finditer(text), None]:
            if self._row:
                self.lines[self._row] += text[at : found.start() if found else None]
            if found is None:
                return
            at = found.end()
            if found[1]:
                self._row = int(found[1])
                self.lines[self._row] = ""
            elif found[2]:
                self.lines.clear()
                self._row = 0

    def until(self, *parts, absent=()):
        def shown():
            shown = self.look()
            is_all = all(part in shown for part in parts) and not any(part in shown for part in absent)
            return shown if is_all else None

        instead = lambda: f"{self.look()}\n{self.raw[-3000:]!r}"  # noqa: E731
        return until(shown, f"{parts} shown", instead, every_s=0, process=self.process)

    def ended(self):
        """Wait for the end; return the exit code. The terminal is as it was."""
        tries = attempts("its end", every_s=0)
        while self.process.poll() is None:
            next(tries)
            self.look()
        self.look()
        assert termios.tcgetattr(self.slave) == self.before
        assert self.raw.endswith("\x1b[0m\x1b[?25h\x1b[?1049l"), self.raw[-200:]
        assert "Traceback" not in self.raw
        return self.process.returncode

    def close(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()
        self.process.wait()
        for fd in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(fd)


@pytest.fixture
def top(broker):
    opened = []

    def start(*options, **given):
        opened.append(Terminal(broker, *options, **given))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_keys_turn_the_pages_and_q_gives_the_terminal_back(top, broker):
    screen = top()
    shown = screen.until("─▶ ingress", "router", "ready", "orders", "gateway")
    assert max(cell_len(line) for line in shown.splitlines()) <= 80
    for key, part in (("t", "records"), ("g", "lag time"), ("c", "connected"), ("l", "events"), ("?", "scroll")):
        screen.type(key)
        screen.until(part, absent=("─▶ ingress",))
    screen.type("p")
    screen.until("─▶ ingress")
    screen.type("q")
    assert screen.ended() == 0


def test_a_new_size_draws_anew_and_small_terminals_get_lines_instead_of_a_drawing(top):
    screen = top(columns=120, rows=40)
    screen.until("─▶ ingress")
    screen.resize(60, 20)
    shown = screen.until("═▶ raw", absent=("─▶ ingress",))
    assert max(cell_len(line) for line in shown.splitlines()) <= 60 and len(shown.rstrip().splitlines()) <= 20
    screen.resize(80, 24)
    screen.until("─▶ ingress")
    screen.type("q")
    assert screen.ended() == 0


@pytest.mark.parametrize(("how", "code"), [("\x03", INTERRUPTED), (signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)])
def test_every_end_gives_the_terminal_back(top, how, code):
    screen = top()
    screen.until("─▶ ingress")
    screen.type(how) if isinstance(how, str) else screen.process.send_signal(how)
    assert screen.ended() == code


def test_a_closed_terminal_ends_the_command(top):
    screen = top()
    screen.until("─▶ ingress")
    os.close(screen.slave)
    os.close(screen.master)
    assert screen.process.wait(timeout=PATIENCE_S) == 0


def test_a_terminal_that_takes_no_output_does_not_keep_the_command(top):
    screen = top(columns=200, rows=50)
    screen.until("─▶ ingress")
    tries, columns = attempts("a terminal that is full", every_s=0), 200
    while select.select([], [screen.slave], [], 0.3)[1]:  # nobody reads: fill what lies between
        columns = 399 - columns
        screen.resize(columns, 50)
        next(tries)
    screen.process.send_signal(signal.SIGTERM)
    assert screen.process.wait(timeout=PATIENCE_S) == 0
    assert termios.tcgetattr(screen.slave) == screen.before


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(top):
    screen = top()
    screen.until("─▶ ingress")
    screen.process.send_signal(signal.SIGTSTP)
    # Its process group is an orphan, which the kernel does not stop: it gives the terminal back and takes it again.
    until(lambda: (screen.look(), screen.raw.count("\x1b[?1049h") >= 2)[1], "the terminal taken again", every_s=0)
    assert screen.raw.index("\x1b[?1049l") < screen.raw.rindex("\x1b[?1049h")
    screen.until("─▶ ingress")
    screen.type("q")
    assert screen.ended() == 0


def test_a_terminal_without_utf8_gets_ascii_and_no_color_no_colours(top):
    screen = top(LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONIOENCODING="latin-1", NO_COLOR="1")
    screen.until("-> ingress", "=raw=")
    screen.type("q")
    assert screen.ended() == 0
    assert screen.raw.isascii() and not re.search(r"\x1b\[[0-9;]*3[0-9]m", screen.raw)


def test_it_says_that_the_broker_is_down_and_shows_it_again_when_it_is_up(top, new_broker):
    second = new_broker()
    second.gateway = False
    screen = Terminal(second)
    try:
        screen.until("down", "do: start it with: kmq up", "no gateway")
        second.up()
        second.send_lines([b"late|0|1|x"])
        screen.until("ready", "late", "seq 1", absent=("start it with",))
        second.kill("router")
        screen.type("l")
        screen.until("restarted", "router")
        second.down()
        screen.type("p")
        screen.until("do: start it with: kmq up")
        screen.type("q")
        assert screen.ended() == 0
    finally:
        screen.close()


def test_a_stage_that_hangs_is_named_with_what_to_do(top, broker):
    screen = top()
    screen.until("─▶ ingress", "router")
    router = psutil.Process(broker.pids()["router"])
    router.suspend()
    try:
        screen.until("not ready, 1 error", "silent", "do: if it was stopped: kill -CONT")
    finally:
        router.resume()
    screen.until("ready", absent=("do: if it was",))
    screen.type("q")
    assert screen.ended() == 0


def test_it_takes_little_of_a_core_and_no_more_memory_with_time(top):
    screen = top()
    screen.until("─▶ ingress")
    process = psutil.Process(screen.process.pid)
    used, began = sum(process.cpu_times()[:2]), time.monotonic()
    memory = process.memory_info().rss
    frames = screen.raw.count(" UTC")
    while screen.raw.count(" UTC") < frames + 5:
        screen.look()
        assert time.monotonic() < began + PATIENCE_S
    share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
    assert share < 0.25  # of a core, on a loaded machine; alone it is a tenth of that
    assert process.memory_info().rss - memory < 8 << 20


# --- for scripts, and elsewhere --------------------------------------------------------------------------------------


def test_once_prints_one_screen_as_wide_as_asked_and_nothing_that_moves_a_cursor(broker):
    shown = broker.kmq("top", "--once", COLUMNS="100")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "─▶ ingress" in shown.stdout and "orders" in shown.stdout and "\x1b" not in shown.stdout
    assert max(map(cell_len, shown.stdout.splitlines())) <= 100


def test_once_in_json_says_what_status_says(broker):
    document = json.loads(broker.kmq("top", "--once", "--json").stdout)
    status = json.loads(broker.kmq("status", "--json").stdout)
    assert document["as_of"] == document["status"]["as_of"] and document["status"].keys() == status.keys()
    assert [stage["state"] for stage in document["status"]["stages"]] == [s["state"] for s in status["stages"]]
    assert document["rates"]["router"]["messages"] == 0
    assert [(row["topic"], row["records"]) for row in document["topics"]] == [("orders", 50)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--once"),
        (("--json",), "--once"),
        (("--token", "x"), "--url"),
        (("--once", "--url", "ftp://x"), "--url"),
        (("--once", "--url", "http://x:1x"), "--url"),
        (("--once", "--url", "http://localhost:1", "--token", "@none"), "--token @none"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(broker, options, said):
    result = broker.kmq("top", *options)
    assert result.returncode == 78 and said in result.stderr and result.stderr.count("\n") == 1


class Gateway:
    """An HTTP server in place of a gateway elsewhere: answers with `status` and `body`."""

    def __init__(self):
        self.status, self.body, self.tokens = 200, b"{}", []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.tokens.append(self.headers.get("Authorization"))
                self.send_response(outer.status if self.path == "/api/overview" else 404)
                self.send_header("Content-Length", str(len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def gateway():
    made = Gateway()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_broker_elsewhere_is_shown_by_what_its_gateway_knows(broker, gateway, top, tmp_path):
    gateway.body = broker.kmq("top", "--once", "--json").stdout.encode()
    (tmp_path / "token").write_text("secret\n")
    shown = broker.kmq("top", "--once", "--url", gateway.url, "--token", f"@{tmp_path}/token")
    assert shown.returncode == 0 and "orders" in shown.stdout and "KMQ " + broker.instance in shown.stdout
    assert set(gateway.tokens) == {"Bearer secret"}
    screen = top("--url", gateway.url)
    screen.until("─▶ ingress", "orders")
    gateway.status = 503
    screen.until("answered 503", "orders")
    gateway.status = 200
    screen.until("orders", absent=("answered 503",))
    screen.type("q")
    assert screen.ended() == 0


@pytest.mark.parametrize(
    ("status", "code", "said"), [(404, 1, "older"), (401, 1, "--token"), (200, 75, "overview"), (500, 75, "500")]
)
def test_a_gateway_that_gives_no_overview_is_one_line(broker, gateway, status, code, said):
    gateway.status, gateway.body = status, b"[" * 100_000
    result = broker.kmq("top", "--once", "--url", gateway.url)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_what_a_stranger_at_the_url_says_is_never_printed_raw(broker, gateway):
    gateway.status, gateway.body = 403, json.dumps({"message": "no \x1b[2J\x07way"}).encode()
    result = broker.kmq("top", "--once", "--url", gateway.url)
    assert result.returncode == 1 and "no \\x1b[2J\\x07way" in result.stderr and "\x1b" not in result.stderr


def test_nobody_at_the_url_is_one_line_and_75(broker):
    result = broker.kmq("top", "--once", "--url", "http://127.0.0.1:1")
    assert result.returncode == 75 and "Connection refused" in result.stderr and result.stderr.count("\n") == 1


# --- the same numbers everywhere ------------------------------------------------------------------------------------


def metrics(broker):
    """Name with labels → value."""
    lines = broker.get("/metrics")[1].splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def shown(broker):
    """One thing → its values, by who shows it: top with and without the gateway, /metrics, status."""
    status = json.loads(broker.kmq("status", "--json").stdout)
    top = json.loads(broker.kmq("top", "--once", "--json").stdout)
    console = json.loads(broker.get("/api/overview")[1])
    scraped = metrics(broker)
    found = {}
    for name in ("messages", "bytes", "seq", "restarts"):
        for stage in ("framer", "durability", "router"):
            documents = {"status": status, "top": top["status"], "console": console["status"]}
            rows = {who: {row["name"]: row for row in each["stages"]}[stage] for who, each in documents.items()}
            metric = f'kmq_{name}{"" if name == "seq" else "_total"}{{stage="{stage}"}}'
            found[stage, name] = {who: row[name] for who, row in rows.items()} | {"metrics": scraped[metric]}
    for link in ("raw", "received", "framed", "durable"):
        documents = {"status": status, "top": top["status"], "console": console["status"]}
        rows = {who: {row["name"]: row for row in each["links"]}[link] for who, each in documents.items()}
        for name, metric in (("capacity", "kmq_link_capacity_bytes"), ("fill", "kmq_link_fill")):
            seen = {who: row[name] for who, row in rows.items()}
            found[link, name] = seen | {"metrics": scraped[f'{metric}{{link="{link}"}}']}
    for topic in ("same", "orders"):
        rows = {
            who: {row["topic"]: row for row in each["topics"]} for who, each in (("top", top), ("console", console))
        }
        for name in ("records", "bytes", "partitions"):
            found[topic, name] = {who: each.get(topic, {}).get(name) for who, each in rows.items()}
        found[topic, "records"]["metrics"] = scraped.get(f'kmq_topic_messages_total{{topic="{topic}"}}')
    lags = [value for name, value in scraped.items() if name.startswith('kmq_group_lag{group="seen"')]
    rows = {who: {row["group"]: row for row in each["groups"]} for who, each in (("top", top), ("console", console))}
    found["seen", "lag"] = {who: each.get("seen", {}).get("lag") for who, each in rows.items()} | {"metrics": sum(lags)}
    found["topics"] = {who: each["topics_total"] for who, each in (("top", top), ("console", console))}
    found["events"] = {
        who: [event["id"] for event in each["events"]] for who, each in (("top", top), ("console", console))
    }
    return found


def test_top_console_metrics_and_status_show_the_same_number_for_the_same_thing(broker):
    assert broker.kmq("topics", "create", "same", "--partitions", "3").returncode == 0
    broker.send_lines([b"same.%d|0|%d|x" % (n, n) for n in range(300)])
    broker.wait(lambda: metrics(broker).get('kmq_messages_total{stage="router"}', 0) >= 350, "all routed")
    assert broker.kmq("groups", "reset", "seen", "--topic", "same", "--to", "earliest").returncode == 0
    differing = {}

    def is_same():
        differing.clear()
        differing.update(
            {
                name: values
                for name, values in shown(broker).items()
                if len({*map(str, map(as_number, values.values()))}) > 1
            }
        )
        return not differing

    until(is_same, "the same everywhere", lambda: differing)
    assert shown(broker)["same", "records"] == {"top": 300, "console": 300, "metrics": 300.0}
    assert shown(broker)["seen", "lag"] == {"top": 300, "console": 300, "metrics": 300.0}


def as_number(value):
    return value if isinstance(value, list) or value is None else float(value)


def test_top_and_console_show_the_same_rates_while_messages_come(broker):
    rates = []

    def are_alike():
        top = json.loads(broker.kmq("top", "--once", "--json").stdout)
        console = json.loads(broker.get("/api/overview")[1])
        topics = [{row["topic"]: row for row in each["topics"]}.get("rated", {}) for each in (top, console)]
        rates[:] = [each["rates"]["router"]["messages"] for each in (top, console)]
        rates.extend(row.get("rate") or 0.0 for row in topics)
        return min(rates) > 0.5 * max(rates) > 100

    port = int((broker.pipes / "ingress.port").read_text())
    sock = socket.create_connection(("127.0.0.1", port))
    with sock, meanwhile(lambda: sock.sendall(b"rated.k|0|1|x\n" * 50), every_s=0.05):
        until(are_alike, "the same rates", lambda: rates)
