"""Topics of KMQ itself: who may write to them, and that every layer which routes a line agrees on where it lies."""

import os
import stat

import pytest
from framing_steps import MAX, P, mine, source_of, table
from received_ends import Way, messages, plain

from kmq.access import local_token
from kmq.config.settings import load
from kmq.errors import ConfigError
from kmq.framing import parser
from kmq.framing.blocks import encode_replies
from kmq.framing.topics import Catalog
from kmq.ingress import hello
from kmq.links.layout import BlockLimits
from kmq.log import topics
from kmq.message import record
from kmq.message.ids import KnownProducer
from kmq.message.routing import Table, resolve

ROOMY = BlockLimits(100_000, 1 << 24)
OFFSETS = b"__consumer_offsets.@.g.t.0|1|%d|offset=7"


def framed(*parts, known=None, catalog=None):
    """(stored lines, replies) of these parts of the FIFO's text."""
    way = Way()
    source, text = source_of(way), way.text(*parts)
    made_by = parser.Parser(MAX, known or table(), source, ROOMY, *([catalog] if catalog else []))
    batch = made_by.batch(text, 101, 0)
    assert batch.used == len(text)
    return batch.lines, [line.partition(b" ")[2] for line in encode_replies(batch.replies, 0, 101).split(b"\n")[:-1]]


# --- the framer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [b"", P])
def test_a_connection_of_the_pod_may_write_to_a_reserved_topic(tag):
    lines, replies = framed(messages([OFFSETS % 1, OFFSETS % 2], tag=tag, reserved=True))
    claimed = b";" + tag if tag else b""
    assert [line.split(b"|")[2] for line in lines] == [b"1" + claimed, b"2" + claimed]
    assert replies == [b"1 !ack 2 102"]


def test_another_connection_is_refused_and_the_rest_of_its_messages_is_stored():
    lines, replies = framed(messages([*mine(1), OFFSETS % 2, *mine(3)], tag=P))
    assert lines == mine(1, 3, tag=b";p=me")
    assert replies == [b"1 !ack 1 101", b"2 !err 2 reserved_topic", b"3 !ack 3 102"]


def test_a_plain_line_and_a_line_in_the_fifo_become_dead_letters():
    line = OFFSETS % 1
    kept = b"dead.malformed||;reason=reserved_topic;len=%d|%b" % (len(line), line)
    assert framed(plain(line), line + b"\n", b"!c 17.1 1 1 5 0 10 reserved\n")[0][:2] == [kept, kept]


@pytest.mark.parametrize(
    "key",
    [
        *(b"append", b"append.k", b"dropped", b"__append", b"__append.@.k", b"__", b"__.k", b"__/x"),
        *(b"__kmq", b"__kmq.topic", b"__kmq.epoch", b"__kmq.@.topic", b"__kmq.@"),
    ],
)
def test_the_pod_itself_may_not_write_to_what_is_no_topic(key):
    lines, replies = framed(messages([key + b"|1|1|x"], reserved=True))
    assert lines == [] and replies == [b"1 !err 1 reserved_topic"]


def test_a_mark_in_the_wrong_place_is_refused_to_the_pod_too():
    assert framed(messages([b"__x.a/b.@1|1|1|x"], reserved=True))[1] == [b"1 !err 1 bad_topic"]


def test_own_producers_have_a_place_in_a_full_table():
    known = table(producers=1)
    known.producer(b"stranger", 0)
    assert known.producer(b"another", 0) is None
    assert isinstance(known.producer(b"__offsets", 0), KnownProducer)


def test_a_declared_reserved_topic_is_taken_where_messages_make_no_topics(tmp_path):
    (tmp_path / "topics").mkdir()
    strict = Catalog(str(tmp_path), 100, False, lambda: 0)
    refused = framed(messages([OFFSETS % 1], reserved=True), catalog=strict)
    topics.declare(str(tmp_path), "__consumer_offsets", 1, {"cleanup": "compact"}, own=True)
    assert refused[1] == [b"1 !err 1 unknown_topic"]
    assert framed(messages([OFFSETS % 1], reserved=True), catalog=strict)[1] == [b"1 !ack 1 101"]


# --- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("__consumer_offsets", True),
        ("__a-b", True),
        ("__", False),
        ("__append", False),
        ("__a.b", False),
        ("orders", False),
    ],
)
def test_a_topic_of_kmq_itself_is_known_by_its_name(name, is_own):
    assert record.is_own_topic(name) is is_own
    assert not (record.is_own_topic(name) and record.is_topic(name))


def test_only_kmq_itself_declares_a_reserved_topic(tmp_path):
    (tmp_path / "topics").mkdir()
    with pytest.raises(ConfigError, match="not begin with append, dropped or __"):
        topics.declare(str(tmp_path), "__consumer_offsets", 1)
    with pytest.raises(ConfigError, match="must match"):
        topics.declare(str(tmp_path), "orders", 1, own=True)
    topics.declare(str(tmp_path), "__consumer_offsets", 1, own=True)
    assert topics.names(str(tmp_path)) == ["__consumer_offsets"]


def test_a_reserved_key_leads_to_its_topic_with_and_without_a_mark():
    for key in (b"__consumer_offsets.@.g.t.0", b"__consumer_offsets.g.t.0"):
        assert resolve(Table(), key, 1)[:2] == (b"__consumer_offsets", b"g.t.0")


# --- the hello ----------------------------------------------------------------------------------------------------------


def test_a_hello_asks_for_reserved_topics_in_so_many_words():
    assert hello.parse(b"!hello acks=1 producer=__offsets reserved=1 token=x").reserved
    assert not hello.parse(b"!hello acks=1 producer=me token=x").reserved
    for name in OWN_NAMES:
        assert hello.parse(b"!hello acks=1 reserved=1 producer=" + name).producer == name
    for name in (b"t5", b"till-7", b"kiosk", b"k1.2.3", b"k1000001", b"auto-k1", b"t1000001x", b"t1000001.0"):
        assert hello.parse(b"!hello acks=1 producer=" + name).producer == name


OWN_NAMES = (b"__offsets", b"__", b"k1000001.7.0", b"auto-k12.0", b"t1000001")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"!hello acks=1 reserved=2", "reserved= must be 1 or spare and needs acks=1"),
        (b"!hello acks=0 reserved=1", "reserved= must be 1 or spare and needs acks=1"),
        *((b"!hello acks=1 producer=" + name, "must not begin with __ or name a Kafka producer") for name in OWN_NAMES),
    ],
)
def test_a_hello_that_cannot_have_reserved_topics_is_told_why(line, reason):
    with pytest.raises(hello.HelloRefused, match=reason):
        hello.parse(line)


# --- the token ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path):
    return load({"KMQ_PIPES": str(tmp_path)}, "/nonexistent.toml")


def test_the_local_token_is_there_without_tokens_and_for_owner_and_group_only(settings, tmp_path):
    token = local_token.LocalToken(settings)
    assert os.listdir(tmp_path) == ["local.token"]
    assert stat.S_IMODE(os.stat(tmp_path / "local.token").st_mode) == 0o640
    shown = local_token.read(settings).encode()
    assert token.matches(shown) and shown.startswith(b"local.")
    for other in (b"", shown[:-1], shown + b"x", b"local.", b"local." + b"0" * 64):
        assert not token.matches(other), other


def test_two_processes_have_the_same_local_token_and_a_new_file_counts(settings, tmp_path):
    first, second = local_token.LocalToken(settings), local_token.LocalToken(settings)
    before = local_token.read(settings).encode()
    assert first.matches(before) and second.matches(before)
    os.unlink(tmp_path / "local.token")
    third = local_token.LocalToken(settings)
    now = local_token.read(settings).encode()
    assert now != before and third.matches(now) and first.matches(now) and not first.matches(before)
