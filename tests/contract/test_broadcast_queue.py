"""The Broadcast Queue against a real Consul: order, marks, trimming, snapshots, refusals, and what comes after a loss."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from concurrent.futures import Future

import pytest
from brokers import ROOT
from consuls import Consul
from waiting import until

import kmq
from kmq.cluster import consul as requests
from kmq.cluster import following
from kmq.cluster.consul import ConsulAddress, ConsulError, Pause, Unanswered
from kmq.cluster.following import Condition, follow
from kmq.cluster.presence import Lock, Presence
from kmq.cluster.publisher import KEPT, MAX_BYTES, Message
from kmq.cluster.queue import Place
from kmq.cluster.subscriber import Displaced, Snapshot
from kmq.errors import EXIT_CONFIG, BusyError, ConfigError

TTL_S = 5.0  # on a busy machine a session that is wanted is not renewed for a second


class Cluster:
    """A cluster of a test's own, and what a person would do to its keys by hand."""

    def __init__(self, agent):
        self.agent, self.name, self.queues = agent, f"test-{uuid.uuid4()}", []

    def place(self, broker="a", token=""):
        return Place(ConsulAddress.of(self.agent.address, token), self.name, broker, TTL_S)

    def queue(self, broker="a"):
        self.queues.append(kmq.BroadcastQueue(self.place(broker)))
        return self.queues[-1]

    def ask(self, method, path, value=None):
        body = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
        request = urllib.request.Request(f"http://{self.agent.address}/v1/{path}", body, method=method)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read() or b"null")

    def keys(self, under=""):
        return self.ask("GET", f"kv/kmq/{self.name}/{under}?keys")

    def put(self, key, value):
        assert self.ask("PUT", f"kv/kmq/{self.name}/{key}", value)

    def sessions(self):
        return {session["ID"] for session in self.ask("GET", "session/list")}

    def end_session(self, broker="a"):
        [entry] = self.ask("GET", f"kv/kmq/{self.name}/bq-subscriber/{broker}")
        self.ask("PUT", f"session/destroy/{entry['Session']}")

    def close(self):
        for queue in self.queues:
            queue.close()


@pytest.fixture
def cluster(consul):
    made = Cluster(consul)
    yield made
    made.close()


class Follower:
    """`follow` in a thread. `refuse` holds the epochs that it fails to process."""

    def __init__(self, queue, refuse=(), **options):
        self.items, self.conditions, self.refuse, self.error = [], [], set(refuse), None
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(queue, options))
        self._thread.start()

    def _run(self, queue, options):
        try:
            follow(queue, self._handle, self.stop, self.conditions.append, **options)
        except kmq.KmqError as error:
            self.error = error

    def _handle(self, item):
        if item.epoch in self.refuse:
            raise RuntimeError(f"no {item.epoch}")
        self.items.append(item)

    def wait(self, condition):
        until(lambda: condition(self), instead=lambda: f"{self.epochs} {self.conditions} {self.error}")

    @property
    def epochs(self):
        return [item.epoch for item in self.items]

    def end(self):
        self.stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def follower(cluster):
    made = []

    def start(**options):
        made.append(Follower(cluster.queue(), **options))
        return made[-1]

    yield start
    for each in made:
        each.end()


def received(queue, start=None):
    return list(queue.receive(start, timeout=0.3))


def node(queue, broker="a"):
    return next((node for node in queue.status().nodes if node.broker == broker), None)


# --- publishing ------------------------------------------------------------------------------------------------------


def test_messages_come_in_the_order_of_their_numbers_as_they_were_sent(cluster):
    queue = cluster.queue()
    payloads = [b"\xff\x00\n" * number for number in range(1, 13)]
    assert [queue.publish(f"t{len(payload)}", payload) for payload in payloads] == list(range(1, 13))
    assert cluster.keys("bq/")[1].endswith("/10")  # Consul's order is that of text
    items = received(queue, start=1)
    assert [(item.epoch, item.type, item.payload) for item in items] == [
        (number, f"t{len(payload)}", payload) for number, payload in enumerate(payloads, 1)
    ]
    assert len({item.id for item in items}) == 12
    assert received(queue) == []


def test_the_longest_message_is_published_and_one_byte_more_is_an_error(cluster):
    queue = cluster.queue()
    room = MAX_BYTES - len(Message.new("big", b"").encode())
    assert queue.publish("big", b"x" * room) == 1
    with pytest.raises(ConfigError, match="380,001 bytes with its header; at most 380,000"):
        queue.publish("big", b"x" * (room + 1))
    assert queue.status().epoch == 1
    assert [len(item.payload) for item in received(queue, start=1)] == [room]


def test_a_publisher_is_told_who_holds_the_lock_and_waits_for_it(cluster):
    holder, other = cluster.queue(), cluster.queue()
    presence = Presence(30)
    holder.run(presence.open())
    lock = Lock(holder.keys.coordinator, presence, "somebody/7")
    holder.run(lock.take(1))
    assert other.status().publisher == "somebody/7"
    with pytest.raises(BusyError, match="coordinator is held by somebody/7"):
        other.publish("a", timeout=0.0005)
    threading.Timer(0.2, lambda: holder.run(lock.give())).start()
    assert other.publish("a", timeout=30) == 1
    holder.run(presence.close())


def test_what_consul_forbids_is_an_error_to_the_caller(tmp_path):
    agent = Consul(tmp_path / "log", 'acl { enabled = true default_policy = "deny" tokens { master = "the-token" } }')
    try:
        cluster = Cluster(agent)
        until(lambda: _may(cluster.place(token="the-token")), "the token is known")
        with kmq.BroadcastQueue(cluster.place()) as queue:
            for attempt in (lambda: queue.publish("a"), lambda: received(queue)):
                with pytest.raises(ConsulError, match="KMQ_CONSUL_TOKEN must be a token that may do this") as caught:
                    attempt()
                assert (caught.value.status, caught.value.exit_code) == (403, EXIT_CONFIG)
            with pytest.raises(ConsulError, match="KMQ_CONSUL_TOKEN"):
                follow(queue, print, threading.Event())
        page = (ROOT / "docs/broadcast-queue.md").read_text()
        rules = page[page.index("key_prefix ") : page.rindex("\n```")].replace("<cluster>", cluster.name)
        token = _token(agent, rules)
        with kmq.BroadcastQueue(cluster.place(token=token)) as queue:
            assert queue.publish("a") == 1
            [item] = received(queue)
            assert isinstance(item, Snapshot) and item.epoch == 1
        other = cluster.place(token=token)._replace(cluster="another")
        with kmq.BroadcastQueue(other) as queue, pytest.raises(ConsulError, match="KMQ_CONSUL_TOKEN"):
            queue.publish("a")
    finally:
        agent.close()


def _token(agent, rules):
    """A token with these rules and no others."""

    def make(what, body):
        headers = {"X-Consul-Token": "the-token"}
        url = f"http://{agent.address}/v1/acl/{what}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="PUT")
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read())

    make("policy", {"Name": "kmq", "Rules": rules})
    return make("token", {"Policies": [{"Name": "kmq"}]})["SecretID"]


def _may(place):
    with kmq.BroadcastQueue(place) as queue:
        try:
            return queue.status().epoch == 0
        except ConsulError:
            return False


# --- receiving -------------------------------------------------------------------------------------------------------


def test_a_new_node_gets_a_snapshot_and_then_every_message_once(cluster):
    queue = cluster.queue()
    queue.publish("a", b"1")
    cluster.put("settings/retention", b"1h")
    [item] = received(queue)
    assert isinstance(item, Snapshot) and item[:2] == (1, {"settings/retention": b"1h"})
    queue.publish("a", b"2")
    queue.publish("a", b"3")
    assert [item.payload for item in received(queue)] == [b"2", b"3"]
    assert received(queue) == []


def test_a_second_subscriber_of_a_node_is_refused_and_told_who_it_is(cluster):
    queue, second = cluster.queue(), cluster.queue()
    with queue.subscribed():
        with pytest.raises(BusyError, match=rf"broker a has a subscriber already: \S+/{os.getpid()}$"):
            received(second)
        assert received(cluster.queue("b")) == [Snapshot(0, {})]
    assert received(second) == [Snapshot(0, {})]


KILLED = """
import os, signal, sys
import kmq
from kmq.cluster.queue import Place
from kmq.cluster.consul import ConsulAddress
for item in kmq.BroadcastQueue(Place(ConsulAddress.of(sys.argv[1]), sys.argv[2], "a", 1.0)).receive():
    print(item.epoch, flush=True)
    if item.epoch == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_processed_and_not_marked_before_a_kill_comes_again(cluster):
    queue = cluster.queue()
    received(queue)
    for _ in range(4):
        queue.publish("a")
    command = [sys.executable, "-c", KILLED, cluster.agent.address, cluster.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL and done.stdout.split() == ["1", "2", "3"], done.stderr
    epochs = [item.epoch for item in received(queue)]
    assert epochs in ([1, 2, 3, 4], [2, 3, 4], [3, 4])  # 3 at least, and nothing is left out


def test_an_item_whose_loop_ends_with_an_error_comes_again(cluster):
    queue = cluster.queue()
    received(queue)
    queue.publish("a")
    with pytest.raises(ZeroDivisionError):
        for _ in queue.receive():
            1 / 0  # noqa: B018
    assert [item.epoch for item in received(queue)] == [1]


def test_a_subscriber_that_has_lost_its_place_cannot_mark(cluster):
    queue = cluster.queue()
    received(queue)
    queue.publish("a")
    with pytest.raises(Displaced, match="another subscriber now"):
        for _ in queue.receive():
            cluster.end_session()
    assert node(queue).read == 0
    assert [item.epoch for item in received(cluster.queue())] == [1]  # as in another process: this one has processed it


def test_a_clock_that_was_set_back_does_not_keep_a_mark_from_being_written(cluster, monkeypatch):
    queue = cluster.queue()
    received(queue)
    queue.publish("a")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    assert [item.epoch for item in received(queue)] == [1]
    assert node(queue).read == 1


def test_a_watch_of_less_than_a_millisecond_ends_at_once(cluster):
    queue = cluster.queue()
    queue.publish("a")
    position = queue.run(requests.watch(queue.keys.messages, 0, 1)).position
    began = time.monotonic()
    queue.run(requests.watch(queue.keys.messages, position, 0.0001))
    assert time.monotonic() - began < 8  # Consul's default is five minutes, and the client gives up after ten seconds


# --- trimming --------------------------------------------------------------------------------------------------------


def publish_many(queue, count):
    for number in range(count):
        queue.publish("a", b"%d" % number)


def test_trimming_keeps_the_last_hundred_and_what_a_registered_node_has_not_read(cluster):
    queue, slow = cluster.queue("quick"), cluster.queue("slow")
    received(slow)
    received(queue)
    publish_many(queue, 128)  # it trims at every 16th
    received(queue)
    assert len(cluster.keys("bq/")) == 128
    assert [item.epoch for item in received(slow)] == list(range(1, 129))
    publish_many(queue, 16)
    kept = sorted(int(key.rpartition("/")[2]) for key in cluster.keys("bq/"))
    assert kept == list(range(128 - KEPT + 1, 145))  # all have read up to 128


def test_a_node_that_is_gone_is_forgotten_and_one_whose_clock_was_ahead_is_not_waited_for(cluster):
    queue, day_s = cluster.queue("b"), 86_400
    received(queue)
    for broker, days in (("gone", -31), ("ahead", 2), ("away", -2)):
        cluster.put(f"bq-delivered/{broker}", b"epoch=0 id= ts=%d" % (time.time() + days * day_s))
    publish_many(queue, 111)
    received(queue)
    publish_many(queue, 1)
    assert [node.broker for node in queue.status().nodes] == ["ahead", "away", "b"]
    assert len(cluster.keys("bq/")) == KEPT + 1


def test_a_node_that_was_away_past_a_trim_gets_a_snapshot(cluster):
    queue = cluster.queue("away")
    received(queue)
    cluster.put("bq-delivered/away", b"epoch=0 id= ts=%d" % (time.time() - 2 * 86_400))
    cluster.put("topics/orders", b"partitions=4")
    publish_many(queue, 128)
    assert len(cluster.keys("bq/")) < 128
    [item] = received(queue)
    assert isinstance(item, Snapshot) and item[:2] == (128, {"topics/orders": b"partitions=4"})
    queue.publish("a")
    assert [item.epoch for item in received(queue)] == [129]


def test_a_queue_that_went_back_to_an_older_state_gives_a_snapshot(cluster):
    queue = cluster.queue()
    received(queue)
    publish_many(queue, 5)
    received(queue)
    cluster.put("epoch", b"2")
    for epoch in (3, 4, 5):
        cluster.ask("DELETE", f"kv/kmq/{cluster.name}/bq/{epoch}")
    [item] = received(queue)
    assert isinstance(item, Snapshot) and item[:2] == (2, {})
    queue.publish("a")
    assert [item.epoch for item in received(queue)] == [3]


def processed(queue, subscriber):
    """Process what there is, and mark it."""
    for item in queue.run(subscriber.fetch(0.1)):
        subscriber.processed(item)
    queue.run(subscriber.mark())


def test_a_process_that_resumes_sees_that_the_queue_went_back_with_its_mark(cluster):
    queue = cluster.queue()
    publish_many(queue, 5)
    with queue.subscribed(1) as (earlier, _):
        processed(queue, earlier)
    assert node(queue).read == 5
    cluster.put("epoch", b"2")
    cluster.put("bq-delivered/a", b"epoch=2 id= ts=7")
    for epoch in (3, 4, 5):
        cluster.ask("DELETE", f"kv/kmq/{cluster.name}/bq/{epoch}")
    with queue.subscribed() as (later, _):
        [item] = queue.run(later.fetch(1))
    assert isinstance(item, Snapshot) and item.epoch == 2


def test_a_place_that_was_given_back_is_free_at_once(cluster):
    queue = cluster.queue()
    with queue.subscribed():
        pass
    presence = Presence(TTL_S)
    queue.run(presence.open())
    assert queue.run(presence.lock(queue.keys.subscriber("a"), b"")) is None  # not so after a session that was lost
    queue.run(presence.close())


# --- following -------------------------------------------------------------------------------------------------------


def test_a_message_that_fails_is_tried_again_and_others_see_why(cluster, follower, monkeypatch):
    monkeypatch.setattr(following, "WAIT_S", 600.0)  # nothing comes because a watch has ended
    queue = cluster.queue("b")
    publish_many(queue, 3)
    one = follower(refuse=[2], start=1)
    one.wait(lambda one: one.conditions)
    assert one.conditions == [Condition(failing="message 2 (a): no 2")]
    until(lambda: node(queue).error == "message 2 (a): no 2", "others see it")
    assert (node(queue).read, node(queue).lag) == (1, 2)
    one.refuse.clear()
    one.wait(lambda one: one.epochs[-2:] == [2, 3])
    assert one.conditions[1:] == [Condition()]
    until(lambda: node(queue).error == "" and node(queue).lag == 0, "cleared")


def test_a_follower_whose_session_has_ended_says_so_and_goes_on(cluster, follower):
    queue = cluster.queue("b")
    one = follower()
    one.wait(lambda one: one.epochs == [0])
    cluster.end_session()
    queue.publish("a")
    one.wait(lambda one: one.conditions[-1:] == [Condition()] and one.epochs[-1] == 1)
    [lost, back] = one.conditions
    assert ("another subscriber now" in lost.lost or "session" in lost.lost) and back == Condition()
    queue.publish("a")
    one.wait(lambda one: one.epochs[-1] == 2)


def test_a_follower_that_was_taken_for_dead_while_nothing_came_takes_its_place_again(cluster, follower, monkeypatch):
    monkeypatch.setattr(following, "WAIT_S", 600.0)
    queue, released, beat = cluster.queue("b"), threading.Event(), Presence.beat
    queue.publish("a")  # a watch of what never was would be woken by anything
    one = follower()
    until(lambda: (node(queue) or (0, 0))[1] == 1, "it has its place")
    before = cluster.ask("GET", f"kv/kmq/{cluster.name}/bq-subscriber/a")[0]["Session"]

    def held_up(self):
        while not released.is_set():
            yield Pause(0.01)
        yield from beat(self)

    monkeypatch.setattr(Presence, "beat", held_up)
    until(lambda: not node(queue).holder, "it is away")
    released.set()
    until(lambda: node(queue).holder, "it is back")
    assert cluster.ask("GET", f"kv/kmq/{cluster.name}/bq-subscriber/a")[0]["Session"] != before
    one.wait(lambda one: one.conditions[-1:] == [Condition()])


def test_a_follower_that_was_taken_for_dead_leaves_what_has_come_to_the_next_one(cluster, follower, monkeypatch):
    monkeypatch.setattr(following, "WAIT_S", 600.0)
    queue, released, beat = cluster.queue("b"), threading.Event(), Presence.beat
    queue.publish("a")  # a watch of what never was would be woken by anything
    one = follower()
    until(lambda: (node(queue) or (0, 0))[1] == 1, "it has its place")
    session = cluster.ask("GET", f"kv/kmq/{cluster.name}/bq-subscriber/a")[0]["Session"]

    def held_up(self):
        while self.session == session and not released.is_set():
            yield Pause(0.01)
        yield from beat(self)

    monkeypatch.setattr(Presence, "beat", held_up)
    until(lambda: session not in cluster.sessions(), "it is taken for dead")
    two = follower()
    until(lambda: node(queue).holder, "another has its place")
    for epoch in (2, 3):
        queue.publish("a")
        two.wait(lambda two, epoch=epoch: two.epochs[-1:] == [epoch])
    released.set()
    one.wait(lambda one: one.conditions)
    assert one.epochs == [1]


def test_a_follower_outlives_consul_and_follows_it_from_the_beginning(tmp_path):
    agent = Consul(tmp_path / "log")
    cluster = Cluster(agent)
    one = Follower(cluster.queue())
    try:
        publish_many(cluster.queue("b"), 3)
        one.wait(lambda one: 3 in one.epochs)
        agent.close()
        one.wait(lambda one: one.conditions)
        assert "Consul at http://" in one.conditions[0].lost
        agent.start()
        one.wait(lambda one: one.conditions[-1] == Condition())
        one.wait(lambda one: isinstance(one.items[-1], Snapshot) and one.epochs[-1] == 0)  # a Consul of no memory
        assert cluster.queue("b").publish("a") == 1
        one.wait(lambda one: one.epochs[-1] == 1)
        assert one.conditions[-1] == Condition()
    finally:
        one.end()
        cluster.close()
        agent.close()


def test_a_follower_ends_within_moments_marks_and_gives_its_place_back(cluster, follower, monkeypatch):
    monkeypatch.setattr(following, "WAIT_S", 600.0)
    queue = cluster.queue("b")
    one = follower()
    publish_many(queue, 2)
    until(lambda: node(queue).read == 2, "all is marked")
    one.end()
    assert (node(queue).read, node(queue).holder) == (2, "")


def test_a_follower_that_is_told_to_stop_while_it_processes_does_nothing_more(cluster):
    queue, stop, epochs = cluster.queue(), threading.Event(), []
    publish_many(queue, 5)

    def handle(item):
        epochs.append(item.epoch)
        if item.epoch == 2:
            stop.set()

    follow(queue, handle, stop, start=1)
    assert epochs == [1, 2] and node(queue).read == 2


def test_an_item_that_fails_while_the_follower_stops_is_not_marked_and_nothing_is_said(cluster):
    queue, stop, conditions = cluster.queue(), threading.Event(), []
    publish_many(queue, 2)

    def handle(item):
        if item.epoch == 2:
            stop.set()
            raise RuntimeError

    follow(queue, handle, stop, conditions.append, start=1)
    assert (node(queue).read, node(queue).error, conditions) == (1, "", [])


def test_a_second_follower_ends_and_names_the_first(cluster, follower):
    one = follower()
    one.wait(lambda one: one.epochs)
    two = follower()
    two.wait(lambda two: two.error)
    assert isinstance(two.error, BusyError) and f"/{os.getpid()}" in str(two.error)


def test_a_value_that_is_no_message_stops_the_follower_behind_those_before_it(cluster, follower):
    queue = cluster.queue("b")
    one = follower()
    one.wait(lambda one: one.epochs == [0])
    one.end()
    publish_many(queue, 3)
    cluster.put("bq/2", b"rubbish")
    two = follower()
    two.wait(lambda two: two.conditions)
    assert two.epochs == [1] and "message 2 of the Broadcast Queue" in two.conditions[0].failing
    cluster.ask("DELETE", f"kv/kmq/{cluster.name}/bq/2")  # what a person does about it: the node skips to a snapshot
    two.wait(lambda two: two.conditions[-1] == Condition())
    assert isinstance(two.items[-1], Snapshot) and two.items[-1].epoch == 3


@pytest.mark.parametrize("value", [None, b"rubbish"], ids=["its command fails", "it is no message"])
def test_a_newest_message_that_fails_is_got_past_by_deleting_its_key(cluster, follower, value):
    queue = cluster.queue("b")
    publish_many(queue, 2)
    if value:
        cluster.put("bq/2", value)
    one = follower(refuse=[] if value else [2], start=1)
    one.wait(lambda one: one.conditions)
    one.refuse.clear()
    cluster.ask("DELETE", f"kv/kmq/{cluster.name}/bq/2")
    one.wait(lambda one: one.conditions[-1] == Condition())
    if value or isinstance(one.items[-1], Snapshot):  # else the command was run again before the key was gone
        assert isinstance(one.items[-1], Snapshot) and one.items[-1].epoch == 2
    assert received(cluster.queue("c"))[0].epoch == 2
    until(lambda: node(queue).error == "" and node(queue).lag == 0, "cleared")


def test_a_newest_message_that_was_deleted_unread_gives_a_snapshot(cluster):
    queue = cluster.queue()
    publish_many(queue, 1)
    received(queue)
    publish_many(queue, 1)
    cluster.ask("DELETE", f"kv/kmq/{cluster.name}/bq/2")
    [item] = received(cluster.queue())
    assert isinstance(item, Snapshot) and item.epoch == 2


@pytest.mark.parametrize("stray", ["9" * 20, "1000000", "3"])
def test_a_stray_key_beside_the_messages_is_passed_over(cluster, follower, stray):
    queue = cluster.queue("b")
    publish_many(queue, 1)
    one = follower()
    one.wait(lambda one: one.epochs == [1])
    cluster.put(f"bq/{stray}", b"x")
    publish_many(queue, 1)
    one.wait(lambda one: one.epochs[-1:] == [2])
    until(lambda: node(queue).read == 2, "it is marked")
    assert received(cluster.queue("c"))[0].epoch == 2
    publish_many(queue, 1)
    one.wait(lambda one: one.epochs[-1:] == [3])
    one.end()
    assert one.epochs == [1, 2, 3] and [type(item) for item in one.items[1:]] == [Message, Message]
    assert [each.failing for each in one.conditions if stray != "3"] == []  # 3 may be seen just before it is written
    assert received(cluster.queue()) == []


# --- a publisher whose session ends ------------------------------------------------------------------------------------


def test_an_idle_publisher_whose_session_has_ended_begins_a_new_one(cluster):
    others = cluster.sessions()
    queue = cluster.queue()
    assert queue.publish("a") == 1
    for session in cluster.sessions() - others:
        cluster.ask("PUT", f"session/destroy/{session}")
    assert queue.publish("a") == 2


def test_what_is_published_counts_though_the_lock_could_not_be_given_back(cluster, monkeypatch):
    def give(self):
        raise Unanswered("the connection was cut")
        yield

    queue = cluster.queue()
    with monkeypatch.context() as patch:
        patch.setattr(Lock, "give", give)
        assert queue.as_publisher(lambda publisher: publisher.publish(Message.new("a", b""))) == 1
    assert queue.status().publisher == ""
    assert cluster.queue("b").publish("a") == 2


def test_from_asyncio_a_publisher_gets_over_the_end_of_its_session_too(cluster):
    async def use():
        others = cluster.sessions()
        async with kmq.AsyncBroadcastQueue(cluster.place()) as queue:
            assert await queue.publish("a") == 1
            for session in cluster.sessions() - others:
                cluster.ask("PUT", f"session/destroy/{session}")
            assert await queue.publish("a") == 2
            assert (await queue.status()).publisher == ""

    asyncio.run(use())


# --- asyncio ---------------------------------------------------------------------------------------------------------


def test_from_asyncio_it_is_the_same(cluster):
    async def use():
        async with kmq.AsyncBroadcastQueue(cluster.place()) as queue:
            assert [item async for item in queue.receive(timeout=0.3)] == [Snapshot(0, {})]
            assert await asyncio.gather(*(queue.publish("a", "text") for _ in range(3))) == [1, 2, 3]
            async for item in queue.receive():
                if item.epoch == 2:
                    break  # 1 is marked, 2 is not
            assert (await queue.status()).epoch == 3
        async with kmq.AsyncBroadcastQueue(cluster.place()) as queue:
            assert [item.epoch async for item in queue.receive(timeout=0.3)] == [2, 3]
            with pytest.raises(ConfigError, match="at most 380,000"):
                await queue.publish("big", b"x" * MAX_BYTES)
            assert await queue.publish("a") == 4

    asyncio.run(use())
    assert [item.epoch for item in received(cluster.queue())] == [4]


def test_a_subscriber_of_asyncio_keeps_its_place_while_it_waits(cluster):
    async def use():
        async with kmq.AsyncBroadcastQueue(cluster.place()) as queue:
            items = queue.receive()
            await anext(items)
            waiting = asyncio.ensure_future(anext(items))
            with pytest.raises(BusyError):
                await asyncio.to_thread(received, cluster.queue())
            await queue.publish("a")
            assert (await waiting).epoch == 1

    asyncio.run(use())


# --- the thread of a queue without asyncio ---------------------------------------------------------------------------


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "kmq-session"}


def is_in(function, frame):
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def test_ctrl_c_ends_a_wait_and_the_place_is_given_back_at_once(cluster):
    main, before = threading.main_thread().ident, threads()

    def interrupt():
        until(lambda: is_in(Future.result, sys._current_frames()[main]), "it waits")
        signal.pthread_kill(main, signal.SIGINT)

    with cluster.queue() as queue:
        items = queue.receive()
        next(items)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            next(items)
        interrupting.join()
        assert node(queue).holder == "" and queue.publish("a") == 1
    assert threads() <= before


def test_a_queue_that_nobody_has_any_more_ends_its_session_and_its_thread(cluster):
    before, sessions = threads(), cluster.sessions()
    queue = kmq.BroadcastQueue(cluster.place())
    assert queue.publish("a") == 1 and len(threads() - before) == 1
    assert cluster.sessions() - sessions
    del queue
    gc.collect()
    assert threads() <= before and cluster.sessions() <= sessions  # one that an earlier test has left may end meanwhile


def test_an_iteration_that_the_garbage_collector_finds_in_the_thread_of_its_queue_ends(cluster):
    queue = cluster.queue()
    left = [queue.receive()]
    next(left[0])
    assert node(queue).holder

    def drop():
        left.clear()
        yield Pause(0)

    queue.run(drop())
    until(lambda: not queue.status().nodes, "the place is given back")


def test_a_program_that_ends_with_an_iteration_open_gives_its_place_back(cluster):
    program = """
import sys, kmq
from kmq.cluster.queue import Place
from kmq.cluster.consul import ConsulAddress
queue = kmq.BroadcastQueue(Place(ConsulAddress.of(sys.argv[1]), sys.argv[2], "a", 30.0))
items = queue.receive()
print(next(items).epoch, queue.publish("a"))
"""
    sessions = cluster.sessions()
    command = [sys.executable, "-c", program, cluster.agent.address, cluster.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1\n", "")
    assert cluster.sessions() <= sessions


def test_a_child_that_was_forked_from_a_program_with_a_queue_ends_and_is_told_that_it_has_none(cluster):
    program = """
import os, sys, kmq
from kmq.cluster.queue import Place
from kmq.cluster.consul import ConsulAddress
with kmq.BroadcastQueue(Place(ConsulAddress.of(sys.argv[1]), sys.argv[2], "a", 30.0)) as queue:
    queue.publish("a")
    items = queue.receive()
    next(items)
    if not (pid := os.fork()):
        try:
            queue.publish("a")
        except RuntimeError as error:
            sys.exit(str(error))
    assert os.waitpid(pid, 0)[1]
    print(queue.publish("a"))
"""
    command = [sys.executable, "-c", program, cluster.agent.address, cluster.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert done.stderr == "this queue is closed, or belongs to the process that this one was forked from\n"


@pytest.mark.parametrize("when", ["threading.Thread(target=use).start()", "atexit.register(use)"])
def test_a_queue_is_used_when_the_main_thread_has_ended_and_consul_has_a_name(cluster, when):
    """asyncio looks a name up in a thread of a pool, which Python closes before other threads and before atexit."""
    program = f"""
import atexit, sys, threading, kmq
from kmq.cluster.queue import Place
from kmq.cluster.consul import ConsulAddress
queue = kmq.BroadcastQueue(Place(ConsulAddress.of(sys.argv[1]), sys.argv[2], "a", 30.0))
def use():
    if threading.current_thread() is not threading.main_thread():
        threading.main_thread().join()
    with queue:
        print(queue.publish("a"))
{when}
"""
    address = cluster.agent.address.replace("127.0.0.1", "localhost")
    done = subprocess.run(
        [sys.executable, "-c", program, address, cluster.name], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_thread_that_waits_is_ended_when_another_closes_the_queue(cluster):
    ends = []

    def read():
        try:
            list(queue.receive())
        except RuntimeError as error:
            ends.append(str(error))

    queue = cluster.queue()
    thread = threading.Thread(target=read)
    thread.start()

    def waits():  # it also waits for the loop, before there is a node
        is_waiting = is_in(Future.result, sys._current_frames().get(thread.ident))
        return is_waiting and node(queue) is not None and node(queue).holder

    until(waits, "it waits")
    queue.close()
    thread.join(30)
    assert len(ends) == 1 and ends[0].startswith("this queue is closed") and not thread.is_alive()
    with pytest.raises(RuntimeError, match="this queue is closed"):
        queue.publish("a")


def test_a_queue_that_was_closed_before_its_first_use_begins_nothing(cluster):
    before, queue = threads(), cluster.queue()
    queue.close()
    with pytest.raises(RuntimeError, match="this queue is closed"):
        queue.publish("a")
    assert threads() <= before


@pytest.mark.parametrize("comes", ["while it waits", "before it waits"])
@pytest.mark.parametrize("taken", ["_take_lock", "_subscribe"])
def test_ctrl_c_when_something_was_just_taken_gives_it_back(cluster, taken, comes):
    def as_publisher(queue):
        queue.as_publisher(lambda publisher: publisher.publish(Message.new("a", b"")))

    def as_subscriber(queue):
        next(queue.receive())

    use = as_publisher if taken == "_take_lock" else as_subscriber
    with cluster.queue() as queue:
        take, begin, slow = getattr(queue._queue, taken), queue._thread._begin, threading.Event()

        async def interrupted(*arguments):
            result = await take(*arguments)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return result

        def begun(coroutine):
            future, queue._thread._begin = begin(coroutine), begin
            slow.wait(30)  # as on a busy machine
            return future

        setattr(queue._queue, taken, interrupted)
        if comes == "before it waits":
            queue._thread._begin = begun
        with pytest.raises(KeyboardInterrupt):
            use(queue)
        setattr(queue._queue, taken, take)
        use(queue)
