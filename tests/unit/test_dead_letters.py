"""Dead letters on their way back: where to, with which headers, and which of them stay."""

import json

import pytest
from made_data import write_data
from typer.testing import CliRunner

from kmq.cli.app import app
from kmq.deadletters import redrive, selection
from kmq.deadletters.selection import Filter, Found
from kmq.errors import ConfigError, KmqError
from kmq.message.letters import Failure, format_letter, parse_letter
from kmq.message.message import Message

FAILURE = Failure("bil.ling", ValueError("no; such|price\n"), 4, 1712345678.25, 1712345699.5)
BY_SPARK = (
    b"43|1712345700.000000|orders.v2.dlq.@.eu|1.5|18;p=archive-a-0;trace=a%3B;replays=1;reason=not_json;"
    b'from=orders.v2-3-17;id=m%207;other={"h":"1","%2525x":"a%20b"}|nope'
)


def stored(id: bytes, payload: bytes = b"x", routing_key: bytes = b"orders.@3.eu") -> Message:
    return Message("orders", 3, 17, b"42|1712345678.000250|%b|1.5|%b|%b" % (routing_key, id, payload))


def by_consumer(message: Message, dlq: str = "orders.dlq", max_payload: int | None = None) -> bytes:
    """The letter for a message, as it is stored."""
    return b"43|1712345700.000000|" + format_letter(message, dlq, FAILURE, max_payload)[:-1]


def back(line: bytes, topic: str) -> bytes:
    new_key = selection.origin_key(selection.StoredRecord(topic, 0, 5, topic, line), parse_letter(line))
    return redrive.RedrivenPartition("a", topic, 0).as_sent(5, line, new_key)


def test_a_consumers_letter_says_where_it_came_from_and_why():
    letter = parse_letter(by_consumer(stored(b"9;trace=a;error")))
    assert letter is not None and letter.origin == "orders/3@17"
    assert (letter.seq, letter.group, letter.why) == ("42", "bil.ling", "ValueError: no; such|price\n")
    assert (letter.attempts, letter.first_failure, letter.last_failure) == ("4", "1712345678.250", "1712345699.500")
    assert (letter.replays, letter.is_cut, letter.obstacle(1)) == (0, False, "")


def test_a_pipelines_letter_says_the_same_as_far_as_it_knows():
    letter = parse_letter(BY_SPARK)
    assert letter is not None and letter.origin == "orders.v2/3@17"
    assert (letter.why, letter.group, letter.replays, letter.is_cut) == ("not_json", "", 1, False)


@pytest.mark.parametrize(
    "line",
    [
        b"1|1.000000|dead.malformed||;reason=nul;len=3|abc",
        b"1|1.000000|orders.k|1|7;from=orders-1-2|x",
        b"1|1.000000|orders.k|1|7;reason=late;from=orders-1-2|x",
        b"1|1.000000|orders.dlq.@|1|7;origin_topic=../x;origin_partition=0;origin_offset=1|x",
        b"1|1.000000|orders.dlq.@|1|7;origin_topic=orders;origin_partition=0;origin_offset=one|x",
        b"1|1.000000|orders.dlq.@|1|7|x;origin_topic=orders;origin_partition=0;origin_offset=1",
    ],
)
def test_a_record_without_an_origin_is_no_letter(line):
    assert parse_letter(line) is None
    assert (selection.stays(line, 0), selection.stays(line, 3, only_letters=True)) == ("", "it is no letter")


def test_a_message_goes_back_as_it_was_with_the_count_of_its_returns():
    message = stored(b"9;p=shop;trace=a%3B;null;enc=b64", b"AAE=")
    line = back(by_consumer(message), "orders.dlq")
    assert line == b"orders.@.eu|1.5|43;trace=a%3B;null;enc=b64;orig_seq=42;replays=1|AAE=\n"
    assert back(by_consumer(stored(b"", b"", b"orders")), "orders.dlq") == b"orders|1.5|43;orig_seq=42;replays=1|\n"
    sent = back(BY_SPARK, "orders.v2.dlq")
    assert sent == b"orders.v2.@.eu|1.5|43;trace=a%3B;%68=1;%2525x=a%20b;orig_id=m%207;replays=2|nope\n"


def test_a_message_that_fails_again_is_counted_until_it_stays():
    line, seen = by_consumer(stored(b"9;trace=a")), []
    while not selection.stays(line, 3):
        sent = back(line, "orders.dlq")[:-1]
        assert len(seen) < 5, "it never stays"
        seen.append(sent.split(b"|")[2].split(b";")[1:])
        line = by_consumer(Message("orders", 0, 99, b"77|1712345800.000000|" + sent))
    assert seen == [[b"trace=a", b"orig_seq=42", b"replays=%d" % n] for n in (1, 2, 3)]
    assert selection.stays(line, 3) == "it came back 3 times" and selection.stays(line, 4) == ""


def test_a_letter_whose_payload_was_cut_stays():
    line = by_consumer(stored(b"9", b"y" * 1000), max_payload=101)
    assert selection.stays(line, 3) == "its payload was cut"
    whole = by_consumer(stored(b";reason=nul;len=4;enc=b64", b"AGFiYw=="), "dead.dlq")
    assert selection.stays(whole, 3) == ""  # a line that was malformed has its length, and all of its bytes


def test_a_users_header_named_replays_is_not_counted():
    from kmq.message.text import make_id

    letter = parse_letter(by_consumer(stored(make_id("9", [("replays", b"7")]))))
    assert letter is not None and letter.replays == 0


def test_names_differ_by_broker_partition_and_number_and_are_legal():
    from kmq.ingress import hello

    rows = [("a", "orders.dlq", 0), ("a", "orders.dlq", 1), ("b", "orders.dlq", 0), ("a", "x" * 200, 1023)]
    names = [redrive.RedrivenPartition(*row).name(attempt) for row in rows for attempt in (0, 1)]
    assert len(set(names)) == 8
    assert all(hello.parse(f"!hello acks=1 producer={name}".encode()) for name in names)


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("error=ValueError*", True),
        ("error=*timeout*", False),
        ("group=bil.*", True),
        ("topic=orders", True),
        ("key=e?", True),
        ("value=x", True),
        ("attempts=4", True),
        ("replays=0", True),
        ("replays=[1-9]", False),
        ("trace=a", True),
        ("trace=b", False),
        ("nosuch=*", False),
        ("seq=43", True),
        ("seq=4?", True),
        ("seq=12, 43,777", True),
        ("seq=4,3,431", False),
        ("seq=7", False),  # a header of that name
    ],
)
def test_a_filter_looks_at_fields_and_headers(text, is_accepted):
    line = by_consumer(stored(b"9;trace=z;trace=a;seq=7"))
    place = selection.StoredRecord("orders.dlq", 0, 5, "orders.dlq", line)
    found = Found(place, Message("orders.dlq", 0, 5, line), parse_letter(line))
    assert Filter.parse(text).accepts(found) is is_accepted


@pytest.mark.parametrize("text", ["", "error", "=x"])
def test_a_filter_without_a_field_is_refused(text):
    with pytest.raises(ConfigError, match="must be <field>=<glob>"):
        Filter.parse(text)


def test_a_filter_names_at_most_a_hundred_letters():
    assert Filter.parse(f"seq={','.join(map(str, range(100)))}")
    with pytest.raises(
        ConfigError, match="--filter seq: names 101 letters; name at most 100, and the others afterwards"
    ):
        Filter.parse(f"seq={','.join(map(str, range(101)))}")


# --- commands that read ----------------------------------------------------------------------------------------------


@pytest.fixture
def dlq(tmp_path, monkeypatch):
    """Runs `kmq dlq …` on two letters of orders and one of orders.v2; returns what it prints."""
    written = (format_letter(stored(b"9;trace=%d" % n, b"lost %d" % n), "orders.dlq", FAILURE)[:-1] for n in range(2))
    by_spark = BY_SPARK.split(b"|", 2)[2].replace(b";p=archive-a-0", b"")
    topics = {"orders.dlq": 1, "orders.v2.dlq": 1}
    write_data(tmp_path / "data", [*written, by_spark, b"other|0||x"], topics)
    monkeypatch.setenv("KMQ_DATA", str(tmp_path / "data"))

    def run(*command):
        done = CliRunner().invoke(app, ["dlq", *command])
        if done.exception is not None:
            raise done.exception
        run.stderr = done.stderr
        return done.stdout

    return run


def test_topics_of_letters_and_letters_are_listed(dlq):
    assert dlq("ls").split() == ["topic", "letters", "orders.dlq", "2", "orders.v2.dlq", "1"]
    assert json.loads(dlq("ls", "--json").splitlines()[0]) == {"topic": "orders.dlq", "letters": 2}
    header, row = dlq("ls", "orders", "--max", "1").splitlines()
    assert dlq.stderr == "kmq: there are more letters; --max 0 lists all\n"
    assert header.split() == ["letter", "origin", "key", "attempts", "replays", "error"]
    assert row.split() == ["0@0", "orders/3@17", "eu", "4", "0", "ValueError:", "no;", "such|price"]
    shown = json.loads(dlq("ls", "orders", "--filter", "trace=1", "--json"))
    assert (shown["value"], shown["letter"]["offset"], shown["letter"]["group"]) == ("lost 1", 17, "bil.ling")
    assert dlq("ls", "orders.v2").splitlines()[1].split() == ["0@0", "orders.v2/3@17", "eu", "-", "1", "not_json"]
    assert dlq("ls", "orders", "--filter", "key=nosuch") == "orders.dlq: no letters that match\n"
    assert dlq("ls", "other") == "other: no dead letters\n"


def test_a_table_shows_brackets_of_a_letter_as_they_are(tmp_path, monkeypatch):
    failure = Failure("g", ValueError("no [/red] in [bold]"), 1, 1.0, 2.0)
    write_data(tmp_path / "data", [format_letter(stored(b"9"), "orders.dlq", failure)[:-1]], {"orders.dlq": 1})
    monkeypatch.setenv("KMQ_DATA", str(tmp_path / "data"))
    done = CliRunner().invoke(app, ["dlq", "ls", "orders"])
    assert "ValueError: no [/red] in [bold]" in done.stdout, done.exception


def test_a_letter_is_shown_whole(dlq):
    newest, first = dlq("show", "orders"), dlq("show", "orders.dlq", "0")
    assert newest.startswith("letter        orders.dlq/0@1\norigin        orders/3@17\ngroup         bil.ling\n")
    assert newest.endswith("lost 1\n") and first.endswith("lost 0\n")
    assert "attempts      4\n" in first and "header        trace=0\n" in first
    for command, text in (("show", "orders", "2"), "no letter at offset 2"), (("replay", "nosuch"), "does not exist"):
        with pytest.raises(KmqError, match=text):
            dlq(*command)
