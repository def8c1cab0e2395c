"""Dead letters of consumers, as lines: everything of the message is in them, and where it came from."""

from kmq.client.handling import Backoff
from kmq.message import record, text
from kmq.message.letters import Failure, format_letter
from kmq.message.message import Message

FAILURE = Failure("bil.ling", ValueError("no; such|price\n"), 4, 1712345678.25, 1712345699.5)


def stored(id: bytes, payload: bytes, routing_key: bytes = b"orders.@3.eu") -> Message:
    return Message("orders", 3, 17, b"42|1712345678.000250|%b|1.5|%b|%b" % (routing_key, id, payload))


def read(line: bytes, topic: str = "orders.dlq") -> Message:
    assert record.good_prefix(line) == len(line) and line.count(b"\n") == 1
    return Message(topic, 0, 0, b"43|1712345700.000000|" + line[:-1])


def test_a_letter_has_all_of_the_message_and_says_where_it_is_stored():
    letter = read(format_letter(stored(b"9;p=shop;trace=a%3B;null;enc=b64", b"AAE="), "orders.dlq", FAILURE))
    assert (letter.key, letter.value, letter.timestamp) == (b"eu", b"\0\1", 1.5)
    assert (letter.id, letter.producer) == ("bil%2Eling.orders.3.17", "") or letter.id == "bil.ling.orders.3.17"
    assert letter.headers == [
        ("trace", b"a;"),
        ("null", None),
        ("origin_topic", b"orders"),
        ("origin_partition", b"3"),
        ("origin_offset", b"17"),
        ("origin_seq", b"42"),
        ("group", b"bil.ling"),
        ("error", b"ValueError: no; such|price\n"),
        ("attempts", b"4"),
        ("first_failure", b"1712345678.250"),
        ("last_failure", b"1712345699.500"),
    ]


def test_nulls_and_missing_keys_stay_what_they_are():
    letter = read(format_letter(stored(b"", b"", b"orders"), "orders.dlq", FAILURE))
    assert (letter.key, letter.value) == (None, None)
    letter = read(format_letter(stored(b";enc=b64", b"", b"orders.@."), "dead", FAILURE), "dead")
    assert (letter.key, letter.value) == (b"", b"")


def test_a_users_header_of_the_same_name_is_not_taken_for_ours():
    field = text.make_id("9", [("error", b"mine"), ("attempts", None)])
    letter = read(format_letter(stored(field, b"x"), "orders.dlq", FAILURE))
    assert [value for name, value in letter.headers if name == "error"] == [b"mine", b"ValueError: no; such|price\n"]


def test_a_letter_of_a_letter_has_its_own_origin_alone():
    first = read(format_letter(stored(b"9;trace=a", b"x"), "orders.dlq", FAILURE))
    second = read(format_letter(first, "orders.dlq.dlq", FAILURE), "orders.dlq.dlq")
    origins = [value for name, value in second.headers if name == "origin_topic"]
    assert origins == [b"orders.dlq"] and second.headers[0] == ("trace", b"a")


def test_a_letter_that_would_be_too_long_says_how_long_the_payload_was():
    letter = read(format_letter(stored(b"9", b"y" * 1000), "orders.dlq", FAILURE, max_payload=101))
    assert letter.value == b"y" * 100 and ("len", b"1000") in letter.headers


def test_pauses_double_up_to_the_longest_and_vary():
    backoff = Backoff(first=0.2, longest=3.0)
    for attempt, most in enumerate((0.2, 0.4, 0.8, 1.6, 3.0, 3.0), 1):
        pauses = {backoff.seconds(attempt) for _ in range(50)}
        assert most / 2 <= min(pauses) <= max(pauses) <= most and len(pauses) > 40
    assert backoff.seconds(10_000) <= 3.0
