"""The small things that would otherwise be found out in production: imports, names, answers, the sender's side."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import kmq
import stages
from kmq import errors
from kmq.client import lines
from kmq.config import settings, values
from kmq.config.settings import STAGES
from kmq.deadletters import redrive
from kmq.errors import ConfigError
from kmq.ingress.ports import answer
from kmq.links import fifo, layout
from kmq.message import record
from kmq.message import text as message_text

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Everything here would cost a stage start-up time or memory that no message needs.
HEAVY = {"rich", "typer", "click", "psutil", "asyncio", "http", "logging", "dataclasses", "argparse", "typing"}
HEAVY |= {"inspect", "tomllib", "json", "subprocess", "ssl", "multiprocessing", "uuid", "decimal", "pathlib"}


def test_kmq_and_stages_are_ours():
    assert pathlib.Path(kmq.__file__).parent == ROOT / "kmq"
    assert pathlib.Path(stages.__file__).parent == ROOT / "stages"


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_imports_nothing_heavy(name):
    code = f"import sys, runpy; runpy.run_module('stages.{name}', run_name='stage'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {module.partition(".")[0] for module in done.stdout.split()}
    assert "kmq" in loaded and "posix_ipc" in loaded
    assert not loaded & HEAVY
    assert name == "ingress" or "socket" not in loaded  # 400 KB


def test_a_stage_imports_links_and_the_log_but_no_other_stage():
    for name in STAGES:
        source = (ROOT / "stages" / f"{name}.py").read_text()
        assert not [other for other in STAGES if f"stages.{other}" in source.replace(f"stages.{name}", "")]


def test_the_gateways_help_starts_no_gateway_and_a_wrong_argument_is_refused(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "kmq.gateway", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)

    helped, wrong = run("--help"), run("--wiht", "1")
    assert helped.returncode == 0 and "usage: python -m kmq.gateway" in helped.stdout and helped.stderr == ""
    assert wrong.returncode == 2 and "unrecognized arguments: --wiht" in wrong.stderr
    assert not list(tmp_path.iterdir())


def test_pytest_alone_runs_no_soak():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/chaos/test_crash_points.py"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True).stdout
    assert "test_a_kill_at_a_random_line" in shown and "soak" not in shown.replace("deselected", "")


def test_the_exit_codes_each_have_a_name_and_a_verdict():
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_") and isinstance(value, int)}
    assert set(errors.EXIT_NAMES) == codes and len(set(errors.EXIT_NAMES.values())) == len(codes)
    assert errors.EXIT_RETRY not in errors.NO_RESTART and errors.EXIT_FAILED not in errors.NO_RESTART


def test_the_names_of_a_topic_fit_the_file_system():
    name = "A" * record.MAX_TOPIC + "-1023.log"
    assert len(name + ".new") <= os.pathconf("/", "PC_NAME_MAX")


def test_the_longest_stored_line_fits_a_block():
    """Also as dead.malformed with its header, at the smallest ring that the settings allow."""
    smallest = max(64 * values.KIB, 3 * values.PIPE_BUF)
    for max_line, ring_bytes in ((values.PIPE_BUF, smallest), (values.MIB, 3 * values.MIB)):
        assert max_line + record.MALFORMED_OVERHEAD + 64 <= ring_bytes // 2 - layout.HEADER


def test_a_header_of_dead_malformed_is_never_longer_than_its_allowance():
    reasons = ["control_byte", "empty_routing_key", "reserved_topic", "no_separator", "no_newline", "too_long"]
    assert max(len(record.malformed(r, b"\0", 1 << 63, 4096)) for r in reasons) < record.MALFORMED_OVERHEAD


def test_every_control_line_begins_with_a_byte_that_no_stored_line_begins_with():
    sender = fifo.Sender(b"1.2", b"p=me")
    for line in (fifo.lines(1, 2, 3), sender.messages(1, 2, 3, 4), sender.question(0)):
        assert line[:1] == fifo.CONTROL and fifo.CONTROL[0] in record.CONTROL
    assert all(record.refusal(bytes([byte]) + b"t|1|2|x") == "control_byte" for byte in record.CONTROL)


@pytest.mark.parametrize(
    ("question", "durable", "reply"),
    [
        (b"GET_ACK 5", 5, b"ACK\n"),
        (b"GET_ACK 5\r", 9, b"ACK\n"),
        (b"GET_ACK 6", 5, b"PENDING\n"),
        (b"GET_ACK 0", 5, b"PENDING\n"),
        (b"GET_ACK 1", 0, b"PENDING\n"),
        (b"GET_ACK", 5, b"ERR expected: GET_ACK <seq>\n"),
        (b"GET_ACK -1", 5, b"ERR expected: GET_ACK <seq>\n"),
        (b"GET_ACK 1.5", 5, b"ERR expected: GET_ACK <seq>\n"),
        (b"get_ack 1", 5, b"ERR expected: GET_ACK <seq>\n"),
        (b"", 5, b"ERR expected: GET_ACK <seq>\n"),
        (b"GET_ACK " + b"9" * 4096, 5, b"PENDING\n"),
        (b"\0\xff|", 5, b"ERR expected: GET_ACK <seq>\n"),
    ],
)
def test_answer(question, durable, reply):
    assert answer(question, durable) == reply


@pytest.mark.parametrize(
    ("template", "routing_key", "new"),
    [
        ("test.recovered_{key}", b"dead.letter_7", b"test.recovered_letter_7"),
        ("{routing_key}", b"dead.a.b", b"dead.a.b"),
        ("again.{topic}.{key}", b"dead.a.b", b"again.dead.a.b"),
        ("test", b"dead", b"test"),
        ("test.{key}", b"dead", b"test."),
        ("test.{key}", b"dead.\xff\xc3\xa9", b"test.\xff\xc3\xa9"),
    ],
)
def test_redrive_rewrites_the_routing_key(template, routing_key, new):
    assert redrive.rewrite(template, "dead", routing_key) == new


@pytest.mark.parametrize(
    "template",
    ["{nothing}", "{", "{}", "{key.x}", "{key[0]!z}", "", "../{key}", "append.{key}", "a|b", "a\nb", "!{key}"],
)
def test_redrive_refuses_what_gives_no_routing_key(template):
    with pytest.raises(ConfigError, match="--to"):
        redrive.rewrite(template, "dead", b"dead.k")


@pytest.mark.parametrize(
    "payload", [b"", b"plain", b"a|b", b"\r", b"\xff\xfe", b"new\nline", b"nul\0", bytes(range(256))]
)
def test_a_formatted_message_is_one_well_formed_line(payload):
    line = message_text.format_message(b"t.k", payload, b"7", ts=1.5)
    assert record.good_prefix(line) == len(line) and line.count(b"\n") == 1
    encoded = not payload or b"\0" in payload or b"\n" in payload
    assert line.startswith(b"t.k|1.500000|7;enc=b64|" if encoded else b"t.k|1.500000|7|" + payload)


def test_percent_encode_leaves_nothing_that_would_break_a_line():
    text = "".join(map(chr, range(256))) + "日本"
    encoded = message_text.percent_encode(text)
    assert encoded.isascii() and encoded.isprintable() and not set(encoded) & set("|; \n")
    assert message_text.percent_encode("order-7_x.y") == "order-7_x.y"


def test_read_port_says_where_it_looked(tmp_path):
    found = settings.load({"KMQ_PIPES": str(tmp_path), "KMQ_PORT": "0"}, "/nonexistent.toml")
    with pytest.raises(ConfigError, match=r"ingress\.port: no port there; is the broker up"):
        lines.read_port(found, "ingress", found.port)
    (tmp_path / "ingress.port").write_text("4711\n")
    assert lines.read_port(found, "ingress", found.port) == 4711
    assert lines.read_port(found, "ingress", 99) == 99


@pytest.mark.parametrize(
    "origin, command",
    [
        ({"url": "file://HERE", "dir_info": {"editable": True}}, "pip install --editable 'HERE[gateway]'"),
        ({"url": "file://HERE", "dir_info": {}}, "pip install 'HERE[gateway]'"),
        ({"url": "file:///gone/kmq-1-py3-none-any.whl"}, "pip install '<the checkout or the wheel of KMQ>[gateway]'"),
        (None, "pip install '<the checkout or the wheel of KMQ>[gateway]'"),
    ],
)
def test_the_advice_to_install_an_extra_names_where_kmq_came_from(tmp_path, monkeypatch, origin, command):
    info = tmp_path / "kmq-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kmq\nVersion: 1\n")
    wheel = tmp_path / "a b.whl"
    wheel.touch()
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin).replace("HERE", str(wheel).replace(" ", "%20")))
    monkeypatch.syspath_prepend(tmp_path)
    assert errors.pip_install("gateway") == command.replace("HERE", str(wheel))


def test_no_text_advises_a_name_that_no_index_has():
    files = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "kmq").rglob("*.py")]
    assert not [str(path) for path in files if "install 'kmq[" in (text := path.read_text()) or "install kmq" in text]
