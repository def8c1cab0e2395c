"""Requests of the Kafka protocol as strangers send them: every key and version, whole, cut, and full of lies."""

import random
import struct
import time
import tracemalloc
import types
from typing import Any

import pytest
from kafka_client import made_up, request

from kmq.access import roles
from kmq.config.values import MIB
from kmq.gateway.kafka import wire
from kmq.gateway.kafka.access import BEFORE
from kmq.gateway.kafka.wire import BadRequest, ErrorCode, Key, Unsupported

BY_HAND = (Key.PRODUCE, Key.FETCH)
EVERY = [
    pytest.param(key, version, id=f"{key.name}-{version}")
    for key in Key
    for version in range(key.low, key.high + 1)
    if key not in BY_HAND
]
LONGEST_S = 5.0  # of CPU: what is not bounded takes minutes
LIES = [
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff\x0f",
    b"\x80\x80\x80\x80\x80\x01",
    b"\xff\xfe",
    b"\x80\0",
]


def plain(found: Any) -> Any:
    """What was decoded, as `made_up` has it."""
    if isinstance(found, types.SimpleNamespace):
        return {name: plain(each) for name, each in vars(found).items()}
    return tuple(map(plain, found)) if isinstance(found, tuple) else found


def read(frame: bytes) -> Any:
    """The body of a request without its length, read as the door reads it."""
    view = memoryview(frame)
    found = wire.header(view)
    if found.key in BY_HAND:
        raise Unsupported(found)
    return wire.decode(found, view)


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("key", "version"), EVERY)
def test_a_whole_request_is_read_field_by_field(key, version):
    rng = random.Random(version)
    for _ in range(5):
        sent = made_up(rng, wire.request_class(key, version))
        frame = request(key, version, **sent)[4:]
        assert plain(read(frame)) == sent
        assert plain(read(frame + b"\0\0")) == sent  # librdkafka sends more than there is to be read


@pytest.mark.parametrize(("key", "version"), EVERY)
def test_a_request_that_was_cut_is_refused_wherever_that_is(key, version):
    rng = random.Random(version)
    frame = request(key, version, **made_up(rng, wire.request_class(key, version)))[4:]
    for length in {*range(min(len(frame), 50)), *rng.choices(range(len(frame)), k=50)}:
        with pytest.raises(BadRequest):
            read(frame[:length])


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("key", "version"), EVERY)
def test_a_spoiled_request_is_read_or_refused(key, version):
    rng = random.Random(version)
    cls = wire.request_class(key, version)
    tracemalloc.start()
    try:
        for _ in range(40):
            frame = bytearray(request(key, version, **made_up(rng, cls))[4:])
            at = rng.randrange(8, len(frame) + 1)
            if rng.random() < 0.5:
                frame[at : at + rng.choice([0, 1, 4])] = rng.choice(LIES)
            else:
                frame[at:] = rng.randbytes(rng.randrange(200))
            try:
                read(bytes(frame))
            except (BadRequest, Unsupported):
                pass
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.sampled(50)
@pytest.mark.parametrize(
    ("key", "version"),
    [each for each in EVERY if each.values[1] in (each.values[0].low, each.values[0].high, each.values[0].served)],
)
@pytest.mark.parametrize("count", [wire.MAX_ENTRIES - 9, 2 * MIB - 9])
def test_a_request_of_tiny_entries_takes_neither_time_nor_memory(key, version, count):
    """As many zeros, ones or twos behind every number that could be a count."""
    frame = request(key, version, **made_up(random.Random(0), wire.request_class(key, version)))[4:]
    flexible = wire.is_flexible(key, version)
    counted = wire.varint(count + 1) if flexible else struct.pack(">i", count)
    tails = [bytes([byte]) * (2 * MIB) for byte in range(3)]
    for at in range(18 + flexible, min(len(frame), 40)):
        for tail in tails:
            begin = time.process_time()
            try:
                read(frame[:at] + counted + tail)
            except BadRequest:
                pass
            assert time.process_time() - begin < LONGEST_S


def test_a_string_of_negative_length_does_not_go_back():
    body = struct.pack(">ih", 10_000, -2) + bytes(20_000)
    with pytest.raises(BadRequest, match="-2 bytes"):
        read(struct.pack(">hhih", Key.METADATA, 4, 1, -1) + body)


def test_tagged_fields_that_are_not_known_are_skipped():
    frame = request(Key.HEARTBEAT, 4, group_id="g", generation_id=1, member_id="m")[4:]
    assert read(frame[:-1] + b"\2\0\0\x64\3abc").member_id == "m"
    with pytest.raises(BadRequest):
        read(frame[:-1] + b"\2\0\0\x64\4abc")


def test_headers_of_any_bytes_are_read_or_refused():
    rng = random.Random(1)
    for _ in range(5000):
        frame = struct.pack(">hh", rng.randrange(-2, 70), rng.randrange(-2, 15)) + rng.randbytes(rng.randrange(40))
        try:
            found = wire.header(memoryview(frame))
        except (BadRequest, Unsupported):
            continue
        assert len(found.client) <= 200 and found.body <= len(frame)


@pytest.mark.parametrize(("key", "version"), [each for each in EVERY if each.values[0] not in BEFORE])
def test_every_request_can_be_refused_in_the_form_of_its_version(key, version):
    rng = random.Random(version)
    frame = request(key, version, **made_up(rng, wire.request_class(key, version)))[4:]
    found = wire.header(memoryview(frame))
    if roles.NEEDED[key.act] != roles.ANY:
        assert wire.encode(found, wire.refusal(found, read(frame), ErrorCode.topic_authorization_failed, "no"))
