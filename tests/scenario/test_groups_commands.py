"""`kmq groups`: how far groups are, and moving their offsets, on a real broker."""

import json
import re
import urllib.request

import pytest
from brokers import Broker
from line_client import LineClient


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("groups") / "b")
    assert made.kmq("topics", "create", "orders", "--partitions", "2").returncode == 0
    made.up()
    made.send_lines([b"orders.@%d|||%d" % (n % 2, n) for n in range(20)])
    made.wait_routed(1 + 20)  # the declaration has a seq, too
    assert made.kmq("consume", "orders", "--group", "report").stdout.count("\n") == 20
    yield made
    made.close()


def committed(broker):
    """Partition → committed offset of the group."""
    found = json.loads(broker.kmq("groups", "describe", "report", "--json").stdout)
    return {row["partition"]: row["committed"] for row in found["partitions"]}


def test_groups_are_listed_and_described(broker):
    assert re.search(r"^report +empty +\d+ +0 +2$", broker.kmq("groups", "list").stdout, re.MULTILINE)
    assert [row["group"] for row in json.loads(broker.kmq("groups", "list", "--json").stdout)] == ["report"]
    text = broker.kmq("groups", "describe", "report").stdout
    assert re.search(r"^group report: empty, generation \d+, cooperative-sticky$", text, re.MULTILINE)
    assert re.search(r"^orders +0 +10 +10 +0 +0\.0 +- *$", text, re.MULTILINE)


def test_a_reset_shows_what_it_does_and_a_dry_run_does_nothing(broker):
    reset = ("groups", "reset", "report", "--topic", "orders", "--to")
    dry = broker.kmq(*reset, "earliest", "--dry-run")
    assert dry.stdout == "orders/0: 10 -> 0\norders/1: 10 -> 0\nnothing was changed\n", dry.stderr
    assert committed(broker) == {0: 10, 1: 10}
    for to, expected in (("3", {0: 3, 1: 3}), ("99", {0: 10, 1: 10}), ("1h", {0: 0, 1: 0}), ("latest", {0: 10, 1: 10})):
        assert broker.kmq(*reset, to).returncode == 0
        assert committed(broker) == expected, to
    refused = broker.kmq(*reset, "-1")  # not the year 1969
    assert (refused.returncode, committed(broker)) == (78, {0: 10, 1: 10}), refused.stderr
    assert broker.kmq(*reset, "4").returncode == 0
    assert broker.kmq("consume", "orders", "--group", "report").stdout.count("\n") == 12


def test_a_group_with_members_is_neither_moved_nor_deleted(broker):
    with LineClient(int((broker.pipes / "egress.port").read_text())) as member:
        member.send("GROUP report member=busy topics=orders")
        member.reply()
        text = broker.kmq("groups", "describe", "report").stdout
        assert re.search(r"^orders +0 .* busy \(\S+\)$", text, re.MULTILINE), text
        done = broker.kmq("groups", "reset", "report", "--topic", "orders", "--to", "latest")
        assert (done.returncode, done.stderr) == (1, "kmq: group report: has 1 members; end them first\n")
        assert broker.kmq("groups", "delete", "report", "--yes").returncode == 1
        member.send("!leave")
    broker.wait(lambda: "empty" in broker.kmq("groups", "list").stdout, "the member's end")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("describe", "nobody"), 78, "group 'nobody' does not exist; see: kmq groups list"),
        (("describe", "reprot"), 78, "group 'reprot' does not exist; did you mean report[?]"),
        (("describe", "a b/ü"), 78, "does not exist"),
        (("reset", "report", "--topic", "none", "--to", "latest"), 78, "none"),
        (("reset", "report", "--topic", "orders", "--to", "inf"), 78, "--to 'inf': must be earliest, latest, "),
        (("reset", "report", "--topic", "orders", "--to", "later"), 78, "--to 'later': must be earliest, latest, "),
        (("delete", "nobody", "--yes"), 78, "group 'nobody' does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(broker, words, code, text):
    done = broker.kmq("groups", *words)
    assert done.returncode == code and re.search(text, done.stderr) and done.stderr.count("\n") == 1, done.stderr


def test_without_a_gateway_the_command_says_so(broker):
    done = broker.run("env", "KMQ_HTTP_PORT=1", "kmq", "groups", "list")
    assert done.returncode == 75 and "is the broker up, with its gateway? (kmq status)" in done.stderr


def test_a_deleted_group_is_forgotten(broker):
    assert broker.kmq("groups", "delete", "report", "--yes").stdout == "group report: forgotten\n"
    assert "no groups yet" in broker.kmq("groups", "list").stdout
    assert broker.kmq("consume", "orders", "--group", "report", "--count", "5").stdout.count("\n") == 5


def test_who_never_was_a_member_commits_after_any_start_of_the_gateway(broker):
    """A pipeline's commits name generation 0; the generations of the gateway's second life begin far above."""
    broker.down()
    broker.up()
    url = f"http://127.0.0.1:{(broker.pipes / 'http.port').read_text().strip()}/api/topics/orders/commit"
    for offset in (3, 4):  # the first one makes the group
        body = {"group": "report", "generation": 0, "offsets": [{"partition": 0, "offset": offset}]}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as response:
            assert response.status == 200
    broker.down()
    broker.up()
    assert committed(broker)[0] == 4
