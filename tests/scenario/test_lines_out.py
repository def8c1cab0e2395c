"""The consumer port of a real broker: what it sends is what the files hold, whoever reads, however slowly, whatever is killed."""

import os
import random
import resource
import socket
import ssl
import subprocess
import time
from pathlib import Path

import door_attacks
import pytest
from brokers import PATIENCE_S, Broker
from line_client import LineClient, ask

from kmq.access import tokens
from kmq.broker import stats

SEGMENT = 64 << 10


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A broker with three topics of several segments: one partition, four partitions, and many long lines."""
    made = Broker(tmp_path_factory.mktemp("lines-out") / "b")
    made.env |= {"KMQ_SEGMENT_BYTES": str(SEGMENT), "KMQ_LINE_DEADLINE": "2s"}
    assert made.kmq("topics", "create", "spread", "--partitions", "4").returncode == 0
    made.up()
    made.send_lines([b"orders|||%d %b" % (n, b"x" * 100) for n in range(3000)])
    made.send_lines([b"spread|0||%d" % n for n in range(1000)])
    made.send_lines([b"long|0||%b" % (b"y" * 900_000) for n in range(40)])
    made.wait_routed(4041)  # with the declaration
    yield made
    made.close()


def port(broker, name="egress"):
    return int((broker.pipes / f"{name}.port").read_text())


def cat(broker, topic, partition=0):
    """What `cat` prints for a partition."""
    paths = sorted((broker.data / "topics" / topic / str(partition)).glob("*.log"))
    return subprocess.run(["cat", *paths], check=True, capture_output=True).stdout


# --- CONSUME ---------------------------------------------------------------------------------------------------------


def test_raw_gives_what_cat_gives_over_all_segments(broker):
    for topic in ("orders", "long"):
        assert len(list((broker.data / "topics" / topic / "0").glob("*.log"))) > 3
        assert ask(port(broker), f"CONSUME {topic} raw") == cat(broker, topic)
    assert ask(port(broker), "CONSUME spread raw") == b"".join(cat(broker, "spread", n) for n in range(4))
    assert ask(port(broker), "CONSUME spread/2 raw") == cat(broker, "spread", 2)


def test_each_partition_begins_with_its_first_offset(broker):
    expected = b"".join(b"!ok spread/%d offset=0\n%b" % (n, cat(broker, "spread", n)) for n in range(4))
    assert ask(port(broker), "CONSUME spread") == expected


def test_a_topic_is_read_from_an_offset_a_time_or_its_end_and_as_far_as_asked(broker):
    lines = cat(broker, "orders").splitlines(keepends=True)
    for start, most in ((0, 1), (17, 5), (1500, 1500), (2999, 10), (3000, 1)):
        answer = ask(port(broker), f"CONSUME orders/0 from={start} max={most}")
        assert answer == b"!ok orders/0 offset=%d\n%b" % (start, b"".join(lines[start : start + most]))
    assert ask(port(broker), "CONSUME orders from=latest") == b"!ok orders/0 offset=3000\n"
    second = int(lines[0].split(b"|")[1].split(b".")[0])
    before = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(second))
    assert ask(port(broker), f"CONSUME orders from={before} raw max=1") == lines[0]
    assert ask(port(broker), "CONSUME orders from=2199-01-01T00:00:00Z") == b"!ok orders/0 offset=3000\n"


def test_refusals_name_what_is_wrong(broker):
    for request, answer in {
        "CONSUME none": b"!err unknown_topic there is no topic none; a first message makes it\n",
        "CONSUME spread/4": b"!err unknown_partition topic spread has 4 partitions, so there is no 4\n",
        "CONSUME orders from=3001": b"!err out_of_range orders/0: offset 3001 is beyond first=0 end=3000\n",
        "CONSUME orders loud": b"!err bad_request 'loud': unknown option; expected one of from=, max=, token=\n",
        "CONSUME " + "x" * 70_000: b"!err bad_request the line is over 65536 bytes\n",
    }.items():
        assert ask(port(broker), request) == answer


def test_a_refused_client_that_goes_on_sending_still_reads_the_refusal(broker):
    with LineClient(port(broker)) as client:
        client.send_raw(b"x" * 300_000)
        assert client.line() == b"!err bad_request the line is over 65536 bytes"


def test_a_follower_gets_each_new_record_behind_a_batch_line(broker):
    with LineClient(port(broker)) as client:
        client.send("CONSUME followed_not_yet follow")
        assert client.line().startswith(b"!err unknown_topic")
    broker.send_lines([b"followed|0||first"])
    broker.wait(lambda: broker.lines("followed"), "the first record")
    with LineClient(port(broker)) as client:
        client.send("CONSUME followed follow max=3", last=True)
        assert client.line() == b"!ok followed/0 offset=1"
        for n in range(1, 4):
            broker.send_lines([b"followed|0||%d" % n])
            head = client.line().split()
            assert head[:4] == [b"!batch", b"followed/0", b"%d" % n, b"1"]
            assert client.read(int(head[4])).endswith(b"|%d\n" % n)
        assert client.rest() == b""


def test_a_follower_gets_the_partitions_that_its_topic_gets(broker):
    broker.send_lines([b"wider|0||first"])
    broker.wait(lambda: broker.lines("wider"), "the first record")
    with LineClient(port(broker)) as client:
        client.send("CONSUME wider from=earliest follow max=4", last=True)
        assert client.line() == b"!ok wider/0 offset=0" and client.line().endswith(b"|first")
        assert broker.kmq("topics", "set", "wider", "--partitions", "3").returncode == 0
        broker.send_lines([b"wider.@%d|0||%d" % (n, n) for n in range(3)])
        heads = []
        for _ in range(3):
            while not (head := client.line().split())[0].startswith(b"!batch"):
                pass
            heads.append(head[1:4])
            client.read(int(head[4]))
        assert sorted(heads) == [[b"wider/0", b"1", b"1"], [b"wider/1", b"0", b"1"], [b"wider/2", b"0", b"1"]]
        assert client.rest() == b""


# --- ASSIGN ----------------------------------------------------------------------------------------------------------


def test_batches_of_all_partitions_are_every_record_once_in_order(broker):
    got = dict.fromkeys(range(4), b"")
    with LineClient(port(broker)) as client:
        client.send("ASSIGN " + " ".join(f"spread/{n}" for n in range(4)))
        assert client.line() == b"!assign 0 " + b" ".join(b"spread/%d@0" % n for n in range(4))
        while (batch := client.fetch(3000))[0] is not None:
            (_, partition), offset, lines = batch
            assert got[partition].count(b"\n") == offset and len(lines) <= 3000
            got[partition] += lines
    assert got == {n: cat(broker, "spread", n) for n in range(4)}


def test_a_line_longer_than_a_fetch_comes_alone(broker):
    with LineClient(port(broker)) as client:
        client.send("ASSIGN long/0")
        client.line()
        for size in (1, 1000, 10**9):
            assert client.fetch(size)[2].count(b"\n") == 1


def test_requests_overtake_a_fetch_that_waits_for_records(broker):
    broker.send_lines([b"waited|0||0"])
    broker.wait(lambda: broker.lines("waited"), "the first record")
    with LineClient(port(broker)) as client:
        client.send("ASSIGN waited/0@latest", "!fetch 1000 wait=60000", "!fetch 1000 wait=60000", "!offsets")
        assert client.line() == b"!assign 0 waited/0@1"
        assert client.line() == b"!offsets waited/0 start=0 end=1 next=1 committed=-"
        broker.send_lines([b"waited|0||1"])
        assert client.batch()[1] == 1
        client.send("!seek waited/0 earliest")
        assert client.line() == b"!seek waited/0@0"
        assert client.batch()[1] == 0
        client.send("!fetch 1000 wait=1", "!leave")
        assert client.rest() == b"!batch -\n"


def test_a_fetch_after_a_seek_begins_there_however_the_lines_arrive(broker):
    offsets = random.Random(1).choices(range(2900), k=300)
    sent = b"".join(b"!seek orders/0 %d\n!beat\n!fetch 500\n" % offset for offset in offsets)
    with LineClient(port(broker)) as client:
        client.send("ASSIGN orders/0")
        client.line()
        while sent:
            count = random.randrange(1, 60)
            client.send_raw(sent[:count])
            sent = sent[count:]
        for offset in offsets:
            assert client.line() == b"!seek orders/0@%d" % offset
            assert client.batch()[1] == offset


def test_many_requests_at_once_are_all_answered(broker):
    answers = ask(port(broker), "ASSIGN orders/0", *["!offsets"] * 3000).splitlines()
    assert answers[1:] == [b"!offsets orders/0 start=0 end=3000 next=0 committed=-"] * 3000


def test_a_session_refuses_one_request_and_goes_on(broker):
    with LineClient(port(broker)) as client:
        client.send("ASSIGN orders/0")
        client.line()
        for request, answer in {
            "!fetch 10 spread/0": b"!err fetch unknown_partition spread/0 is not assigned to this connection",
            "!fetch": b"!err fetch bad_request !fetch: says no size; expected !fetch <max bytes> [wait=<ms>] "
            + "[<topic>/<partition> …]".encode(),
            "!seek orders/0 3001": b"!err seek out_of_range orders/0: offset 3001 is beyond first=0 end=3000",
            "!seek orders/0 3000": b"!seek orders/0@3000",
        }.items():
            client.send(request)
            assert client.line() == answer
        client.send("!sing")
        assert client.line().startswith(b"!err bad_request '!sing': unknown request") and client.rest() == b""


# --- faults ----------------------------------------------------------------------------------------------------------


def test_damage_is_told_behind_all_good_records_in_front_of_it(broker):
    broker.send_lines([b"hurt|0||%d %b" % (n, b"z" * 100) for n in range(3000)])
    broker.wait(lambda: len(broker.lines("hurt")) == 3000, "hurt")
    paths = sorted((broker.data / "topics" / "hurt" / "0").glob("*.log"))
    whole = cat(broker, "hurt")
    at = os.stat(paths[0]).st_size + 100  # in the second segment, whose one block is then bad
    with open(paths[1], "r+b") as file:
        file.seek(100)
        file.write(bytes([file.read(1)[0] ^ 1]) if file.seek(100) else b"")
    for request in ("CONSUME hurt raw", "CONSUME hurt"):
        answer = ask(port(broker), request)
        good, _, said = answer.rpartition(b"!err ")
        good = good if request.endswith("raw") else good.partition(b"\n")[2]
        assert said.startswith(b"damaged ") and said.count(b"\n") == 1
        assert whole.startswith(good) and at - 70_000 < len(good) < at
    with LineClient(port(broker)) as client:
        client.send("ASSIGN hurt/0 orders/0@2999")
        client.line()
        answers = []
        while len(answers) < 4:
            client.send("!fetch 2000000")
            head = client.line()
            answers.append(head.split()[1])
            if head.startswith(b"!batch") and head != b"!batch -":
                client.read(int(head.split()[4]))
        assert answers == [b"hurt/0", b"orders/0", b"fetch", b"-"]  # the damage stops this partition alone, said once


def test_records_that_retention_deletes_in_front_of_a_reader_are_left_out(broker):
    broker.send_lines([b"gone|0||%d %b" % (n, b"z" * 100) for n in range(3000)])
    broker.wait(lambda: len(broker.lines("gone")) == 3000, "gone")
    with LineClient(port(broker)) as client:
        client.send("ASSIGN gone/0")
        assert client.line() == b"!assign 0 gone/0@0"
        logs = sorted((broker.data / "topics" / "gone" / "0").glob("*.log"))
        for log in logs[:2]:
            log.unlink()
            log.with_suffix(".idx").unlink()
        left = int(logs[2].stem)
        assert client.fetch(100)[1] == left
    assert ask(port(broker), "CONSUME gone from=5 max=1").startswith(b"!ok gone/0 offset=%d\n" % left)


def resident(broker):
    pid = broker.pids()["gateway"]
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_readers_that_do_not_read_cost_little_memory_and_are_cut_off(broker):
    ask(port(broker), "CONSUME long raw")
    before, cut_off = resident(broker), stats.peek(broker.instance).rows["gateway"].cut_off
    clients = []
    for number in range(40):  # each says what it wants at once: the deadline counts from its connection
        clients.append(LineClient(port(broker)))
        clients[-1].send(*(["CONSUME long raw"] if number % 2 else ["ASSIGN long/0", *["!fetch 2000000"] * 20]))
    broker.wait(lambda: stats.peek(broker.instance).rows["gateway"].cut_off >= cut_off + 40, "all are cut off")
    assert resident(broker) - before < 40 << 20  # of 54 MB for each that would read
    for client in clients:
        client.close()
    assert ask(port(broker), "CONSUME orders raw max=1") == cat(broker, "orders").splitlines(keepends=True)[0]


def test_half_a_request_is_cut_off_and_a_waiting_follower_is_not(broker):
    with LineClient(port(broker)) as follower, LineClient(port(broker)) as half:
        follower.send("CONSUME orders follow")
        half.send_raw(b"CONS")
        assert follower.line() == b"!ok orders/0 offset=3000"
        assert half.rest() == b""  # after KMQ_LINE_DEADLINE
        assert follower.is_open()
    with LineClient(port(broker)) as rested:  # no sweep looks at it any more
        rested.send("ASSIGN orders/0@3000", "!fetch 1000 wait=1500")
        assert rested.line() == b"!assign 0 orders/0@3000" and rested.line() == b"!batch -"
        rested.send_raw(b"!fet")
        assert rested.rest() == b""


def test_a_gateway_that_is_killed_is_back_and_a_reader_resumes(broker):
    with LineClient(port(broker)) as client:
        client.send("ASSIGN orders/0")
        client.line()
        _, offset, lines = client.fetch(100_000)
        after = offset + lines.count(b"\n")
        broker.kill("gateway")
        assert client.rest() == b""
    broker.wait(lambda: "gateway" in broker.pids() and is_served(broker), "the next gateway")
    assert lines + ask(port(broker), f"CONSUME orders raw from={after}") == cat(broker, "orders")


def is_served(broker):
    try:
        return ask(port(broker), "CONSUME orders max=1").startswith(b"!ok")
    except OSError:
        return False


def test_a_gateway_that_stops_says_so_to_those_who_wait(broker):
    with LineClient(port(broker)) as follower, LineClient(port(broker)) as fetching:
        follower.send("CONSUME orders follow")
        follower.line()
        fetching.send("ASSIGN orders/0@latest", "!fetch 10 wait=60000")
        fetching.line()
        os.kill(broker.pids()["gateway"], 15)
        for client in (follower, fetching):
            assert client.rest().startswith(b"!err stopping ")
    broker.wait(lambda: "gateway" in broker.pids() and is_served(broker), "the next gateway")


# --- status ----------------------------------------------------------------------------------------------------------


def test_the_status_port_knows_records_that_are_there(broker):
    broker.wait(lambda: ask(port(broker, "status"), "GET_STATUS 1")[:3] != b"ERR", "the groups' offsets are read")
    answer = ask(port(broker, "status"), "GET_STATUS 1", "GET_STATUS 4000 billing", "GET_STATUS 999999", "GET_STATUS 0")
    assert answer == b"PENDING\nPENDING\nUNKNOWN\nUNKNOWN\n"
    usage = b"ERR expected: GET_STATUS <seq> [<group>] [token=<token>]\n"
    assert ask(port(broker, "status"), "GET_STATUS", "get_status 1", "GET_STATUS x", "GET_STATUS -1") == usage * 4


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [60, pytest.param(5000, marks=pytest.mark.soak)])
def test_bad_input_at_any_door_is_answered_by_its_rules_and_costs_little_memory(broker, clients):
    ports = {name: port(broker, name) for name in ("egress", "status", "http")}
    pid, before = broker.pids()["gateway"], resident(broker)
    answered = door_attacks.attack(random.Random(door_attacks.seed_of_this_run()), ports, clients)
    assert len(answered) == 3, answered
    with door_attacks.hoard(ports, 20):
        assert ask(ports["egress"], "CONSUME orders/0 max=1").startswith(b"!ok")
        assert ask(ports["status"], "GET_STATUS 999999") == b"UNKNOWN\n"
        assert resident(broker) - before < 60 << 20
    assert broker.pids()["gateway"] == pid and "Traceback" not in broker.log()


BAD_QUESTIONS = [
    "",
    "\0",
    "GET_STATUS 1 2 3",
    "GET_STATUS 1 a/b",
    f"GET_STATUS 1 {'g' * 201}",
    "GET_STATUS 1 %ff",
    "GET_STATUS 1.0",
    "GET_STATUS 1 日本",  # committed as %E6%97%A5…
]
BAD_QUESTIONS += ["GET_STATUS 1 g token=a token=b", "GET_STATUS +1", "!batch -", "CONSUME orders", "GET / HTTP/1.1"]


def test_bad_questions_to_the_status_port_get_the_usage_and_the_connection_goes_on(broker):
    usage = b"ERR expected: GET_STATUS <seq> [<group>] [token=<token>]\n"
    answers = ask(port(broker, "status"), *BAD_QUESTIONS, "GET_STATUS " + "9" * 60_000, "GET_STATUS 1 nobody")
    assert answers == usage * len(BAD_QUESTIONS) + b"UNKNOWN\nPENDING\n"


def test_a_line_over_the_limit_is_refused_with_the_limit_at_both_ports(broker):
    for name, answer in (("egress", b"!err bad_request the line"), ("status", b"ERR bad_request: the line")):
        assert ask(port(broker, name), "x" * 70_000) == answer + b" is over 65536 bytes\n"


# --- TLS and tokens --------------------------------------------------------------------------------------------------


def test_tls_and_tokens_guard_the_ports_as_they_guard_the_others(new_broker, authority):
    broker = new_broker()
    cert, key = authority.issue("server")
    token = tokens.new(str(broker.root / "tokens"), "reader")
    names = ("KMQ_TLS_PORT", "KMQ_HTTPS_PORT", "KMQ_GRPCS_PORT", "KMQ_EGRESS_TLS_PORT")
    broker.env |= dict.fromkeys(names, "0") | {
        "KMQ_TLS_HOST": "127.0.0.1",
        "KMQ_TLS_CERT": str(cert),
        "KMQ_TLS_KEY": str(key),
        "KMQ_TOKENS": str(broker.root / "tokens"),
    }
    broker.up()
    assert broker.kmq("produce", "t", "-m", "a").returncode == 0
    broker.wait_routed(1)
    refusal = b"!err unauthorized say %b \xe2\x80\xa6 token=<token>, with one that `kmq token new` has made\n"
    for request in ("CONSUME t", "ASSIGN t/0", "CONSUME t token=reader.wrong"):
        assert ask(port(broker), request) == refusal % request.split()[0].encode()
    assert ask(port(broker), f"CONSUME t raw token={token}") == cat(broker, "t")
    assert ask(port(broker, "status"), "GET_STATUS 1").startswith(b"ERR unauthorized")
    assert ask(port(broker, "status"), f"GET_STATUS 1 token={token}") == b"PENDING\n"
    context = ssl.create_default_context(cafile=authority.path)
    with LineClient(port(broker, "egress_tls"), context) as client:
        client.send(f"CONSUME t raw token={token}")
        assert client.rest() == cat(broker, "t")
    with LineClient(port(broker, "egress_tls"), context) as client:
        client.send(f"ASSIGN t/0 token={token}", "!fetch 1000", "!fetch 1000 wait=10")
        assert client.line() == b"!assign 0 t/0@0"
        assert client.batch()[2] == cat(broker, "t") and client.line() == b"!batch -"
    with socket.create_connection(("127.0.0.1", port(broker, "egress_tls"))) as plain:
        plain.settimeout(PATIENCE_S)
        plain.sendall(b"CONSUME t\n")
        assert plain.recv(100)[:1] != b"!"
    broker.wait(lambda: "event=unauthorized" in broker.log(), "the strangers in the log")
