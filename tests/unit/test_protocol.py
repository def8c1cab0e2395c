"""The client's side of the acknowledged protocol: lines in and out, no socket. What needs a broker is in tests/scenario."""

import itertools
import random
import re
import time

import pytest

from kmq.client.options import Options
from kmq.client.producer_core import ProducerCore
from kmq.errors import ConfigError
from kmq.ingress import hello
from kmq.message import record
from kmq.message import text as message_text
from kmq.sending.delivery import Delivery
from kmq.sending.failures import Fenced, NotAnswered, Refused


def make(**options):
    """A core that has been greeted, writing whatever it is given."""
    core = ProducerCore(Options(**{"linger_ms": 0, **options}))
    core.greeted(b"!ok max_line=1048576\n" + (b"!last 0\n" if b" last=?" in core.hello() else b""))
    return core


def add(core, payload=b"x", **more):
    delivery = Delivery()
    core.add(delivery, b"t", payload, ts=1.5, **more)
    return delivery


def add_many(core, count, topic=b"t"):
    delivery = Delivery()
    core.add_many(delivery, topic, [b"%d" % n for n in range(count)], ts=1.5)
    return delivery


def take(core):
    """Everything that may be written now, as lines without newline."""
    data = b"".join(iter(lambda: core.take(time.monotonic()), b""))
    assert not data or data.endswith(b"\n")
    return data.splitlines()


def ids(written):
    return [line.split(b"|")[2] for line in written]


def again(core, reason="it broke"):
    """The connection is lost and another one made."""
    core.lost(reason)
    core.greeted(b"!ok max_line=1048576\n")


# --- hello -----------------------------------------------------------------------------------------------------------


def said(core, token=""):
    """A hello, without the name of the run."""
    return re.sub(rb" attempt=[0-9a-f]{16}\.", b" attempt=", core.hello(token))


def test_hello_says_who_is_sending():
    assert said(ProducerCore(Options(producer="a:1", first_id=1))) == b"!hello acks=1 producer=a:1 attempt=1\n"
    assert said(ProducerCore(Options(producer="a:1")), "t0") == (
        b"!hello acks=1 producer=a:1 attempt=1 last=? token=t0\n"
    )
    assert ProducerCore(Options(window="podbus", token="t0")).hello() == b"!hello acks=1 window=podbus token=t0\n"
    assert ProducerCore(Options(dedupe=False)).hello() == b"!hello acks=1\n"


def test_a_generated_name_is_another_one_each_time_and_one_that_the_broker_takes():
    names = {ProducerCore(Options()).ids.name for _ in range(100)}
    assert len(names) == 100
    assert all(hello.parse(ProducerCore(Options()).hello().rstrip(b"\n")).producer for _ in range(10))


@pytest.mark.parametrize(
    "options",
    [
        {"producer": "a b"},
        {"producer": "x" * 65},
        {"window": "|"},
        {"producer": "a", "window": "b"},
        {"window": "b", "dedupe": False},
        {"first_id": 1},
        {"max_in_flight": 0},
    ],
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigError):
        Options(**options)


@pytest.mark.parametrize("reply", [b"!err 0 drop_oldest no acks\n", b"!err 0 bad_hello\n", b"!err 0 unauthorized\n"])
def test_a_hello_that_is_refused_for_good_ends_the_producer(reply):
    core = ProducerCore(Options())
    delivery = add(core)
    with pytest.raises(Refused):
        core.greeted(reply)
    assert core.failed is delivery.error and delivery.done and core.window.unanswered == core.window.bytes == 0


@pytest.mark.parametrize(
    "reply", [b"!err 0 disk_full no room\n", b"!err 0 connections too many\n", b"SSH-2.0\r\n", b"\n"]
)
def test_a_hello_that_is_refused_for_now_leaves_everything_waiting(reply):
    core = ProducerCore(Options())
    delivery = add(core)
    with pytest.raises(Refused):
        core.greeted(reply)
    assert core.failed is None and not delivery.done and not core.connected


def test_each_hello_of_a_producer_is_a_later_attempt_of_its_run():
    cores = ProducerCore(Options(producer="a")), ProducerCore(Options(producer="a"))
    (first, second), (other, _) = ([hello.parse(core.hello().rstrip()).attempt for _ in range(2)] for core in cores)
    assert first.is_before(second) and not second.is_before(first) and first.run != other.run


def test_a_broker_that_is_too_old_to_know_attempts_is_not_told_of_them():
    core = ProducerCore(Options(producer="a", first_id=1))
    delivery, (word,) = add(core), re.findall(rb"attempt=\S+", core.hello())
    with pytest.raises(Refused):
        core.greeted(b"!err 0 bad_hello '%b': expected: !hello acks=0|1|all [producer=<name>]\n" % word)
    core.lost("refused")
    assert core.failed is None and not delivery.done and core.hello() == b"!hello acks=1 producer=a\n"
    core.greeted(b"!ok max_line=1048576\n")
    assert ids(take(core)) == [b"1"]


# --- replies ---------------------------------------------------------------------------------------------------------


def test_one_ack_answers_a_range_over_messages_and_lists():
    core = make()
    first, many, last = add(core), add_many(core, 5), add(core)
    assert len(take(core)) == 7
    core.receive(b"!ack 3 102\n")
    assert (first.seq, many.done, last.done) == (100, False, False)
    core.receive(b"!ack 7 106\n")
    assert (many.seqs, last.seq, core.window.unanswered, core.window.bytes) == ([101, 102, 103, 104, 105], 106, 0, 0)


def test_replies_may_be_cut_anywhere():
    text = b"!ack 2 12\n!dup 3 7\n!err 4 bad_topic\n!ack 6 14\n"
    for cut in range(len(text)):
        core = make(producer="p", first_id=1)
        many = add_many(core, 6)
        take(core)
        core.receive(text[:cut])
        core.receive(text[cut:])
        assert many.seqs == [11, 12, 7, 0, 13, 14]
        assert list(many.refused) == [3] and many.error is many.refused[3]


def test_a_refusal_names_code_topic_and_length():
    core = make()
    add_many(core, 2)
    delivery = add(core, b"the payload")
    take(core)
    core.receive(b"!ack 2 2\n!err 3 too_long by far\n")
    assert delivery.error.code == "too_long" and b"the payload" in delivery.error.line
    assert "too_long by far (a message of 24 bytes for topic 't')" in str(delivery.error)
    assert "the payload" not in str(delivery.error), "logs get nothing that somebody has written into a message"


def test_a_refused_message_nobody_was_told_of_is_kept_for_flush():
    core = make()
    told, seen, untold = add(core), add(core), add(core)
    told.callback, seen.seen = print, True
    take(core)
    core.receive(b"!err 1 a\n!err 2 b\n!err 3 c\n")
    assert core.window.unseen_error() is untold.error
    assert core.window.unseen_error() is None
    assert list(core.window.done) == [told]


@pytest.mark.parametrize(
    "reply",
    [
        b"!ack 1\n",
        b"!ack 0 1\n",
        b"!ack x 1\n",
        b"!ack 9 9\n",
        b"!dup 2 1\n",
        b"!err 2 x y\n",
        b"hello\n",
        b"\n",
        b"!no 1 1\n",
    ],
)
def test_a_reply_that_cannot_be_breaks_the_connection_and_loses_nothing(reply):
    core = make()
    delivery = add(core)
    add(core)
    before = take(core)
    with pytest.raises(Refused, match="protocol"):
        core.receive(reply)
    again(core)
    if not delivery.done:  # an ack of too many answers those that there are
        assert take(core) == before


def test_fenced_ends_the_producer_with_everything_that_has_no_reply():
    core = make()
    acked, flying, queued = add(core), add(core), None
    take(core)
    queued = add(core)
    with pytest.raises(Fenced):
        core.receive(b"!ack 1 1\n!err 2 fenced a newer one\n")
    assert acked.error is None and acked.seq == 1
    assert isinstance(flying.error, Fenced) and isinstance(queued.error, Fenced) and isinstance(core.failed, Fenced)
    assert core.window.unanswered == core.window.bytes == 0


# --- reconnects ------------------------------------------------------------------------------------------------------


def test_all_that_has_no_reply_is_sent_again_in_order_with_the_same_ids():
    core = make()
    sent = [add(core), add_many(core, 4), add(core)]
    written = take(core)
    core.receive(b"!ack 3 3\n")
    queued = add(core)
    again(core)
    resent = take(core)
    assert resent[:3] == written[3:]
    assert ids(resent) == [b"4", b"5", b"6", b"7"]
    core.receive(b"!dup 1 4\n!dup 2 5\n!ack 4 7\n")
    assert [d.seqs for d in (*sent, queued)] == [[1], [2, 3, 4, 5], [6], [7]]


@pytest.mark.parametrize("code", ["disk_full", "quota", "stopping", "busy"])
def test_a_refusal_that_passes_is_sent_again_on_the_next_connection(code):
    core = make()
    many = add_many(core, 3)
    take(core)
    with pytest.raises(Refused) as refused:
        core.receive(b"!ack 1 1\n!err 2 %b for now\n!err 3 %b for now\n" % (code.encode(), code.encode()))
    again(core, str(refused.value))
    assert ids(take(core)) == [b"2", b"3"]
    core.receive(b"!ack 2 3\n")
    assert many.seqs == [1, 2, 3] and not many.refused


def test_a_refusal_that_passes_fails_its_messages_where_nobody_wants_to_wait():
    core = make(retry=frozenset())
    first, second = add(core), add(core)
    take(core)
    core.receive(b"!err 1 disk_full no room\n")
    later = add(core)
    assert first.error.code == "disk_full" and not take(core), "nothing more goes where it would be refused"
    with pytest.raises(Refused):  # all answered: the connection has to be replaced
        core.receive(b"!err 2 disk_full no room\n")
    assert second.error.code == "disk_full" and not later.done
    core.lost("x")
    with pytest.raises(Refused):
        core.greeted(b"!err 0 disk_full no room\n")
    assert later.error.code == "disk_full" and core.failed is None and core.window.unanswered == 0


def test_time_that_is_up_fails_what_waits_and_only_that():
    core = make(delivery_timeout_s=5.0)
    flying = add(core)
    take(core)
    core.lost("the cable is out")
    old, new = add(core), add(core)
    old.since -= 6
    flying.since -= 6
    core.window.expire(time.monotonic(), core.describe(time.monotonic()))
    assert isinstance(flying.error, NotAnswered) and "the cable is out" in str(flying.error)
    assert old.done and not new.done and core.window.unanswered == 1 and core.window.bytes == new.size
    core.greeted(b"!ok max_line=9\n")
    assert ids(take(core)) == [b"3"]


def test_a_reply_that_comes_after_the_time_was_up_changes_nothing():
    core = make(delivery_timeout_s=5.0)
    late, next_one = add(core), add(core)
    take(core)
    late.since -= 6
    core.window.expire(time.monotonic(), core.describe(time.monotonic()))
    core.receive(b"!ack 2 2\n")
    assert isinstance(late.error, NotAnswered) and next_one.seq == 2 and next_one.error is None
    assert core.window.unanswered == core.window.bytes == 0


# --- ids -------------------------------------------------------------------------------------------------------------


def test_made_ids_of_a_name_go_on_from_the_last_one_that_the_broker_knows():
    """What was queued before that is known, too: whole lists, with headers, as base64."""
    core = ProducerCore(Options(producer="a"))
    first = add(core, headers={"trace": "7"})
    add_many(core, 2)
    add(core, payload=b"\0")
    assert not take(core)
    core.greeted(b"!ok max_line=1048576\n!last 41\n")
    add(core)
    size = core.window.bytes
    assert ids(written := take(core)) == [b"42;trace=7", b"43", b"44", b"45;enc=b64", b"46"]
    assert size == sum(len(line) + 1 for line in written)
    core.receive(b"!ack 1 9\n")
    assert first.seq == 9 and core.window.bytes == size - len(written[0]) - 1
    core.lost("it broke")
    assert said(core) == b"!hello acks=1 producer=a attempt=1\n"  # now we know better than the broker
    core.greeted(b"!ok max_line=1048576\n")
    add(core)
    assert ids(take(core)) == [b"43", b"44", b"45;enc=b64", b"46", b"47"]
    core.receive(b"!ack 5 20\n")
    assert core.window.bytes == core.window.unanswered == 0


def test_a_name_that_the_broker_does_not_know_begins_at_1():
    core = make(producer="a")
    add(core)
    assert ids(take(core)) == [b"1"]


def test_ids_of_the_users_own_stay_as_they_are_wherever_the_last_one_is():
    core = ProducerCore(Options(producer="a"))
    for id in (None, None, 100, None):
        add(core, id=id)
    core.add_lines(Delivery(), b"t|1|7|x\n", 1)
    core.greeted(b"!ok max_line=1048576\n!last 50\n")
    add(core)
    assert ids(take(core)) == [b"51", b"52", b"100", b"101", b"7", b"102"]


def test_a_greeting_with_a_last_id_is_whole_when_both_lines_are():
    core, greeting = ProducerCore(Options(producer="a")), b"!ok max_line=1048576\n!last 41\n"
    assert [at for at in range(len(greeting) + 1) if core.is_greeting(greeting[:at])] == [len(greeting)]
    assert core.is_greeting(b"!err 0 unauthorized\n")
    with pytest.raises(Refused, match="protocol"):
        core.greeted(b"!ok max_line=1048576\n!ack 1 2\n")
    assert not core.connected and core.failed is None


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"!err 1 id_reused 77\n", "id_reused id 7 was stored before, as seq 77, with other content"),
        (b"!err 1 id_too_old\n", "id_too_old id 7 is below the last one stored"),
    ],
)
def test_an_id_that_is_refused_is_named_with_what_to_do(reply, text):
    """It is final for this message; those behind it go on."""
    core = make(producer="a", first_id=1)
    delivery, other = add(core, id=7, headers={"trace": "x"}), add(core, id=8)
    take(core)
    core.receive(reply + b"!ack 2 78\n")
    assert text in str(delivery.error) and "give this message an id above the last one" in str(delivery.error)
    assert delivery.error.code == reply.split()[2].decode() and other.seq == 78 and core.connected


def test_a_made_id_that_was_stored_before_is_an_error_and_no_success():
    """Another program of this name: taking `!dup` for delivered would lose the message silently."""
    core = make(producer="a")
    delivery = add(core)
    take(core)
    core.receive(b"!dup 1 77\n")
    assert delivery.error.code == "id_reused"


@pytest.mark.parametrize("options", [{"producer": "a", "first_id": 5}, {"producer": "a"}, {"window": "w"}])
def test_an_id_of_the_users_own_may_have_been_stored_before(options):
    core = make(**options)
    delivery = add(core, id=5)
    take(core)
    core.receive(b"!dup 1 77\n")
    assert delivery.seq == 77 and delivery.error is None


def test_made_ids_go_on_after_those_of_the_user():
    core = make(producer="a", first_id=1)
    for id in (None, 10, None, "20", None):
        add(core, id=id)
    assert ids(take(core)) == [b"1", b"10", b"11", b"20", b"21"]


def test_a_list_that_cannot_be_sent_takes_no_ids():
    core = make(producer="a", first_id=1)
    with pytest.raises(TypeError):
        core.add_many(Delivery(), b"t", [b"x", 5], ts=1.5)
    assert core.ids.last == 0
    add_many(core, 2)
    assert ids(take(core)) == [b"1", b"2"]


@pytest.mark.parametrize("id", ["x", "-1", "1.5", "", "٣", 10**18])
def test_an_id_that_no_producer_can_have_is_refused_here(id):
    with pytest.raises(ValueError, match="id"):
        add(make(), id=id)


def test_ids_of_a_window_are_any_text_and_made_ones_are_unique():
    cores = [make(window="w"), make(window="w")]
    for core in cores:
        add(core, id="order;7|x")
        add(core)
        add_many(core, 3)
    written = [ids(take(core)) for core in cores]
    assert written[0][0] == written[1][0] == b"order%3B7%7Cx"
    made = written[0][1:] + written[1][1:]
    assert len(set(made)) == len(made) == 8


# --- what is written when ----------------------------------------------------------------------------------------------


def test_what_comes_while_a_reply_is_awaited_goes_with_the_next_write():
    core = make(linger_ms=None)
    add(core)
    assert len(take(core)) == 1
    for _ in range(10):
        add(core)
    assert take(core) == []
    core.receive(b"!ack 1 1\n")
    assert len(take(core)) == 10


def test_a_full_batch_and_somebody_who_waits_do_not_wait_for_a_reply():
    core = make(linger_ms=None, batch_bytes=100)
    add(core)
    take(core)
    add(core)
    assert take(core) == []
    core.window.hurry = True
    assert len(take(core)) == 1 and not core.window.hurry
    add(core, b"x" * 100)
    assert len(take(core)) == 1


def test_linger_gathers_for_its_time():
    core = make(linger_ms=1000)
    first = add(core)
    now = first.since
    assert core.take(now + 0.999) == b"" and core.linger_left(now + 0.999) == pytest.approx(0.001)
    assert core.take(now + 1.0) != b""
    assert core.linger_left(now) is None


def test_the_window_is_full_by_messages_or_bytes_and_has_room_after_replies():
    core = make(max_in_flight=3)
    add_many(core, 3)
    assert core.window.is_full
    take(core)
    core.receive(b"!ack 1 1\n")
    assert not core.window.is_full
    core = make(max_in_flight_bytes=100)
    add(core, b"x" * 100)
    assert core.window.is_full


def test_blocked_senders_resume_when_half_the_window_is_free_and_fill_it():
    core = make(max_in_flight=4, linger_ms=None)
    add_many(core, 4)
    take(core)
    core.receive(b"!ack 1 1\n")
    assert not core.window.is_full and not core.window.is_half_free
    core.receive(b"!ack 4 4\n")
    assert core.window.is_half_free
    core.window.filling = True
    add(core)
    assert take(core) == [] and core.window.waits_for_reply
    core.window.hurry = True
    assert len(take(core)) == 1 and not core.window.filling


def test_a_stall_is_described_with_what_is_known():
    core = ProducerCore(Options())
    add(core)
    core.lost("nothing listens on 127.0.0.1:1")
    text = core.describe(time.monotonic() + 7)
    assert "1 messages unanswered, the oldest for 7.0 s" in text
    assert "; not connected for 7.0 s: nothing listens on 127.0.0.1:1" in text
    assert "does not answer" in make().describe(0)


# --- lines -----------------------------------------------------------------------------------------------------------

PAYLOADS = [b"plain", b"a|b;c%", b"tab\there", b"dos\r", "größe 日本".encode(), b"x" * 5000]
ENCODED = [b"nul\0", b"two\nlines", b"\x1b[31mred", b"\x7f", b"\xff\xfe", b"\xc3", bytes(range(256)), b""]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_plain_text_stays_plain(payload):
    line = message_text.format_text(b"t", payload, b"7", 1.5)
    assert line == b"t|1.500000|7|" + payload + b"\n"


@pytest.mark.parametrize("payload", PAYLOADS + ENCODED)
@pytest.mark.parametrize("id", [b"", b"7", b"7;trace=a%3B"])
def test_any_bytes_come_back_identical(payload, id):
    line = message_text.format_text(b"t", payload, id, 1.5)
    assert record.good_prefix(line) == len(line) and line.count(b"\n") == 1
    _, _, stored_id, stored = line[:-1].split(b"|", 3)
    assert stored_id == id + (b";enc=b64" if payload in ENCODED else b"")
    assert stored == payload or stored.isascii()
    assert message_text.decode_payload(stored_id, stored) == payload


@pytest.mark.parametrize("first_id", [None, 1, 998, 999, 1000, 17_000_000_000_000_999])
@pytest.mark.parametrize("odd", [b"plain", None, *ENCODED, "größe".encode(), b"ends|"])
def test_a_list_is_formatted_like_one_message_after_the_other(first_id, odd):
    payloads = [b"payload %d" % n for n in range(2500)]
    payloads[1234] = odd
    numbers = itertools.repeat(b"") if first_id is None else (b"%d" % n for n in itertools.count(first_id))
    one_by_one = [message_text.format_text(b"t.k", p, id, 1.5) for p, id in zip(payloads, numbers, strict=False)]
    assert message_text.format_many(b"t.k", payloads, 1.5, first_id) == b"".join(one_by_one)


def test_an_empty_list_is_delivered_at_once():
    core = make()
    delivery = add_many(core, 0)
    assert delivery.done and core.window.unanswered == 0 and take(core) == []


def test_a_dot_in_a_key_cannot_make_it_another_topics_message():
    assert message_text.make_routing_key("jobs", "eu.1") == b"jobs.@.eu%2E1"
    assert message_text.make_routing_key("jobs.eu") == b"jobs.eu.@"
    assert message_text.make_routing_key("jobs") == b"jobs"
    assert message_text.make_routing_key("jobs", "") == b"jobs.@."
    assert message_text.make_routing_key("jobs", partition=3) == b"jobs.@3"
    assert message_text.make_routing_key("jobs", b"\xff@3", 0) == b"jobs.@0.%FF@3"
    for key in ("eu.1", "a|b", "größe", "%2E", "a b\n", "", "@3", "@", b"\xff\0|", b"%"):
        for topic, partition in (("jobs", None), ("jobs.eu", 7)):
            routing_key = message_text.make_routing_key(topic, key, partition)
            assert record.good_prefix(routing_key + b"|0||x\n") and record.refusal(routing_key + b"|0||x") == ""
            mark = record.marked(routing_key)
            assert (mark.topic, mark.partition) == (topic.encode(), partition)
            assert message_text.decode_bytes(mark.key) == (key if isinstance(key, bytes) else key.encode())
            assert isinstance(key, bytes) or message_text.decode(mark.key) == key


def test_no_value_is_not_an_empty_one():
    assert message_text.format_text(b"t", None, b"7", 1.5) == b"t|1.500000|7|\n"
    assert message_text.format_text(b"t", b"", b"7", 1.5) == b"t|1.500000|7;enc=b64|\n"
    assert (message_text.decode_payload(b"7", b""), message_text.decode_payload(b"7;enc=b64", b"")) == (None, b"")


def test_a_negative_partition_is_refused_here():
    with pytest.raises(ValueError, match="partition -1: must be 0 or more"):
        message_text.make_routing_key("jobs", "k", -1)


@pytest.mark.parametrize("topic", ["", ".a", "-a", "a|b", "a\n", "a b", "../x", "größe", "!hello"])
def test_a_topic_that_cannot_be_one_is_refused_here(topic):
    with pytest.raises(ValueError, match="topic"):
        message_text.make_routing_key(topic)


def test_headers_follow_the_id_and_any_name_can_be_sent():
    assert message_text.make_id("7", {"trace": "a;b=c|d"}) == b"7;trace=a%3Bb=c%7Cd"
    assert (
        message_text.make_id("7", [("a", b"\xff"), ("a", None), ("enc", ""), ("", "x")]) == b"7;%61=%FF;%61;%65nc=;=x"
    )
    for name in ("p", "w", "enc", "reason", "len", "", "a;b", "a=b", "a b", "é"):
        field = message_text.make_id("7", {name: "x", "other": "y"})
        assert record.user_headers(field[1:]) == field[1:] and not record.claims(b"t|0|" + field + b"|x\n")
        assert message_text.decode(field.split(b";")[1].partition(b"=")[0]) == name


def test_a_payload_that_is_no_base64_in_spite_of_its_header_is_kept():
    assert message_text.decode_payload(b"7;enc=b64", b"a") == b"a"
    assert message_text.decode_payload(b"7;enc=b64", b"YQ==") == b"a"


# --- a whole history -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_history_of_broken_connections_stores_everything_once_and_in_order(seed):
    """Replies and what was written are cut at random; the broker's memory of ids is a few lines of its own here."""
    rng = random.Random(seed)
    core = make(max_in_flight=200, linger_ms=None)
    stored, seqs, deliveries = [], {}, []  # the broker: lines, and id → seq

    def reply_to(written, done):
        replies = []
        for n, line in enumerate(written, done + 1):
            id = line.split(b"|")[2]
            if id in seqs:
                replies.append(b"!dup %d %d\n" % (n, seqs[id]))
            else:
                stored.append(line)
                seqs[id] = len(stored)
                replies.append(b"!ack %d %d\n" % (n, len(stored)))
        return replies

    done = 0
    while len(deliveries) < 300 or core.window.unanswered:
        if len(deliveries) < 300 and not core.window.is_full:
            deliveries.append(add_many(core, rng.randrange(1, 30)) if rng.random() < 0.3 else add(core))
        core.window.hurry = rng.random() < 0.5
        written = take(core)
        reached = written if rng.random() < 0.7 else written[: rng.randrange(len(written) + 1)]
        replies = reply_to(reached, done)
        if len(reached) < len(written) or rng.random() < 0.2:
            core.receive(b"".join(replies[: rng.randrange(len(replies) + 1)]))
            again(core)
            done = 0
        else:
            core.receive(b"".join(replies))
            done += len(written)
    assert [int(id) for id in ids(stored)] == list(range(1, len(stored) + 1))
    assert len(stored) == sum(delivery.count for delivery in deliveries)
    assert [seq for delivery in deliveries for seq in delivery.seqs] == list(range(1, len(stored) + 1))
    assert not any(delivery.error for delivery in deliveries) and core.window.bytes == 0
