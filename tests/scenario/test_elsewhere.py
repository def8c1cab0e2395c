"""`kmq --url`: the commands for messages, topics and groups against a broker of another directory; what cannot says so."""

import json

import pytest
from brokers import Broker

CONFIG, FAILED, RETRY = 78, 1, 75


class Far:
    """A broker, and a directory without one, whose commands reach it by the network alone."""

    def __init__(self, root):
        self.broker, self.near = Broker(root / "far"), Broker(root / "near")
        self.broker.up(KMQ_CONSOLE="write")  # who has no token may then replay dead letters
        self.url = f"http://127.0.0.1:{self.port('http')}"

    def port(self, name):
        return (self.broker.pipes / f"{name}.port").read_text().strip()

    def __call__(self, *arguments, **more):
        ports = {"KMQ_PORT": self.port("ingress"), "KMQ_EGRESS_PORT": self.port("egress")}
        done = self.near.kmq("--url", self.url, *arguments, **more, **ports)
        assert not self.near.data.exists()  # nothing was made here
        return done


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    made = Far(tmp_path_factory.mktemp("elsewhere"))
    yield made
    made.broker.close()
    made.near.close()


def said(done, code=0):
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout if not code else done.stderr


def test_messages_with_key_and_headers_go_there_and_come_back(far):
    sent = said(far("produce", "users", "--key", "a.b", "--header", "source=crm; x", "-m", "Ada", "-m", "Bob"))
    assert sent.startswith("stored 2, last seq ")
    said(far("produce", "users", "--key", "a.b", "--tombstone"))
    rows = [json.loads(line) for line in said(far("consume", "users", "--json", "--count", "3")).splitlines()]
    assert [(row["key"], row["value"]) for row in rows] == [("a.b", "Ada"), ("a.b", "Bob"), ("a.b", None)]
    assert [row["headers"] for row in rows] == [[{"name": "source", "value": "crm; x"}]] * 2 + [[]]


def test_the_limit_of_a_line_is_that_of_the_broker_there(far):
    kept, lost = "x" * 500_000, "y" * 2_000_000
    done = far("produce", "long", text=f"{kept}\n{lost}\nend\n", KMQ_MAX_LINE=100_000)
    assert "1 refused, the first: line 2 has 2,000,000 bytes, and the limit is 1,048,576 (KMQ_MAX_LINE)" in said(
        done, FAILED
    )
    assert said(far("consume", "long", "--count", "2")).splitlines() == [kept, "end"]


def test_topics_are_made_listed_shown_changed_and_deleted_there(far):
    assert "2 partition(s), in force from seq" in said(
        far("topics", "create", "orders", "-p", "2", "--set", "retention_age=1d")
    )
    rows = json.loads(said(far("topics", "list", "--json")))["topics"]
    assert [row["partition"] for row in rows if row["topic"] == "orders"] == [0, 1]
    said(far("topics", "set", "orders", "--unset", "retention_age", "segment_bytes=10MiB"))
    shown = json.loads(said(far("topics", "show", "orders", "--json")))
    assert (shown["segmentBytes"], shown["retentionMs"]) == (10 << 20, -1)
    assert "segmentBytes" in said(far("topics", "show", "orders"))
    assert "--yes" in said(far("topics", "delete", "orders"), CONFIG)
    said(far("topics", "delete", "orders", "--yes"))
    assert "topic 'orders' does not exist" in said(far("topics", "show", "orders"), CONFIG)


def test_groups_and_dead_letters_are_asked_there(far):
    far.broker.send_lines([b"jobs|0||one", b"no message"])
    far.broker.wait(lambda: far.broker.lines("jobs") and far.broker.lines("dead"), "the message and the dead letter")
    assert said(far("consume", "jobs", "--group", "g")) == "one\n"
    assert json.loads(said(far("groups", "describe", "g", "--json")))["partitions"][0]["committed"] == 1
    assert "jobs/0: 1 -> 0" in said(far("groups", "reset", "g", "--topic", "jobs", "--to", "earliest"))
    assert "no_separator" in said(far("dlq", "ls", "dead"))
    assert said(far("dlq", "replay", "dead", "--dry-run")).startswith("would replay 0 of dead")
    assert "reads the files of a broker" in said(far("dlq", "show", "dead"), CONFIG)
    assert "gateway ready" in said(far("top", "--once"))


def test_an_unknown_topic_has_one_exit_code_and_a_hint_everywhere(far):
    said(far("topics", "create", "invoices"))
    by_network = (
        ("consume", "invoice"),
        ("topics", "show", "invoice"),
        ("groups", "reset", "g", "--topic", "invoice", "--to", "latest"),
        ("dlq", "ls", "invoice"),
        ("dlq", "replay", "invoice"),
    )
    by_files = (("topics", "show", "invoice"), ("log", "cat", "invoice"), ("redrive", "invoice", "--to", "x"))
    for kmq, commands in (
        (far, by_network),
        (far.broker.kmq, (*by_files, ("dlq", "ls", "invoice"), ("verify", "invoice"))),
    ):
        for words in commands:
            assert "did you mean invoices?" in said(kmq(*words), CONFIG), words


def test_a_lookup_that_finds_nothing_says_so(far):
    done = far.broker.kmq("log", "find", "append", "--seq", "99999")
    assert "append: no record at seq 99999 or later; kmq log stat append shows what it has" in said(done, FAILED)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--url", "http://127.0.0.1:1", "status"), CONFIG, "kmq status: looks at this machine"),
        (("--url", "127.0.0.1", "topics", "list"), CONFIG, "must be http://"),
        (("--url", "http://a:99999", "topics", "list"), CONFIG, "must be http://"),
        (("--url", "http://me:secret@a:99999", "topics", "list"), CONFIG, "--url … (not shown because of a login): "),
        (("top", "--once", "--url", "me:secret@a"), CONFIG, "--url … (not shown because of a login): "),
        (("--url", "http://a", "--host", "b", "topics", "list"), CONFIG, "exclude each other"),
        (("--token", "t", "topics", "list"), CONFIG, "--token needs"),
        (("--host", "127.0.0.1:8082", "topics", "list"), CONFIG, "--host '127.0.0.1:8082': must be a host name"),
        (("--host", "http://a", "topics", "list"), CONFIG, "for another port than 8082: --url http://<host>:<port>"),
        (("--host", "me:secret@a", "topics", "list"), CONFIG, "--host "),
        (("--url", "http://127.0.0.1:1", "groups", "list"), RETRY, "http://127.0.0.1:1: "),
        (("produce", "t", "--tombstone"), CONFIG, "--tombstone needs --key"),
        (("produce", "t", "--key", "k", "--tombstone", "-m", "x"), CONFIG, "exclude each other"),
        (("produce", "t", "--header", "x", "-m", "x"), CONFIG, "--header 'x': must be <name>=<value>"),
        (("produce", "t", "--header", "=x=y", "-m", "x"), CONFIG, "--header '=x=y': must be <name>=<value>"),
        (("--host", "a", "--token", "t t", "ship", "x", "--topic", "t", "--once"), CONFIG, "token: must be"),
        (("produce", "--raw", "--key", "x"), CONFIG, "not for --raw"),
        (("produce", "t/x", "--key", "x", "-m", "x"), CONFIG, "the argument is the topic"),
    ],
)
def test_what_cannot_be_is_refused_by_name(far, words, code, text):
    found = said(far.near.kmq(*words), code)
    assert text in found and "secret" not in found


def test_a_port_that_speaks_something_else_is_named(far):
    done = far.near.kmq("--url", f"http://127.0.0.1:{far.port('ingress')}", "groups", "list")
    assert f"http://127.0.0.1:{far.port('ingress')}: answered 400, but not as a broker does" in said(done, FAILED)
