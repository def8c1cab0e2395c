"""What members of groups say of themselves by Kafka's protocol, read from bytes of strangers."""

import random
import struct

import pytest
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription

from kmq.gateway.kafka.groups import MemberMetadata, assignment_bytes, read_metadata
from kmq.gateway.kafka.wire import BadRequest
from kmq.wire.requests import TopicPartition


def text(word):
    return struct.pack(">h", len(word)) + word


TOPICS = struct.pack(">i", 2) + text(b"orders") + text(b"audit")
USER_DATA = struct.pack(">i", 3) + b"abc"
OWNED = struct.pack(">i", 1) + text(b"orders") + struct.pack(">iii", 2, 4, 7)


def test_a_subscription_says_topics_and_from_version_1_on_what_is_still_read():
    topics, owned = ("audit", "orders"), frozenset({("orders", 4), ("orders", 7)})
    assert read_metadata(b"\0\0" + TOPICS + USER_DATA) == MemberMetadata(topics, frozenset())
    assert read_metadata(b"\0\1" + TOPICS + USER_DATA + OWNED) == MemberMetadata(topics, owned)
    newest = b"\0\3" + TOPICS + b"\xff\xff\xff\xff" + OWNED + struct.pack(">i", 9) + text(b"rack")
    assert read_metadata(newest) == MemberMetadata(topics, owned)
    assert read_metadata(b"\x7f\xff" + newest[2:]).owned == owned, "a version to come"


@pytest.mark.parametrize("rest", [b"", USER_DATA, USER_DATA + OWNED[:9], USER_DATA + b"\x7f\xff\xff\xff"])
def test_a_subscription_that_ends_before_its_version_does_is_read_as_far_as_it_goes(rest):
    assert read_metadata(b"\0\1" + TOPICS + rest) == MemberMetadata(("audit", "orders"), frozenset())


def test_topics_that_cannot_exist_are_left_out():
    topics = struct.pack(">i", 4) + text(b"a b") + text(b"") + text(b"ok") + text(b"x" * 249)
    assert read_metadata(b"\0\0" + topics).topics == ("ok",)


def test_what_another_client_writes_is_read():
    row = ConsumerProtocolSubscription.TopicPartition(topic="orders", partitions=[2, 1])
    said = ConsumerProtocolSubscription(version=1, topics=["orders"], user_data=b"", owned_partitions=[row]).encode()
    assert read_metadata(said) == MemberMetadata(("orders",), frozenset({("orders", 1), ("orders", 2)}))


@pytest.mark.parametrize(
    "metadata", [b"", b"\0", b"\0\1", b"\0\1\0\0\0\1", b"\0\0\xff\xff\xff\xfe", b"\0\0\0\0\0\1\0\1\xff"]
)
def test_metadata_without_topics_is_refused(metadata):
    with pytest.raises(BadRequest):
        read_metadata(metadata)


def test_any_bytes_are_a_subscription_or_refused():
    chance, whole = random.Random(7), b"\0\1" + TOPICS + USER_DATA + OWNED
    for _ in range(3000):
        changed = bytearray(whole[: chance.randrange(len(whole) + 1)])
        for _ in range(chance.randrange(4)):
            if changed:
                changed[chance.randrange(len(changed))] = chance.choice((0, 1, 127, 128, 255))
        try:
            read_metadata(bytes(changed))
        except BadRequest:
            pass


def test_clients_read_the_assignment():
    partitions = [TopicPartition("orders", 0), TopicPartition("orders", 7), TopicPartition("audit", 1)]
    found = ConsumerProtocolAssignment.decode(assignment_bytes(partitions))
    assert {(row.topic, number) for row in found.assigned_partitions for number in row.partitions} == set(partitions)
    assert not ConsumerProtocolAssignment.decode(assignment_bytes([])).assigned_partitions
