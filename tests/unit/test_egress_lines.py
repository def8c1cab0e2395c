"""The lines of the consumer port: what is written is read again, what is wrong is refused and says what was expected."""

import random
import re

import pytest

from kmq.wire import replies, requests
from kmq.wire.attempts import Attempt
from kmq.wire.requests import BadLine, Position, TopicPartition

ORDERS, OTHER = TopicPartition("orders", 0), TopicPartition("a.b-c_d", 1023)
NOON = Position("time", 1_795_435_200_000_000)
OPENINGS = [
    requests.Consume("orders"),
    requests.Consume("orders", 3, requests.LATEST, 10, True, True, "spark.abc=def"),
    requests.Consume("a.b", None, Position("offset", 17)),
    requests.Consume("a.b", None, NOON),
    requests.Consume("a.b", None, Position("time", 1_795_435_200_000_001)),
    requests.Group("billing", "m-1", ("orders", "a.b")),
    requests.Group("é n/=%", "it's me", ("orders",), "range", 6.5, "t.x"),
    requests.Group("more", "m", ("orders",), token="t", more=True),
    requests.Group("g", "m", ("orders",), attempt=Attempt("0_a-Z", 10**17)),
    requests.Group("g", "m", ("orders",), says_hand_outs=True),
    requests.Group("g", "m", ("orders",), hears_overtaken=True),
    requests.Assign(None, ((ORDERS, None),)),
    requests.Assign("more", ((ORDERS, None),), "t", more=True),
    requests.Assign("g", ((ORDERS, None),), hears_overtaken=True),
    requests.Assign("g=1@x", ((ORDERS, Position("offset", 5)), (OTHER, NOON)), "t.x"),
]
REQUESTS = [
    requests.Fetch(1),
    requests.Fetch(1 << 20, 300_000, (ORDERS, OTHER)),
    requests.Seek(ORDERS, requests.EARLIEST),
    requests.Seek(OTHER, NOON),
    requests.Offsets(),
    requests.Offsets((OTHER,)),
    requests.Commit(((ORDERS, 0), (OTHER, 10**17))),
    requests.Commit(((ORDERS, 7), (OTHER, 0)), True),
    requests.Given(((ORDERS, 0), (OTHER, 10**17))),
    requests.Nack(ORDERS, 7),
    requests.Nack(OTHER, 10**17, 2500, "no account: 50 % = é\n"),
    requests.REVOKED,
    requests.BEAT,
    requests.LEAVE,
]
REPLIES = [
    replies.Started(ORDERS, 17),
    replies.Batch(OTHER, 17, 3, 900),
    replies.Batch(ORDERS, 5, 1, 90, 3),
    replies.Batch(ORDERS, 20, 1, 90, overtaken=15),
    replies.NO_RECORDS,
    replies.Assigned(3, ((ORDERS, 17), (OTHER, 0))),
    replies.Assigned(4, ()),
    replies.Revoke((ORDERS, OTHER)),
    replies.Sought(ORDERS, 7),
    replies.OffsetsReply(
        (replies.PartitionOffsets(ORDERS, 0, 9, 4, 3), replies.PartitionOffsets(OTHER, 1, 1, 1, None))
    ),
    replies.Committed(((ORDERS, 4), (OTHER, 5))),
    replies.Committed(((ORDERS, 4),), True),
    replies.Nacked(ORDERS, 5, 2),
    replies.Nacked(OTHER, 5, 3, "a.b-c_d.dlq/0@17"),
    replies.Failed("", "unknown_topic", "there is no topic x"),
    replies.Failed("commit", "fenced", "generation 3 is over"),
]


@pytest.mark.parametrize(
    ("decode", "values"),
    [(requests.opening, OPENINGS), (requests.request, REQUESTS), (replies.reply, REPLIES)],
    ids=["opening", "request", "reply"],
)
def test_what_is_written_is_read_again(decode, values):
    for value in values:
        line = value.encode()
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        assert (type(decode(line)), decode(line)) == (type(value), value)
        assert decode(line[:-1]) == value


def test_words_stand_in_any_order_and_a_line_may_end_as_telnet_ends_it():
    typed = b"CONSUME orders/3  raw max=10 token=spark.abc=def follow from=latest\r\n"
    assert requests.opening(typed) == OPENINGS[1]
    assert requests.request(b"!fetch 5 orders/0 wait=7 a.b-c_d/1023 orders/0") == requests.Fetch(5, 7, (ORDERS, OTHER))
    assert requests.opening(b"ASSIGN token=x orders/0") == requests.Assign(None, ((ORDERS, None),), "x")


def test_an_opening_in_several_lines_is_one():
    group = requests.opening(b"GROUP g member=m topics=a,b session=7s token=t more")
    group = requests.further(group, b"GROUP g member=m topics=b,c more")
    assert requests.further(group, b"GROUP g member=m topics=d") == requests.Group(
        "g", "m", tuple("abcd"), session_s=7, token="t"
    )
    assign = requests.further(requests.opening(b"ASSIGN g orders/0@5 token=t more"), b"ASSIGN g a.b-c_d/1023")
    assert assign == requests.Assign("g", ((ORDERS, Position("offset", 5)), (OTHER, None)), "t")


@pytest.mark.parametrize(
    ("first", "next", "text"),
    [
        (
            b"GROUP g member=m topics=a more",
            b"GROUP g member=n topics=b",
            "more: expected a line that goes on with GROUP",
        ),
        (b"ASSIGN g a/0 more", b"ASSIGN a/1", "more: expected a line that goes on with ASSIGN"),
        (b"ASSIGN g a/0 more", b"!fetch 1", "'!fetch': unknown request"),
        (b"ASSIGN g a/0 more", b"CONSUME a", "more: expected a line that goes on with ASSIGN"),
        (b"ASSIGN a/0 more", b"ASSIGN a/1 a/0@5", "a/0: is given twice"),
    ],
)
def test_a_line_that_does_not_go_on_with_the_opening_is_refused(first, next, text):
    with pytest.raises(BadLine, match=re.escape(text)):
        requests.further(requests.opening(first), next)


def test_reading_begins_at_the_first_record_and_following_at_the_end():
    assert requests.opening(b"CONSUME orders").first == requests.EARLIEST
    assert requests.opening(b"CONSUME orders follow").first == requests.LATEST
    assert requests.opening(b"CONSUME orders follow from=0").first == Position("offset", 0)


@pytest.mark.parametrize(
    ("decode", "line", "text"),
    [
        (requests.opening, b"", "'': unknown request; expected one of CONSUME, GROUP, ASSIGN"),
        (requests.opening, b"consume orders", "'consume': unknown request; expected one of CONSUME, GROUP, ASSIGN"),
        (requests.opening, b"CONSUME", "CONSUME: names no topic; expected CONSUME <topic>[/<partition>]"),
        (requests.opening, b"CONSUME ../x", "'../x': must be <topic>/<partition>"),
        (requests.opening, b"CONSUME ..", "'..': must be the name of a topic"),
        (requests.opening, b"CONSUME orders/01", "'orders/01': must be <topic>/<partition>"),
        (requests.opening, b"CONSUME orders/-1", "'orders/-1': must be <topic>/<partition>"),
        (requests.opening, b"CONSUME o max=0", f"max='0': must be a whole number between 1 and {10**18 - 1}"),
        (requests.opening, b"CONSUME o max=1 max=2", "max=: is given twice"),
        (requests.opening, b"CONSUME o till=3", "'till=3': unknown option; expected one of from=, max=, token="),
        (requests.opening, b"CONSUME o loud", "'loud': unknown option; expected one of from=, max=, token="),
        (
            requests.opening,
            b"CONSUME o from=yesterday",
            "from='yesterday': must be earliest, latest, an offset, or a time such as 2026-11-23T12:00:00Z",
        ),
        (
            requests.opening,
            b"CONSUME o from=2026-13-23T12:00:00Z",
            "from='2026-13-23T12:00:00Z': must be earliest, latest, an offset, or a time such as 2026-11-23T12:00:00Z",
        ),
        (
            requests.opening,
            b"CONSUME o from=2026-11-23T12:00:00",
            "from='2026-11-23T12:00:00': must be earliest, latest, an offset, or a time such as 2026-11-23T12:00:00Z",
        ),
        (requests.opening, b"CONSUME \xff", "the line must be printable ASCII"),
        (requests.opening, b"CONSUME o\0", "the line must be printable ASCII"),
        (
            requests.opening,
            b"GROUP",
            "GROUP: names no group; expected GROUP <group> member=<name> topics=<topic>[,<topic>…]",
        ),
        (requests.opening, b"GROUP g topics=o", "GROUP: member= is missing"),
        (requests.opening, b"GROUP g member=m", "GROUP: topics= is missing"),
        (requests.opening, b"GROUP g member=m topics=o,", "topics='': must be the name of a topic"),
        (
            requests.opening,
            b"GROUP g member=%00 topics=o",
            "member='%00': must be a name of 1 to 200 characters, percent-encoded",
        ),
        (
            requests.opening,
            b"GROUP g member=%ff topics=o",
            "member='%ff': must be a name of 1 to 200 characters, percent-encoded",
        ),
        (
            requests.opening,
            b"GROUP g member=m topics=o assignor=fair",
            "assignor='fair': must be one of cooperative-sticky, sticky, range, roundrobin",
        ),
        (
            requests.opening,
            b"GROUP g member=m topics=o session=30",
            "session='30': must be a time such as 30s, 500ms or 2m",
        ),
        (
            requests.opening,
            b"GROUP g member=m topics=o attempt=2",
            "attempt='2': must be <run>.<number>, of at most 64",
        ),
        (
            requests.opening,
            b"ASSIGN g",
            "ASSIGN: names no partition; expected ASSIGN [<group>] <topic>/<partition>[@<position>] …",
        ),
        (requests.opening, b"ASSIGN o/0 g", "'g': unknown option; expected one of overtaken=, token="),
        (requests.opening, b"ASSIGN o/0 o/0@3", "o/0: is given twice"),
        (requests.request, b"CONSUME orders", "'CONSUME': unknown request; expected one of !fetch, "),
        (requests.request, b"!fetch", "!fetch: says no size; expected !fetch <max bytes> [wait=<ms>]"),
        (requests.request, b"!fetch 0", f"'0': must be a whole number between 1 and {10**18 - 1}"),
        (requests.request, b"!fetch 1 wait=300001", "wait='300001': must be a whole number between 0 and 300000"),
        (requests.request, b"!seek o/0", "!seek: expected !seek <topic>/<partition> <position>"),
        (requests.request, b"!commit o/0", "!commit: expected !commit <topic>/<partition> <next offset> …"),
        (requests.request, b"!commit o/0 x", "'x': must be an offset"),
        (requests.request, b"!beat now", "!beat: takes no arguments"),
        (replies.reply, b"!yes", "'!yes': unknown reply; expected one of !ok, "),
        (replies.reply, b"!ok o/0", "!ok: 'o/0' does not belong there"),
        (replies.reply, b"!batch o/0 1 2", "!batch: 'o/0 1 2' does not belong there"),
        (replies.reply, b"!batch o/0 1 2 3 overtaken=0", "overtaken=0: must be at least 1"),
        (replies.reply, b"!batch o/0 1 2 3 overtaken=1 overtaken=2", "!batch: says too much"),
        (replies.reply, b"!offsets o/0 start=1", "!offsets: 'o/0 start=1' does not belong there"),
        (replies.reply, b"!err", "!err: says no code"),
    ],
)
def test_what_is_no_line_is_refused_and_says_what_was_expected(decode, line, text):
    with pytest.raises(BadLine) as refused:
        decode(line)
    assert str(refused.value).startswith(text)


def test_a_refusal_is_one_line_whatever_its_text_holds():
    assert replies.Failed("", "internal", "a\nb\r\n!batch -\n").encode() == b"!err internal a b !batch -\n"


def test_made_up_lines_are_read_as_they_are_written_again_or_refused():
    made = random.Random(17)
    good = [value.encode() for value in (*OPENINGS, *REQUESTS, *REPLIES)]
    pieces = [b" ", b"/", b"@", b"=", b"!", b"0", b"9" * 30, b"%", b"\0", b"\xff", b"-", b"follow", b"token=", b"from="]
    refused = 0
    for _ in range(20_000):
        line = bytearray(made.choice(good)[:-1])
        for _ in range(made.randrange(4)):
            at = made.randrange(len(line) + 1)
            line[at : at + made.choice((0, 0, 1, 5))] = made.choice((*pieces, bytes([made.randrange(256)])))
        for decode in (requests.opening, requests.request, replies.reply):
            try:
                value = decode(bytes(line))
            except BadLine:
                refused += 1
            else:
                assert decode(value.encode()) == value
    assert 20_000 < refused < 60_000
