"""Settings: what is wrong is named with its limit, what Kubernetes injects is passed over, what is declared agrees."""

import os
import subprocess
import sys

import pytest
from brokers import environment

from kmq.config import settings, values
from kmq.config.values import KIB, MIB
from kmq.errors import ConfigError
from kmq.links.fifo import CAPACITY


def load(tmp_path, toml="", **environ):
    path = tmp_path / "kmq.toml"
    if toml:
        path.write_text(toml)
    return settings.load(environ, str(path))


def test_nothing_set_gives_the_documented_defaults(tmp_path):
    found = load(tmp_path)
    assert (found.data, found.pipes, found.instance, found.host) == ("./data", "./pipes", "kmq", "127.0.0.1")
    assert (found.port, found.egress_port, found.ack_port, found.status_port) == (5673, 5674, 5675, 5676)
    assert (found.http_port, found.grpc_port) == (8082, 8080)
    assert (found.policy, found.ring_slots, found.ring_bytes) == ("block", 8192, 4 * MIB)
    assert (found.max_line, found.fsync, found.segment_bytes, found.data_quota) == (MIB, 0.0, 1 << 30, 0)
    assert (found.segment_age, found.retention_age, found.retention_bytes) == (7 * 86400, float("inf"), 0)
    assert (found.dedupe_count, found.dedupe_age, found.producer_ttl) == (100_000, 86400, 30 * 86400)


def test_the_environment_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    found = load(tmp_path, 'KMQ_PORT = 1111\nKMQ_ACK_PORT = 2222\nKMQ_HOST = "::1"\n', KMQ_PORT="3333")
    assert (found.port, found.ack_port, found.host, found.http_port) == (3333, 2222, "::1", 8082)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KMQ_DTAA": "x"}, r"unknown setting KMQ_DTAA; did you mean KMQ_DATA\?"),
        ({"RB_SLOT": "8"}, r"unknown setting RB_SLOT; did you mean RB_SLOTS\?"),
        ({"KMQ_HTPP_PORT": "8083"}, r"unknown setting KMQ_HTPP_PORT; did you mean KMQ_HTTP_PORT\?"),
        ({"RB_OVERFLOW_POLICY": "drop"}, "RB_OVERFLOW_POLICY='drop': must be block or drop_oldest"),
        ({"RB_BYTES": "4 megs"}, "RB_BYTES='4 megs': expected a number of bytes"),
        ({"RB_BYTES": "-1"}, "RB_BYTES='-1': expected a number of bytes"),
        ({"RB_BYTES": "1.5 MiB"}, "RB_BYTES='1.5 MiB': expected a number of bytes"),
        ({"RB_BYTES": "3 MiB", "KMQ_MAX_LINE": "1048577"}, r"at least 3 x KMQ_MAX_LINE \(3145731 bytes\)"),
        ({"RB_SLOTS": "3"}, "RB_SLOTS='3': must be between 4 and 16777216"),
        ({"RB_SLOTS": "many"}, "RB_SLOTS='many': expected a whole number"),
        ({"KMQ_PORT": "65536"}, "KMQ_PORT='65536': must be between 0 and 65535"),
        ({"KMQ_MAX_LINE": "4095"}, "KMQ_MAX_LINE='4095': must be between 4096 and"),
        ({"KMQ_INSTANCE": "../x"}, "KMQ_INSTANCE='../x': must be 1 to 64 of"),
        ({"KMQ_INSTANCE": "a" * 65}, "KMQ_INSTANCE=.*must be 1 to 64 of"),
        ({"KMQ_DATA": ""}, "KMQ_DATA='': must not be empty"),
        ({"KMQ_FSYNC": "sometimes"}, "KMQ_FSYNC='sometimes': must be always, never or interval:<ms>"),
        ({"KMQ_FSYNC": "interval:0"}, "KMQ_FSYNC='interval:0': must be always, never or interval:<ms>"),
        ({"KMQ_DATA_QUOTA": "1 KiB"}, "KMQ_DATA_QUOTA='1 KiB': must be between 1048576 and"),
        ({"KMQ_DEDUPE_AGE": "1 year"}, "KMQ_DEDUPE_AGE='1 year': expected a whole number with ms, s, m, h or d"),
        ({"KMQ_DEDUPE_AGE": "0s"}, "KMQ_DEDUPE_AGE='0s': must not be 0"),
        ({"KMQ_PODBUS_TOPIC": "__x"}, "KMQ_PODBUS_TOPIC='__x': must be a topic name"),
    ],
)
def test_what_is_wrong_is_named_with_its_limit(tmp_path, environ, said):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, **environ)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("KMQ_DTAA = 1\n", "kmq.toml: unknown setting KMQ_DTAA"),
        ("data = 'x'\n", "kmq.toml: unknown setting data"),
        ("KMQ_PORT = true\n", "KMQ_PORT must be a string or a whole number"),
        ("KMQ_PORT = 1.5\n", "KMQ_PORT must be a string or a whole number"),
        ("KMQ_PORT = \n", "kmq.toml: "),
    ],
)
def test_the_file_is_checked_like_the_environment(tmp_path, toml, said):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, toml)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("64k", 64 * KIB), ("4 MiB", 4 * MIB), ("4MB", 4 * MIB), (" 2 g ", 2 << 30), ("10 b", 10)],
)
def test_units_of_bytes(text, value):
    assert values.parse_bytes(text) == value


def test_a_ring_must_hold_three_of_the_longest_line(tmp_path):
    assert load(tmp_path, RB_BYTES="3 MiB").ring_bytes == 3 * MIB
    with pytest.raises(ConfigError, match="RB_BYTES"):
        load(tmp_path, RB_BYTES=str(3 * MIB - 1))


# What the kubelet injects for Services named kmq, kmq-grpc and kmq-gateway.
LINKS = {
    "KMQ_SERVICE_HOST": "10.0.0.7",
    "KMQ_SERVICE_PORT": "5673",
    "KMQ_SERVICE_PORT_LINES": "5673",
    "KMQ_PORT": "tcp://10.0.0.7:5673",
    "KMQ_PORT_5673_TCP": "tcp://10.0.0.7:5673",
    "KMQ_PORT_5673_TCP_ADDR": "10.0.0.7",
    "KMQ_PORT_5673_TCP_PORT": "5673",
    "KMQ_PORT_5673_TCP_PROTO": "tcp",
    "KMQ_GRPC_PORT": "tcp://10.0.0.8:8080",
    "KMQ_GATEWAY_SERVICE_HOST": "10.0.0.9",
    "KMQ_GATEWAY_PORT": "tcp://10.0.0.9:80",
    "KMQ_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.9",
}


def test_service_links_of_kubernetes_are_no_settings(tmp_path):
    found = load(tmp_path, **LINKS, KMQ_ACK_PORT="7777")
    assert found.ignored == sorted(LINKS)
    assert (found.port, found.grpc_port, found.ack_port) == (5673, 8080, 7777)


def test_a_port_with_a_number_is_a_setting_also_beside_service_links(tmp_path):
    assert load(tmp_path, **LINKS | {"KMQ_PORT": "6000"}).port == 6000


def test_a_stage_says_in_one_log_line_which_service_links_it_passed_over(tmp_path):
    code = "from kmq.config import settings; from kmq.broker import stage; stage.Stage.__init__.__globals__['open_page'] = None; "
    code += "stage.Stage('ingress', settings.load())"
    env = environment(**LINKS)
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "event=" in line]
    assert len(said) == 1 and "event=service_links_ignored" in said[0]
    assert f"names={','.join(sorted(LINKS))}" in said[0]


def test_a_stage_says_which_settings_of_an_earlier_kmq_it_ignores(tmp_path):
    code = "from kmq.config import settings; from kmq.broker import stage; stage.open_page = None; "
    code += "stage.Stage('ingress', settings.load())"
    given = environment(SLEEP_SHORT=0.01)
    done = subprocess.run([sys.executable, "-c", code], env=given, cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "event=" in line]
    assert len(said) == 1 and "level=warn" in said[0] and "names=SLEEP_SHORT" in said[0]
    show = [sys.executable, "-m", "kmq", "config", "show"]
    shown = subprocess.run(show, env=given, cwd=tmp_path, capture_output=True, text=True)
    assert "not settings any more, so without effect: SLEEP_SHORT" in shown.stdout


def test_environment_gives_a_child_the_same_settings_in_another_directory(tmp_path):
    ours = load(tmp_path, KMQ_DATA="d", RB_OVERFLOW_POLICY_DURABLE="drop_oldest", RB_BYTES="8 MiB")
    theirs = settings.load(ours.environment(), str(tmp_path / "none.toml"))
    assert theirs.data == os.path.abspath("d") and theirs.pipes == os.path.abspath("pipes")
    same = [row.attribute for row in settings.SETTINGS if row.attribute not in ("data", "pipes")]
    assert [getattr(theirs, name) for name in same] == [getattr(ours, name) for name in same]


def test_every_setting_is_declared_once_with_a_default_that_is_legal():
    assert len({row.env for row in settings.SETTINGS}) == len(settings.SETTINGS)
    given = {"texts", "unused", "ignored", "retired", "given"}
    assert {row.attribute for row in settings.SETTINGS} == set(settings.Settings.__annotations__) - given
    for row in settings.SETTINGS:
        assert row.default == "" or row.parse(row.default) is not None


def test_pipe_buf_is_the_one_of_this_machine(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert os.pathconf(tmp_path / "fifo", "PC_PIPE_BUF") == values.PIPE_BUF
    assert CAPACITY % values.PIPE_BUF == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("always", 0.0), ("never", float("inf")), ("interval:1", 0.001), ("interval:250", 0.25)]
)
def test_fsync_says_how_long_a_record_may_wait_for_it(tmp_path, text, seconds):
    assert load(tmp_path, KMQ_FSYNC=text).fsync == seconds


def test_a_child_gets_the_settings_as_they_were_written_and_its_paths_absolute(tmp_path):
    found = load(tmp_path, KMQ_FSYNC="interval:5", RB_BYTES="8 MiB", KMQ_TOKENS="tokens.txt")
    again = settings.load(found.environment(), str(tmp_path / "none.toml"))
    assert (again.fsync, again.ring_bytes, again.retention_age) == (0.005, 8 * MIB, float("inf"))
    assert again.tokens.startswith("/") and again.data.startswith("/") and again.policy_framed == ""
