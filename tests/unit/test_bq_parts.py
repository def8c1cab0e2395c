"""The Broadcast Queue without Consul: what a message and a key look like, what is trimmed, what a subscriber decides."""

import base64
import json
import math
import tempfile
import threading
import time

import pytest

from kmq.cli.bq_items import as_fields, run_command
from kmq.cluster.consul import ConsulAddress, KvEntry, Request, Response, given_entries
from kmq.cluster.presence import Keys, Presence, check_broker, decode_fields, encode_fields
from kmq.cluster.publisher import KEPT, KEPT_BYTES, MAX_BYTES, Mark, Message, check_size, superfluous
from kmq.cluster.queue import Place
from kmq.cluster.subscriber import Snapshot, Subscriber
from kmq.config.settings import load
from kmq.errors import ConfigError, KmqError

KEYS = Keys("dev")


def message(epoch, payload=b"x", id="ab" * 16):
    return Message("a", payload, id, 1795412895.25, epoch=epoch)


# --- messages and keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [b"", b"hello", b"\n\n", b"id=1 type=b ts=2\n", bytes(range(256))])
@pytest.mark.parametrize("expires", [0.0, 1795412999.5])
def test_a_message_comes_back_as_it_was(payload, expires):
    before = Message("Limits.v2", payload, "0f" * 16, 1795412895.778284, expires)
    after = Message.decode(before.encode(), 7)
    assert after == before._replace(epoch=7)
    assert before.encode().partition(b"\n")[2] == payload


def test_a_new_message_has_an_id_of_its_own_and_expires_when_it_is_told_to():
    one, two = Message.new("a", b""), Message.new("a", b"", lasts_s=60)
    assert one.id != two.id and len(one.id) == 32 and one.epoch == 0 and one.expires == 0
    assert math.isclose(two.expires, two.ts + 60)
    assert Message.decode(two.encode(), 0).expires == pytest.approx(two.expires, abs=1e-5)


@pytest.mark.parametrize("name", ["", "a b", "a=b", "a\n", "-a", "ä", "x" * 65, "snapshot"])
def test_a_type_that_the_header_cannot_hold_or_that_is_kept_is_refused(name):
    with pytest.raises(ConfigError, match="type "):
        Message.new(name, b"")


@pytest.mark.parametrize(
    "value", [b"", b"x", b"id=1 type=a ts=1", b"id=1 type=a\n", b"type=a ts=1\nx", b"id=1 type=a ts=x\n"]
)
def test_what_is_no_message_is_named_by_its_epoch(value):
    with pytest.raises(ValueError, match=r"message 12 of the Broadcast Queue: .*; KMQ did not write it"):
        Message.decode(value, 12)


def test_a_message_has_at_most_380_000_bytes_with_its_header_and_states():
    room = MAX_BYTES - len(message(0, b"").encode())
    check_size(message(0, b"x" * room), {})
    with pytest.raises(ConfigError, match="380,001 bytes with its header; at most 380,000"):
        check_size(message(0, b"x" * (room + 1)), {})
    check_size(message(0, b"x" * (room - 12)), {"key": b"123456789"})
    with pytest.raises(ConfigError, match="and 12 of the states that it changes"):
        check_size(message(0, b"x" * (room - 11)), {"key": b"123456789"})


def test_the_longest_message_fits_into_a_txn_of_consul():
    assert 4 * math.ceil(MAX_BYTES / 3) + 8192 < 512 * 1024  # with the other operations


@pytest.mark.parametrize("epoch", [1, 9, 10, 10**18 - 1])
def test_the_epoch_of_a_key_comes_back(epoch):
    assert KEYS.message(epoch) == f"kmq/dev/bq/{epoch}"
    assert KEYS.epoch_of(KEYS.message(epoch)) == epoch


@pytest.mark.parametrize("key", ["", "x", "1/2", "-1", "+1", "1.0", "٣", " 1", "1\n", "9" * 19])
def test_a_key_that_kmq_did_not_make_is_no_message(key):
    assert KEYS.epoch_of(KEYS.messages + key) is None
    assert KEYS.epoch_of("kmq/other/bq/1") is None


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "x" * 65])
def test_names_of_clusters_and_brokers_are_checked(name):
    with pytest.raises(ConfigError, match="KMQ_CLUSTER"):
        Keys(name)
    with pytest.raises(ConfigError, match="KMQ_BROKER"):
        check_broker(name)


def test_fields_come_back_and_empty_ones_are_left_out():
    assert encode_fields(a=1, b="", c="x/y") == b"a=1 c=x/y"
    assert decode_fields(b"a=1 c=x/y") == {"a": "1", "c": "x/y"}


@pytest.mark.parametrize("mark", [Mark(0, "", 0.0), Mark(12, "ab" * 16, 1795412895.778284)])
def test_a_mark_comes_back_and_what_is_none_has_read_nothing(mark):
    assert Mark.decode(mark.encode()) == mark
    strange = (b"rubbish", b"epoch=x ts=1", b"epoch=1 ts=1e400", b"epoch=1 ts=nan", b"epoch=-1 ts=1", b"epoch=%d ts=1")
    assert {Mark.decode(text.replace(b"%d", b"9" * 20)) for text in strange} == {Mark(0, "", 0.0)}


def test_what_consul_watch_prints_is_read_and_anything_else_is_refused():
    value = {"Key": "kmq/dev/bq/1", "Value": base64.b64encode(b"\xff").decode(), "ModifyIndex": 7, "Session": ""}
    assert given_entries(json.dumps([value]).encode()) == [KvEntry("kmq/dev/bq/1", b"\xff", 7, "")]
    assert given_entries(b"null") == given_entries(b"[]") == []
    for text in (b"", b"{", b"[1]", b'[{"Key": "a"}]', b'[{"Key": "a", "Value": "a", "ModifyIndex": 1}]', b"7"):
        with pytest.raises(ValueError, match=r"consul watch|Expecting"):
            given_entries(text)


# --- trimming --------------------------------------------------------------------------------------------------------


def sizes(count, size=10):
    return dict.fromkeys(range(1, count + 1), size)


def test_the_last_hundred_of_what_all_have_read_are_kept():
    assert superfluous(sizes(KEPT), KEPT) == []
    assert superfluous(sizes(KEPT + 1), KEPT + 1) == [1]
    assert superfluous(sizes(250), 250) == list(range(1, 151))


def test_what_somebody_has_not_read_is_kept_and_does_not_count():
    assert superfluous(sizes(250), 0) == []
    assert superfluous(sizes(250), 120) == list(range(1, 21))


def test_what_all_have_read_is_kept_to_so_many_bytes():
    size = KEPT_BYTES // 4
    assert superfluous(sizes(4, size), 4) == []
    assert superfluous(sizes(6, size), 6) == [1, 2]


def test_the_last_message_is_kept_however_long_it_is():
    assert superfluous({7: 2 * KEPT_BYTES}, 7) == []
    assert superfluous({6: 10, 7: 2 * KEPT_BYTES}, 7) == [6]
    assert superfluous({}, 7) == []


# --- what a subscriber decides ---------------------------------------------------------------------------------------


def subscriber(epoch, id=""):
    made = Subscriber(KEYS, "a", Presence(600.0), "me")
    made.done = Mark(epoch, id, time.time())
    return made


def entries(*messages):
    """As Consul gives them: in the order of text."""
    return sorted(KvEntry(KEYS.message(each.epoch), each.encode(), 1, "") for each in messages)


def chosen(steps):
    """What a subscriber does with entries: the epochs it hands out, or the first thing that it asks Consul."""
    try:
        return next(steps)
    except StopIteration as end:
        return [item.epoch for item in end.value]


def test_messages_are_handed_out_in_the_order_of_their_numbers_without_those_done():
    given = entries(*(message(epoch) for epoch in (1, 2, 3, 9, 10, 11)))
    assert [entry.key.rpartition("/")[2] for entry in given] == ["1", "10", "11", "2", "3", "9"]
    assert chosen(subscriber(8).choose(given)) == [9, 10, 11]


def test_keys_of_others_are_passed_over():
    given = [*entries(message(1)), KvEntry(KEYS.messages + "note", b"?", 1, ""), KvEntry(KEYS.messages, b"", 1, "")]
    assert chosen(subscriber(0).choose(given)) == [1]


@pytest.mark.parametrize(
    ("done", "there"),
    [(Mark(1, "", 0), (3, 4)), (Mark(0, "", 0), (1, 3)), (Mark(2, "cd" * 16, 0), (1, 2, 3)), (Mark(3, "", 0), (2, 3))],
    ids=["trimmed", "deleted by hand", "another message under the epoch that was read", "the newest deleted by hand"],
)
def test_a_subscriber_that_cannot_go_on_asks_for_a_snapshot(done, there):
    steps = subscriber(*done[:2]).choose(entries(*(message(epoch) for epoch in there)))
    asked = next(steps)
    if asked.path == "/v1/kv/kmq/dev/epoch":
        assert "consistent" in asked.params
        asked = steps.send(there_is("epoch", b"4"))
    if asked.path == "/v1/kv/kmq/dev/bq/4":
        asked = steps.send(Response(404, {"x-consul-index": "9"}, b""))
    assert asked.path == "/v1/txn" and b"get-tree" in asked.body


def there_is(key, value):
    """Consul's answer to a read."""
    entry = {"Key": KEYS.root + key, "Value": base64.b64encode(value).decode(), "ModifyIndex": 7}
    return Response(200, {"x-consul-index": "9"}, json.dumps([entry]).encode())


@pytest.mark.parametrize("done", [3, 5])
def test_a_subscriber_that_has_nothing_new_asks_for_the_epoch(done):
    asked = chosen(subscriber(done).choose(entries(message(3))))
    assert isinstance(asked, Request) and asked.path == "/v1/kv/kmq/dev/epoch" and "consistent" in asked.params


def test_messages_before_one_that_is_none_are_handed_out_and_then_it_is_an_error():
    given = [*entries(message(1), message(3)), KvEntry(KEYS.message(2), b"rubbish", 1, "")]
    assert chosen(subscriber(0).choose(given)) == [1]
    steps = subscriber(1).choose(given)
    assert next(steps).path == "/v1/kv/kmq/dev/epoch"
    with pytest.raises(ValueError, match="message 2 of"):
        steps.send(there_is("epoch", b"3"))


# --- staying alive ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late_s", "asks"), [(0.0, False), (0.9, True)])
def test_a_session_is_looked_for_if_consul_may_have_waited_too_long(monkeypatch, late_s, asks):
    """Consul counts from when a beat arrives, which may be as early as when it was sent."""
    now = 100.0
    monkeypatch.setattr("kmq.cluster.presence.time.monotonic", lambda: now)
    presence = Presence(2.0)
    next(presence.open())
    ok, asked = Response(200, {}, b""), []
    for took_s in (0.0, 0.5 + late_s):  # until a beat is answered; the second is sent 1 s after the first
        now += 1.0
        beat = presence.beat()
        next(beat)
        now += took_s
        try:
            asked.append(beat.send(ok).path)
        except StopIteration:
            pass
    assert [path.startswith("/v1/session/info/") for path in asked] == [True] * asks


# --- what is printed, and run ----------------------------------------------------------------------------------------


def test_a_message_as_fields_has_its_payload_as_text_or_as_base64():
    text, other = message(3, "é\n".encode()), message(4, b"\xff")._replace(expires=5.0)
    assert as_fields(text) == {"epoch": 3, "type": "a", "id": "ab" * 16, "ts": 1795412895.25, "payload": "é\n"}
    assert as_fields(other)["payload_base64"] == "/w==" and as_fields(other)["expires"] == 5.0
    assert "payload" not in as_fields(other)


def test_a_snapshot_as_fields_has_its_states():
    fields = as_fields(Snapshot(9, {"topics/a": b"1", "tokens/b": b"\xff"}))
    assert (fields["epoch"], fields["type"], fields["id"]) == (9, "snapshot", "")
    assert fields["states"] == {"topics/a": "1"} and fields["states_base64"] == {"tokens/b": "/w=="}


def test_a_command_need_not_read_its_input_and_its_failure_says_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")  # as in a container with a read-only root
    stop = threading.Event()
    run_command(message(1, b"x" * 370_000), "true", stop)
    run_command(message(7, b"\x00\xff"), 'printf "%s %s %s\\n" $BQ_EPOCH $BQ_TYPE $BQ_ID >env; cat >got', stop)
    assert (tmp_path / "env").read_text() == f"7 a {'ab' * 16}\n" and (tmp_path / "got").read_bytes() == b"\x00\xff"
    with pytest.raises(KmqError, match="exit code 3 of: exit 3"):
        run_command(message(1), "exit 3", stop)
    with pytest.raises(KmqError, match="end by SIGKILL of: "):
        run_command(message(1), "kill -9 $$", stop)


# --- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("127.0.0.1:8500", ["http://127.0.0.1:8500"]),
        (" a:1 , https://b:2/ ", ["http://a:1", "https://b:2"]),
    ],
)
def test_addresses_of_consul_are_read(text, urls):
    assert ConsulAddress.of(text).urls == urls


@pytest.mark.parametrize("text", ["", ",", "ftp://a", "http://", "a:b"])
def test_an_address_that_is_none_is_named(text):
    with pytest.raises(ConfigError, match="KMQ_CONSUL"):
        ConsulAddress.of(text)


def test_what_is_not_set_is_named_with_how_to_start():
    with pytest.raises(ConfigError, match=r"^KMQ_CLUSTER not set; for development: consul agent -dev"):
        Place.of(load({"KMQ_CONSUL": "a:1"}, toml=""))
    place = Place.of(load({"KMQ_CONSUL": "a:1", "KMQ_CLUSTER": "c", "KMQ_BROKER": "b"}, toml=""))
    assert (place.cluster, place.broker, place.ttl_s) == ("c", "b", 2.0)
