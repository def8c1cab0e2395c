"""`kmq redrive`, once and again: what it stores twice, what it does not, and what was dropped."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException

import pytest
from brokers import PATIENCE_S

JSON = {"Content-Type": "application/json"}


def fields(line):
    """(routing key, headers, payload) of a stored line; the id is header ""."""
    _, _, key, _, id, payload = line.split(b"|", 5)
    own, *headers = id.split(b";")
    return key, {b"": own, **dict(each.split(b"=", 1) for each in headers)}, payload


def test_an_idempotent_redrive_stores_once_however_often_it_runs(broker):
    broker.up()
    broker.send_lines([b"dead.letter_%d|0|m%d;a=b|lost|%d" % (n, n, n) for n in range(30)])
    broker.wait_routed(30)
    command = ["redrive", "dead", "--to", "test.{key}", "--idempotent", "--key", "letter_1*"]
    assert broker.kmq(*command).stdout == "redriven 11 of dead\n"
    assert broker.kmq(*command).stdout == "redriven 11 of dead; 11 of them were stored before\n"
    broker.send_lines([b"dead.letter_100|0||late"])
    broker.wait_routed(42)
    assert broker.kmq(*command).stdout == "redriven 12 of dead; 11 of them were stored before\n"
    broker.wait_routed(43)
    found = [fields(line) for line in broker.lines("test")]
    assert [key for key, _, _ in found] == [b"test.letter_%d" % n for n in (1, *range(10, 20), 100)]
    _, headers, payload = found[1]
    assert re.fullmatch(rb"redrive-[0-9a-f]{12}-dead-0", headers.pop(b"p"))
    assert headers == {b"": b"11", b"a": b"b", b"orig_id": b"m10", b"orig_seq": b"11"} and payload == b"lost|10"
    # Another selection, another key or another name is another redrive, also of older records.
    for other in (["--key", "letter_0"], ["--to", "test.again_{key}"], ["--name", "b"]):
        assert "stored before" not in broker.kmq(*command, *other).stdout
    broker.wait_routed(43 + 1 + 12 + 12)


def test_what_was_dropped_comes_back_as_new_messages_and_once(broker):
    broker.up(RB_OVERFLOW_POLICY_DURABLE="drop_oldest", RB_SLOTS=1024)
    router = broker.pids()["router"]
    os.kill(router, signal.SIGSTOP)
    broker.send_lines([b"test.k%d|0|%d|%d" % (n % 7, n, n) for n in range(5000)])
    broker.wait(lambda: int(broker.status()["durability"]["seq"]) == 5000, "all on disk")
    os.kill(router, signal.SIGCONT)
    broker.wait_routed(5000)
    ranges = [line.split("|") for line in (broker.data / "dropped.log").read_text().splitlines()]
    lost = {seq for _, first, last, _, _ in ranges for seq in range(int(first), int(last) + 1)}
    assert 0 < len(lost) < 5000
    queue = broker.lines("test")
    broker.down()
    broker.up()  # without drop_oldest: what comes back must not be dropped once more where the router is slow
    shown = broker.kmq("redrive", "--dropped", "--dry-run").stdout.splitlines()
    assert shown[-1] == f"would redrive {len(lost)} of what was dropped"
    assert shown[0] == f"test.k{(min(lost) - 1) % 7} -> test.k{(min(lost) - 1) % 7}"
    result = broker.kmq("redrive", "test", "--dropped", "--rate", "100000")
    assert (result.stdout, result.stderr) == (f"redriven {len(lost)} of what was dropped of test\n", "")
    broker.wait_routed(5000 + len(lost))
    again = broker.kmq("redrive", "test", "--dropped").stdout
    assert again == f"redriven {len(lost)} of what was dropped of test; {len(lost)} of them were stored before\n"
    assert broker.kmq("redrive", "nosuch", "--dropped").stdout == "redriven 0 of what was dropped of nosuch\n"
    assert broker.lines("test")[: len(queue)] == queue
    found = [fields(line) for line in broker.lines("test")[len(queue) :]]
    assert {int(headers[b"orig_seq"]) for _, headers, _ in found} == lost
    assert all(payload == headers[b"orig_id"] for _, headers, payload in found)
    assert len(broker.wal()) == 5000 + len(lost)


def test_what_never_came_to_the_wal_is_named_as_gone(broker):
    broker.up()
    broker.send_lines([b"test.k|0|1|x"])
    broker.wait_routed(1)
    broker.down()
    (broker.data / "dropped.log").write_text("framed|2|41|40|1700000000.000000\n")
    result = broker.kmq("redrive", "--dropped", "--dry-run")
    assert result.stdout == "would redrive 0 of what was dropped\n"
    assert result.stderr == "kmq: 40 were dropped by ring framed, before the WAL: gone for good\n"


def test_a_rate_holds_a_redrive_back(broker):
    broker.up()
    broker.send_lines([b"dead.%d|0||x" % n for n in range(60)])
    broker.wait_routed(60)
    for options in ([], ["--idempotent", "--name", "again"]):
        command = ["redrive", "dead", "--to", "test.{key}", "--rate", "40", *options]
        begun = time.monotonic()
        assert broker.kmq(*command).stdout == "redriven 60 of dead\n"
        assert time.monotonic() - begun >= 56 / 40  # the first 4 at once
    broker.wait_routed(180)


def test_a_redrive_that_says_neither_what_nor_where_to_is_refused(broker):
    for command in (["redrive"], ["redrive", "dead"], ["redrive", "--to", "x"]):
        result = broker.kmq(*command)
        assert result.returncode == 78 and "give the topic to read and --to" in result.stderr


# --- kmq dlq ---------------------------------------------------------------------------------------------------------


def letter(n, replays=0, error="timeout", topic="orders"):
    """A line of orders.dlq, as a consumer writes it for message n."""
    own = f"origin_topic={topic};origin_partition=0;origin_offset={n};origin_seq={n + 1};group=g;error={error}"
    back = f";replays={replays}" if replays else ""
    id = f"g.{topic}.0.{n};trace=t{n}{back};{own};attempts=4;first_failure=1.000;last_failure=2.000"
    return f"orders.dlq.@.k{n}|{n}.5|{id}|lost {n}".encode()


def test_letters_go_back_once_whatever_was_selected_before(broker):
    broker.up()
    broker.send_lines([letter(n, error="late" if n % 2 else "timeout") for n in range(10)])
    broker.send_lines([letter(10, replays=3), b"orders.dlq.@|0|x|no letter"])
    broker.wait_routed(12)
    before = broker.lines("orders.dlq")

    more = "more are left, with which the same replay goes on"
    shown = broker.kmq("dlq", "replay", "orders", "--filter", "error=late", "--max", "2", "--dry-run").stdout
    assert shown == f"0@1 -> orders.@.k1\n0@3 -> orders.@.k3\nwould replay 2 of orders.dlq; {more}\n"
    assert int(broker.status()["framer"]["seq"]) == 12

    def replay(*options):
        done = broker.kmq("dlq", "replay", "orders.dlq", *options)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    assert replay("--filter", "error=late", "--filter", "key=k[5-9]", "--rate", "1000") == "replayed 3 of orders.dlq"
    assert replay("--max", "4") == f"replayed 4 of orders.dlq; {more}"
    rest = "; 1 stay: it came back 3 times; 1 say nothing about an origin; send them where they belong with: "
    rest += "kmq redrive orders.dlq --to '<topic>.{key}'"
    tried = broker.kmq("dlq", "replay", "orders", "--dry-run").stdout.splitlines()
    assert [line.split()[0] for line in tried[:-1]] == ["0@4", "0@6", "0@8"] and "would replay 3" in tried[-1], tried
    assert replay() == f"replayed 3 of orders.dlq; 7 were replayed before{rest}"
    again = broker.kmq("redrive", "orders.dlq", "--to", "{origin}", "--idempotent", "--key", "k*")
    assert again.stdout == "redriven 10 of orders.dlq; 10 of them were stored before\n"
    assert again.stderr == "kmq: 1 stay: their payload was cut, or they came back too often\n"
    broker.wait_routed(12 + 10)
    found = [fields(line) for line in broker.lines("orders")]
    assert sorted(payload for _, _, payload in found) == sorted(b"lost %d" % n for n in range(10))
    key, headers, _ = next(each for each in found if each[2] == b"lost 7")
    assert key == b"orders.@.k7" and headers[b"trace"] == b"t7" and headers[b"replays"] == b"1"
    assert broker.lines("orders.dlq") == before

    # What was deleted after it went back has not gone back.
    assert broker.kmq("topics", "truncate", "orders", "--before", "6", "--yes").returncode == 0
    left = broker.lines("orders")
    assert replay() == f"replayed 6 of orders.dlq; 4 were replayed before{rest}"
    broker.wait(lambda: len(broker.lines("orders")) == 10, "the letters that went back again")
    assert replay() == f"replayed 0 of orders.dlq; 10 were replayed before{rest}"
    assert sorted(fields(line)[2] for line in broker.lines("orders")) == sorted(b"lost %d" % n for n in range(10))
    assert broker.lines("orders")[:4] == left


def test_a_record_that_cannot_go_is_named_and_the_rest_goes(broker):
    """A dead letter of the greatest length, to which a redrive adds headers; letters too, after KMQ_MAX_LINE was lowered."""
    broker.up(KMQ_MAX_LINE=8192)
    broker.env["KMQ_MAX_LINE"] = "8192"
    broker.send_lines([b"t|0||before", b"t.k|0||" + b"x" * 9000, b"short line", letter(1), b"u|0||behind"])
    broker.send_lines([letter(2) + b"x" * 6000, letter(3)])
    broker.wait_routed(7)
    for _ in range(2):
        done = broker.kmq("redrive", "dead", "--to", "back.{key}")
        assert done.returncode == 1 and "redriven 1 of dead" in done.stdout
        assert "dead/0@0: too_long" in done.stderr and "1 records were refused and stay" in done.stderr
    broker.wait(lambda: len(broker.lines("back")) == 1, "the record behind it")
    broker.down()
    broker.env["KMQ_MAX_LINE"] = "4096"
    broker.gateway = True
    broker.up(KMQ_CONSOLE="write")
    elsewhere = ["--url", f"http://127.0.0.1:{(broker.pipes / 'http.port').read_text().strip()}"]
    for count, way in ((2, []), (0, []), (0, elsewhere)):
        done = broker.kmq(*way, "dlq", "replay", "orders")
        assert done.returncode == 1 and f"replayed {count} of orders.dlq" in done.stdout
        assert "orders.dlq/0@1: too_long" in done.stdout + done.stderr
        assert "1 records were refused and stay where they are; too_long: raise KMQ_MAX_LINE" in done.stderr
    broker.wait(lambda: len(broker.lines("orders")) == 2, "the letters before and behind it")


def test_letters_that_are_named_go_back_and_the_answer_says_which_went_before(broker):
    broker.up()
    broker.send_lines([letter(n) for n in range(6)])
    broker.wait_routed(6)

    def replay(*options):
        return broker.kmq("dlq", "replay", "orders", *options)

    assert replay("--filter", "seq=2,4,6", "--dry-run").stdout == (
        "0@1 -> orders.@.k1\n0@3 -> orders.@.k3\n0@5 -> orders.@.k5\nwould replay 3 of orders.dlq\n"
    )
    assert replay("--filter", "seq=6").stdout == "replayed 1 of orders.dlq\n"
    assert replay("--filter", "seq=2,4,6").stdout == "replayed 2 of orders.dlq; 1 were replayed before\n"
    assert replay("--filter", "seq=2,4,6").stdout == "replayed 0 of orders.dlq; 3 were replayed before\n"
    many = replay("--filter", f"seq={','.join(map(str, range(101)))}")
    assert many.returncode == 78 and "--filter seq: names 101 letters; name at most 100" in many.stderr
    broker.wait_routed(6 + 3)
    assert sorted(fields(line)[2] for line in broker.lines("orders")) == [b"lost 1", b"lost 3", b"lost 5"]


# --- killed half-way -------------------------------------------------------------------------------------------------


def by_command(*words):
    def begin(broker):
        process = subprocess.Popen(["kmq", *words, "--rate", "5"], env=broker.env, cwd=broker.root)

        def kill():
            process.kill()
            process.wait()

        return kill

    def again(broker):
        assert broker.kmq(*words).returncode == 0

    return begin, again


def by_http():
    def post(broker, rate):
        port = int((broker.pipes / "http.port").read_text())
        asked = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            asked.request("POST", "/api/topics/orders/replay", json.dumps({"dryRun": False, "rate": rate}), JSON)
        except OSError:
            asked.close()  # its socket is open where the connection broke in mid-request
            raise
        return asked

    def begin(broker):
        broker.wait((broker.pipes / "http.port").exists, "the gateway")
        asked = post(broker, 5)

        def kill():
            os.kill(broker.pids()["gateway"], signal.SIGKILL)
            with closing(asked), pytest.raises((HTTPException, OSError)):
                asked.getresponse()

        return kill

    def is_done(broker):
        try:
            with closing(post(broker, 0)) as asked:
                found = asked.getresponse()
                return found.status == 200 and json.load(found)["complete"]
        except (HTTPException, OSError):  # the gateway is not back yet
            return False

    return begin, lambda broker: broker.wait(lambda: is_done(broker), "the rest of the replay")


@pytest.mark.parametrize(
    "way",
    [by_command("redrive", "orders.dlq", "--to", "orders.{key}"), by_command("dlq", "replay", "orders"), by_http()],
    ids=["redrive", "dlq", "http"],
)
def test_a_redrive_that_is_killed_and_run_again_sends_nothing_twice(broker, way):
    begin, again = way
    broker.gateway = True
    broker.up(KMQ_CONSOLE="write")
    broker.send_lines([letter(n) for n in range(60)])
    broker.wait_routed(60)
    kill = begin(broker)
    broker.wait(lambda: len(broker.lines("orders")) >= 5, "the first letters")
    kill()
    assert len(broker.lines("orders")) < 60
    again(broker)
    broker.wait_routed(60 + 60)
    assert sorted(fields(line)[2] for line in broker.lines("orders")) == sorted(b"lost %d" % n for n in range(60))
    assert int(broker.status()["framer"]["seq"]) == 60 + 60


def test_letters_that_an_earlier_limit_of_replays_left_out_are_redriven_too(broker):
    broker.up()
    broker.send_lines([letter(n, replays=n % 2 * 2) for n in range(6)])
    broker.wait_routed(6)
    command = ["redrive", "orders.dlq", "--to", "again.{key}", "--max-replays"]
    assert broker.kmq(*command, "1").stdout == "redriven 3 of orders.dlq\n"
    for before in (3, 6):
        done = broker.kmq(*command, "5")
        assert done.stdout == f"redriven 6 of orders.dlq; {before} of them were stored before\n", done.stderr
    broker.wait_routed(6 + 6)
    assert len(broker.lines("again")) == 6
