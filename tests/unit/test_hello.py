"""The first line of an acknowledged connection: what it may say, and what it is told where it says something else."""

import pytest

from kmq.ingress import hello

LONG = b"A" * 64


@pytest.mark.parametrize(
    ("line", "acks", "producer", "tag", "token"),
    [
        (b"!hello acks=1", True, b"", b"", b""),
        (b"!hello acks=all", True, b"", b"", b""),
        (b"!hello acks=0", False, b"", b"", b""),
        (b"!hello acks=1\r", True, b"", b"", b""),
        (b"!hello  acks=1\tproducer=me ", True, b"me", b"p=me", b""),
        (b"!hello producer=me acks=1", True, b"me", b"p=me", b""),
        (b"!hello acks=1 producer=aZ09_.:-", True, b"aZ09_.:-", b"p=aZ09_.:-", b""),
        (b"!hello acks=1 producer=" + LONG, True, LONG, b"p=" + LONG, b""),
        (b"!hello acks=1 window=podbus", True, b"", b"w=podbus", b""),
        (b"!hello acks=0 window=podbus token=a=b|c;d", False, b"", b"w=podbus", b"a=b|c;d"),
    ],
)
def test_what_a_producer_asks_for(line, acks, producer, tag, token):
    said = hello.parse(line)
    assert (said.acks, said.producer, said.tag, said.token) == (acks, producer, tag, token)


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        (b"!hello acks=1 producer=me last=?", True),
        (b"!hello last=? acks=all producer=me token=x", True),
        (b"!hello acks=1 producer=me", False),
    ],
)
def test_a_producer_may_ask_for_its_last_id(line, asks):
    assert hello.parse(line).asks_last is asks


@pytest.mark.parametrize(("value", "spare"), [(b"1", False), (b"spare", True)])
def test_a_program_of_the_broker_may_ask_for_what_is_kept_free_of_a_full_disk(value, spare):
    said = hello.parse(b"!hello acks=1 producer=__me reserved=" + value)
    assert (said.reserved, said.spare) == (True, spare)


def test_a_producer_may_say_which_attempt_it_is():
    said = hello.parse(b"!hello acks=0 attempt=a_Z-9." + b"9" * 18 + b" producer=me").attempt
    assert (said.run, said.number) == ("a_Z-9", 10**18 - 1)
    assert hello.parse(b"!hello acks=1 producer=me").attempt is None


NAMES = "must be 1 to 64 of A-Z a-z 0-9 _ . : -"
ATTEMPT = "must be <run>.<number>, of at most 64 letters"
LAST = "last= must be ? and needs acks=1 and producer="


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"!", "expected: !hello acks=0|1|all"),
        (b"!hell acks=1", "expected: !hello acks=0|1|all"),
        (b"!helloacks=1", "expected: !hello acks=0|1|all"),
        (b"!HELLO acks=1", "expected: !hello acks=0|1|all"),
        (b"!b 17", "expected: !hello acks=0|1|all"),
        (b"!hello", "acks= must be 0, 1 or all"),
        (b"!hello acks=", "acks= must be 0, 1 or all"),
        (b"!hello acks=2", "acks= must be 0, 1 or all"),
        (b"!hello acks=-1", "acks= must be 0, 1 or all"),
        (b"!hello producer=me", "acks= must be 0, 1 or all"),
        (b"!hello acks=1 acks=1", "'acks=1': expected"),
        (b"!hello acks=1 me", "'me': expected"),
        (b"!hello acks=1 name=me", "'name=me': expected"),
        (b"!hello acks=1 Producer=me", "'Producer=me': expected"),
        (b"!hello acks=1 \xff\x00=me", "=me': expected"),
        (b"!hello acks=1 producer=", "producer= " + NAMES),
        (b"!hello acks=1 producer=a/b", "producer= " + NAMES),
        (b"!hello acks=1 producer=a;w=b", "producer= " + NAMES),
        (b"!hello acks=1 producer=a|b", "producer= " + NAMES),
        (b"!hello acks=1 producer=a%b", "producer= " + NAMES),
        (b"!hello acks=1 producer=" + LONG + b"A", "producer= " + NAMES),
        (b"!hello acks=1 producer=\xc3\xa9", "producer= " + NAMES),
        (b"!hello acks=1 window=", "window= " + NAMES),
        (b"!hello acks=1 window=a\x00", "window= " + NAMES),
        (b"!hello acks=1 producer=a window=b", "exclude each other"),
        (b"!hello acks=1 attempt=r.1", "attempt= needs producer="),
        (b"!hello acks=1 window=a attempt=r.1", "attempt= needs producer="),
        (b"!hello acks=1 producer=a attempt=", ATTEMPT),
        (b"!hello acks=1 producer=a attempt=1", ATTEMPT),
        (b"!hello acks=1 producer=a attempt=r.-1", ATTEMPT),
        (b"!hello acks=1 producer=a attempt=r." + b"1" * 19, ATTEMPT),
        (b"!hello acks=1 producer=a attempt=\xff.1", ATTEMPT),
        (b"!hello acks=1 producer=a attempt=" + LONG + b"A.1", ATTEMPT),
        (b"!hello acks=1 shard=", "shard= must be ?"),
        (b"!hello acks=1 producer=a last=", LAST),
        (b"!hello acks=1 producer=a last=7", LAST),
        (b"!hello acks=0 producer=a last=?", LAST),
        (b"!hello acks=1 window=a last=?", LAST),
        (b"!hello acks=1 last=?", LAST),
    ],
)
def test_what_is_no_hello_is_refused_with_a_code_and_a_reason_in_one_line(line, reason):
    with pytest.raises(hello.HelloRefused) as refused:
        hello.parse(line)
    said = str(refused.value)
    assert said.startswith("bad_hello ") and reason in said
    assert len(said) < 250 and "\n" not in said and said.encode().decode().isprintable()


def test_a_long_field_is_not_repeated_in_full():
    with pytest.raises(hello.HelloRefused) as refused:
        hello.parse(b"!hello acks=1 " + b"x" * 4000)
    assert len(str(refused.value)) < 250


def test_a_hello_may_ask_for_the_shard():
    assert hello.parse(b"!hello acks=0 shard=?").asks_shard and not hello.parse(b"!hello acks=0").asks_shard
