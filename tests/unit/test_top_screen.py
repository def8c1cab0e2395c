"""What `kmq top` draws: pure, from a document and a size."""

import itertools
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from kmq.cli.top import command, screen, terminal
from kmq.cli.top.snapshot import parse

SIZES = [(80, 24), (120, 40), (60, 20), (20, 5), (300, 100)]
HOSTILE = "\x1b[2J\x07\r\n\x9b31m\u202e日本" + "ü" * 300


def stage(name, state="ready", **more):
    counts = {"restarts": 0, "connections": 3, "seq": 12_345, "refused": 0, "dropped": 0, "pid": 7, "started": 1}
    return {"name": name, "state": state} | counts | more


def finding(code="quota", severity="error", about="data"):
    return {"code": code, "severity": severity, "about": about, "why": "no room " * 9, "advice": "raise KMQ_DATA_QUOTA"}


def link(name, fill=0.5, messages=None):
    return {"name": name, "bytes": 2048, "capacity": 4096, "messages": messages, "fill": fill}


def document(name="orders", **status):
    """An overview with everything in it."""
    shown = {
        "ready": not status.get("findings"),
        "supervisor": "up",
        "instance": name,
        "version": "1.0",
        "stages": [stage(each) for each in ("ingress", "framer", "durability", "router", "gateway")],
        "links": [link("raw"), link("received", 0.9), link("framed", 0.25, 12), link("durable", 0.0, 0)],
        "findings": [],
        "kafka": {
            "port": 9092,
            "connections": 7,
            "producers": 1234,
            "batches_from_cache": 55,
            "batches_from_lines": 66,
        },
    }
    moved = {"messages": 20_000.0, "bytes": 3e6}
    return {
        "as_of": time.time(),
        "status": shown | status,
        "rates": dict.fromkeys(("ingress", "framer", "durability", "router"), moved),
        "latency": {"ack": {"p50": 0.0011, "p99": 0.0042, "count": 9}, "sync": None},
        "topics": [{"topic": f"{name}{n}", "rate": float(n), "bytes_rate": 9.0, "records": n} for n in range(20)],
        "intakes": [
            {"port": 5140, "kind": "tcp", "topic": name, "rate": 12_345.0, "bytes_rate": 2048.0}
            | {"connections": 4, "refused": 66, "dropped": 0}
        ],
        "topics_total": 10_000,
        "groups": [{"group": name, "state": "stable", "members": 2, "lag": 5, "lag_seconds": 61.0}],
        "groups_total": 1,
        "events": [{"id": 1, "at": 5.0, "kind": "restarted", "about": name, "text": name}],
    }


def plain(lines, width=80, is_ascii=False):
    painter = terminal.Painter(Console(color_system=None), is_ascii)
    return [painter.line(line, width) for line in lines]


def drawn(found, view="p", width=80, height=24, is_ascii=False, scroll=0):
    snapshot = parse(found)
    return plain(screen.draw(snapshot, screen.View(view, scroll), width, height), width, is_ascii)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", [*screen.VIEWS, "?"])
def test_a_screen_is_exactly_as_large_as_the_terminal(size, view):
    width, height = size
    many = [finding(f"code{n}") for n in range(9)]
    for found in (document(), document(HOSTILE, findings=many), {}):
        for is_ascii in (False, True):
            lines = drawn(found, view, width, height, is_ascii)
            assert len(lines) == height
            assert {cell_len(line) for line in lines} == {width}


@pytest.mark.parametrize("view", screen.VIEWS)
def test_nothing_in_a_name_is_printed_raw(view):
    stages = [stage(HOSTILE), stage("ingress", HOSTILE), stage("router")]
    found = document(HOSTILE, findings=[finding(HOSTILE, about=HOSTILE)], stages=stages, links=[link(HOSTILE)])
    found["notes"] = {"groups": HOSTILE}
    for is_ascii in (False, True):
        text = "".join(drawn(found, view, 120, 40, is_ascii))
        assert text.isprintable() and (text.isascii() or not is_ascii)
    assert "\\x1b[2J" in "".join(drawn(document(HOSTILE), "t", 120))


def test_the_pipeline_shows_state_rate_and_fill_of_every_link_and_how_long_things_take():
    text = "\n".join(drawn(document()))
    for part in ("─▶ ingress", "raw", "framer", "framed", "durability", "durable", "router", "ready"):
        assert part in text, part
    assert "2.9 MiB/s" in text and text.count("20,000/s") == 3
    assert "90%" in text and "4.0 KiB" in text  # FIFO and ring are one link: the fuller one counts
    assert "25%" in text and "12 msg" in text
    assert "ack 1.1 ms / 4.2 ms  sync - / -" in text
    assert "orders19" in text and "stable" in text and "restarted" in text


@pytest.mark.parametrize("width", [80, 120])
def test_restarts_long_seqs_and_fast_rates_are_whole_and_apart(width):
    stages = [stage(name, restarts=77, seq=9_876_543_210) for name in ("ingress", "framer", "durability", "router")]
    found = document(stages=stages)
    found["rates"] = {name: {"messages": 1_830_000.0, "bytes": 180e6} for name in found["rates"]}
    words = " ".join(drawn(found, width=width)).split()
    assert words.count("9876543210") == words.count("1,830,000/s") == 3
    assert words.count("77") == words.count("restarts") == 4 and "…" not in "".join(words)


@pytest.mark.parametrize(("width", "height"), SIZES[:3])
def test_what_is_wrong_and_what_to_do_is_on_every_size(width, height):
    text = "\n".join(drawn(document(findings=[finding(), finding("damage_found", "warning")]), "p", width, height))
    assert "not ready, 1 error, 1 warning" in text
    assert "quota: no room" in text and "do: raise KMQ_DATA_QUOTA" in text and "damage_found" in text


@pytest.mark.parametrize("view", ["p", "c"])
def test_each_intake_shows_its_rate_and_what_was_refused_and_dropped(view):
    lines = drawn(document(), view, height=40)
    [(title, row)] = [pair for pair in itertools.pairwise(lines) if pair[0].startswith("intakes (1) ")]
    assert title.split()[2:] == ["lines/s", "bytes/s", "connected", "refused", "dropped"]
    assert row.split() == ["5140/tcp", "orders", "12,345", "2.0", "KiB", "4", "66", "0"]
    assert "intakes" not in "".join(drawn(document() | {"intakes": []}, view, height=40))


def test_the_port_for_clients_of_kafka_shows_who_is_there_and_what_the_cache_gives():
    lines = drawn(document(), "c", height=40)
    [(title, row)] = [pair for pair in itertools.pairwise(lines) if pair[0].startswith("clients of Kafka")]
    assert title.split()[3:] == ["connected", "producers", "from", "cache", "from", "lines"]
    assert row.split() == ["port", "9092", "7", "1,234", "55", "66"]
    assert "kafka 9092, 7 connected" in "".join(drawn(document()))
    without = document(kafka=None)
    assert "afka" not in "".join(drawn(without, "c", height=40) + drawn(without))


def test_how_far_the_copy_is_is_said_where_there_is_one():
    copy = {"seq": 12_345, "behind": 0, "age_s": 0.0, "problem": "", "objects": 0, "bytes": 0, "behind_bytes": 0}
    assert "tier  seq 12345, 0 msg behind" in "".join(drawn(document(copy=copy)))
    copy |= {"behind": 20_000, "age_s": 45.0, "bytes": 3 << 30, "behind_bytes": 1 << 20}
    text = "".join(drawn(document(copy=copy)))
    assert "20,000 msg behind for 45 s; topics 3.0 GiB, 1.0 MiB behind" in text
    assert "tier" not in "".join(drawn(document(copy=None)))


def test_a_broker_without_newer_values_is_drawn_with_a_dash_for_each():
    old = {"ready": True, "stages": [{"name": "framer", "state": "ready"}], "backlog": {"framed_messages": 7}}
    old |= {"reasons": [], "warnings": [{"code": "certificate_expires", "why": "soon", "advice": "renew"}]}
    text = "\n".join(drawn({"as_of": 1.0, "status": old}))
    assert "7 msg" in text and "ack - / -" in text and "certificate_expires: soon" in text


WRONG = [None, 5, "x", [], {}, float("nan"), float("inf"), 10**400, -1, True, [None], {"name": None}]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: str(value)[:8])
def test_a_document_of_any_shape_is_drawn(value):
    found = document(findings=[finding()])
    spoiled = [value, *(found | {key: value} for key in found)]
    spoiled += [found | {"status": found["status"] | {key: value}} for key in found["status"]]
    spoiled += [found | {"topics": [{"topic": value, "rate": value, "records": value}]}]
    spoiled += [found | {"intakes": [dict.fromkeys(("port", "kind", "topic", "rate", "refused"), value)]}]
    kafka = dict.fromkeys(("port", "connections", "producers"), value)
    spoiled += [found | {"status": found["status"] | {"kafka": kafka}}]
    spoiled += [found | {"events": [{"at": value, "text": value}], "groups": [{"lag_seconds": value}]}]
    for each in spoiled:
        for view in screen.VIEWS:
            assert len(drawn(each, view)) == 24


def test_a_snapshot_is_bounded_however_much_a_server_sends():
    big = document(findings=[finding("x" * 100_000)] * 5_000)
    big["topics"] = [{"topic": "y" * 100_000}] * 5_000
    found = parse(big)
    assert len(found.topics) <= 200 and len(found.findings) <= 200
    assert max(len(found.topics[0].topic), len(found.findings[0].code)) <= 2000


def test_a_table_scrolls_under_its_title_and_stops_at_its_end():
    wanted, snapshot = screen.View("t"), parse(document())
    for _ in range(5):
        wanted = command.turned(wanted, "down", snapshot, 24)
    lines = drawn(document(), "t", scroll=wanted.scroll)
    assert lines[1].startswith("topics (20 of 10,000)") and lines[2].startswith("orders14")
    for _ in range(50):
        wanted = command.turned(wanted, "page down", snapshot, 24)
    assert drawn(document(), "t", scroll=wanted.scroll)[2].startswith("orders0")
    assert command.turned(wanted, "home", snapshot, 24).scroll == 0
    assert command.turned(wanted, "g", snapshot, 24) == screen.View("g")
    assert command.turned(wanted, "escape", snapshot, 24) == screen.View("p")


def test_keys_that_are_unknown_or_cut_do_nothing():
    typed = b"t\x1b[A\x1bOB\x1b[5~\x1b[1;5C\x1b[200~q\x1b["
    assert list(terminal.keys(typed)) == ["t", "up", "down", "page up", "q"]
    assert list(terminal.keys(b"\x1b")) == ["escape"] and list(terminal.keys(b"\xff\xc3")) == ["�", "�"]


def test_a_follower_has_no_state_that_looks_like_a_fault():
    assert [screen.state_style(state) for state in ("ready", "following", "unled", "silent")] == [
        *("good", "good", "warn", "bad")
    ]


def test_colours_are_those_of_the_terminal_and_none_with_no_color(monkeypatch):
    line = screen.draw(parse(document(findings=[finding()])), screen.View(), 80, 24)[0]
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = terminal.Painter(Console(force_terminal=True, color_system="256"), False).line(line, 80)
    assert "\x1b[1;31m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain_line = terminal.Painter(Console(force_terminal=True, color_system="256"), False).line(line, 80)
    assert "31m" not in plain_line and "not ready" in plain_line


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (screen.count(None), "-"),
        (screen.count(9_999_999), "9,999,999"),
        (screen.count(12_300_000), "12.3M"),
        (screen.per_second(0.2), "0.2/s"),
        (screen.per_second(0), "0/s"),
        (screen.size(1023), "1,023 B"),
        (screen.size(1 << 20), "1.0 MiB"),
        (screen.duration(0.00085), "850 us"),
        (screen.duration(0.0012), "1.2 ms"),
        (screen.duration(0.99999), "1 s"),
        (screen.duration(7000), "117 m"),
        (screen.percent(0.0001), "1%"),
        (screen.percent(0), "0%"),
        (screen.bar(0.01, 4), "█░░░"),
        (screen.bar(None, 4), "░░░░"),
    ],
)
def test_numbers_in_few_cells(shown, text):
    assert shown == text
