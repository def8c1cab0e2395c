"""When a row that comes again is the message that is stored, and what is read to tell."""

import pytest

from kmq.message.record import fingerprint
from kmq.spark.sink.sender import ranges, says_the_same

SENT = b"orders.@.k|1.5|7;host=a|pay|load"
SAME = [
    b"1|2.000001|orders.@.k|1.5|7;p=one;host=a|pay|load",
    b"1|2.000001|orders.k|9|7;p=one;host=a|pay|load",  # the same topic and key, sent at another time
    b"1|2.000001|orders.@3.k|1.5|7;p=two;host=a;reason=x;len=9;x=1|pay|load",  # another partition, headers of KMQ's own
]
OTHER = [
    b"1|2.000001|orders.@.j|1.5|7;p=one;host=a|pay|load",
    b"1|2.000001|order.@.k|1.5|7;p=one;host=a|pay|load",
    b"1|2.000001|orders.@.k|1.5|7;p=one;host=b|pay|load",
    b"1|2.000001|orders.@.k|1.5|7;p=one;host=a;more=1|pay|load",
    b"1|2.000001|orders.@.k|1.5|7;p=one|pay|load",
    b"1|2.000001|orders.@.k|1.5|7;p=one;host=a|pay|loae",
]


@pytest.mark.parametrize(("stored", "is_same"), [(line, True) for line in SAME] + [(line, False) for line in OTHER])
def test_a_line_is_compared_as_the_broker_does(stored, is_same):
    assert says_the_same(SENT, stored) is is_same
    prints = []
    for line in (SENT, stored.split(b"|", 2)[2]):
        routing_key, _, id, payload = line.split(b"|", 3)
        prints.append(fingerprint(routing_key, b"".join(id.partition(b";")[1:]), payload))
    assert (prints[0] == prints[1]) is is_same


@pytest.mark.parametrize(
    ("sent", "stored", "is_same"),
    [
        (b"t|0|1|", b"1|2.0|t|0|1;p=a|", True),
        (b"t|0|1;enc=b64|", b"1|2.0|t|0|1;p=a;enc=b64|", True),
        (b"t|0|1|", b"1|2.0|t|0|1;p=a;enc=b64|", False),  # null, and empty
        (b"t|0|1;enc=b64|", b"1|2.0|t|0|1;p=a|", False),
        (b"t|0|1|x", b"1|2.0|t|0|1;p=a;enc=b64|eA==", True),
        (b"t|0|1|eA==", b"1|2.0|t|0|1;p=a;enc=b64|eA==", False),
        (b"t|0|1|x", b"1|2.0|t|0|1;p=a;enc=b64|no base64", False),
    ],
)
def test_payloads_are_compared_by_what_they_mean(sent, stored, is_same):
    assert says_the_same(sent, stored) is is_same


def test_seqs_that_lie_together_are_read_together():
    assert list(ranges([])) == []
    assert list(ranges([5])) == [(5, 5)]
    assert list(ranges([1, 2, 900, 2900, 2901, 9000])) == [(1, 2901), (9000, 9000)]
