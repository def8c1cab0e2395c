"""The Broadcast Queue on three real Consul servers, while processes are killed, servers are lost and the network is cut.

What must be true all the time: bq_facts.py. The soak takes the full counts.
"""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.bq_facts import Queue, Worker
from chaos.consul_servers import ConsulServer, ConsulServers, consul_servers
from kmq.cluster.publisher import KEPT, MAX_BYTES, TRIM_EVERY

pytestmark = pytest.mark.root
FULL = pytest.mark.soak
AWAY = 100_000  # messages: a publisher that is killed before it has published them

MakeQueue = Callable[..., Queue]


@pytest.fixture(scope="module")
def all_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsulServers]:
    with consul_servers(tmp_path_factory.mktemp("consul")) as made:
        yield made


@pytest.fixture
def servers(all_servers: ConsulServers) -> Iterator[ConsulServers]:
    """All three work at the beginning of each test."""
    yield all_servers
    all_servers.repair()


@pytest.fixture
def new_queue(servers: ConsulServers, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeQueue]:
    """A function that makes a queue of a name of its own."""
    queues: list[Queue] = []
    name = re.sub(r"\W+", "_", request.node.name)[-40:]

    def make() -> Queue:
        root = tmp_path / str(len(queues))
        root.mkdir()
        queues.append(Queue(servers, root, f"t{len(queues)}{name}"))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


@pytest.fixture
def queue(new_queue: MakeQueue) -> Queue:
    return new_queue()


PATIENT = {"KMQ_SESSION_TTL": "20s"}  # a busy machine does not end its session


# --- many publishers, many kills --------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [15, pytest.param(500, marks=FULL)])
def test_eight_publishers_lose_no_epoch_and_give_none_twice(queue, count):
    queue.receiver("a")
    queue.wait_subscribed()
    for number in range(8):
        queue.publisher(f"p{number}", count, HOLDS="yes" if number % 2 else "")
    queue.wait("all messages published", lambda: len(queue.told()) == 8 * count, 600)
    queue.wait_done()
    told, last = queue.told(), queue.last_epoch()
    queue.wait_processed(last)
    # Where the answer was lost, on a busy machine, nobody was told the epoch.
    assert last - len(told) <= sum(len(publisher.facts("unknown")) for publisher in queue.publishers)
    assert {*told} <= {*range(1, last + 1)}
    queue.check()


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=FULL)])
def test_killed_publishers_and_receivers_lose_and_skip_nothing(queue, rng, kills):
    receivers = {broker: queue.receiver(broker) for broker in ("a", "b")}
    queue.wait_subscribed()
    publishers = [queue.publisher("p0", AWAY), queue.publisher("p1", AWAY, HOLDS="yes")]
    for kill in range(kills):
        goal = len(queue.told()) + rng.randrange(1, 20)
        queue.wait("publishing goes on", lambda goal=goal: len(queue.told()) >= goal)
        if rng.random() < 0.5:
            publishers.pop(rng.randrange(2)).kill()
            publishers.append(queue.publisher(f"k{kill}", AWAY, HOLDS=rng.choice(["", "yes"])))
        else:
            broker = rng.choice("ab")
            receivers[broker].kill()
            queue.check_marks()
            receivers[broker] = queue.receiver(broker)
    for publisher in publishers:
        publisher.kill()
    queue.wait_processed(queue.last_epoch())
    queue.check()


# A publisher's requests: with the lock in the Txn of the message, and with a lock that it holds.
PUBLISHING = ["service", "session", "read", "publish", "publish:3"]
HOLDING = ["service", "session", "lock", "read", "publish", "unlock", "publish:3"]
RECEIVING = ["service", "session", "lock", "read", "snapshot", "mark", "watch", "mark:2", "watch:3"]


def steps(requests: list[str], rng: random.Random, count: int | None) -> list[str]:
    """All steps before and after these requests, or some of them."""
    all_steps = [f"{when}:{request}" for request in requests for when in ("before", "after")]
    return rng.sample(all_steps, count) if count else all_steps


@pytest.mark.parametrize("count", [2, pytest.param(None, marks=FULL)])
def test_publisher_killed_at_each_step_leaves_a_queue_that_goes_on(new_queue, rng, count):
    queues: list[tuple[Queue, Worker, str]] = []
    held = [(step, "yes") for step in steps(HOLDING, rng, count)]
    for step, holds in [*((step, "") for step in steps(PUBLISHING, rng, count)), *held]:
        queue = new_queue()
        queues.append((queue, queue.publisher("killed", 5, STOP_AT=step, HOLDS=holds), step))
    for queue, killed, step in queues:
        queue.wait(step, lambda killed=killed: killed.process.poll() is not None)
        assert [fact.words[1] for fact in killed.facts("at")] == [step if step.count(":") == 2 else f"{step}:1"]
        queue.publisher("next", 2)
    for queue, _, _ in queues:
        queue.wait_done(queue.publishers[1])
        queue.receiver("late")  # gets a snapshot
        queue.wait_processed(queue.last_epoch())
        assert sorted(queue.stored()) == list(range(1, queue.last_epoch() + 1))
        queue.check(may_skip=True)


@pytest.mark.parametrize("count", [4, pytest.param(None, marks=FULL)])
def test_receiver_killed_at_each_step_gets_all_messages_in_order(new_queue, rng, count):
    queues: list[tuple[Queue, Worker]] = []
    for step in steps(RECEIVING, rng, count):
        queue = new_queue()
        queues.append((queue, queue.receiver("a", STOP_AT=step)))
        queue.publisher("p", 6)
    for queue, killed in queues:
        queue.wait_done()
        queue.wait("killed", lambda queue=queue, killed=killed: is_killed(queue, killed))
        assert killed.facts("at")
        queue.check_marks()
        queue.receiver("a")
    for queue, _ in queues:
        queue.wait_processed(queue.last_epoch())
        queue.check()
        queue.wait("marked", lambda queue=queue: queue.marks() == {"a": queue.last_epoch()})


def is_killed(queue: Queue, receiver: Worker) -> bool:
    """Publish one more message if it lives: the first six may have come all at once, in the snapshot even."""
    if receiver.process.poll() is None:
        queue.wait_done(queue.publisher(f"p{len(queue.publishers)}", 1))
    return receiver.process.poll() is not None


@pytest.mark.parametrize("step", ["before:processing:3", "after:processing:3"])
def test_message_is_marked_only_after_it_was_processed(queue, step):
    killed = queue.receiver("a", STOP_AT=step)
    queue.wait_subscribed()
    queue.wait_done(queue.publisher("p", 6))
    queue.wait("killed", lambda: killed.facts("at") and killed.process.poll() is not None)
    queue.check_marks()
    queue.receiver("a")
    queue.wait_processed(6)
    queue.check()
    assert [fact.words[2:3] for fact in queue.seen_by("a")].count(["3"]) == (1 if step.startswith("before") else 2)


@pytest.mark.parametrize("holds", ["", "yes"])
def test_message_whose_answer_was_lost_is_published_once(queue, holds):
    queue.receiver("a")
    queue.wait_subscribed()
    publisher = queue.publisher("p", 3, STOP_AT="after:publish:2", STOP_BY="LOSE", HOLDS=holds, **PATIENT)
    queue.wait_done(publisher)
    assert publisher.facts("at")
    queue.wait_processed(queue.last_epoch())
    queue.check()
    # A busy Consul may have refused another one of them, which was then published under another name (p:1+).
    told = [*queue.told().values()]
    assert [payload.rstrip("+") for payload in told] == ["p:1", "p:2", "p:3"] and told[1] == "p:2"


# --- failover ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["KILL", "STOP"])
def test_next_publisher_takes_over_from_one_that_died_with_the_lock(queue, by):
    queue.receiver("a")
    queue.wait_subscribed()
    first = queue.publisher("first", 3, STOP_AT="before:publish:2", STOP_BY=by, HOLDS="yes")
    queue.wait("the first has the lock", lambda: first.facts("at"))
    second = queue.publisher("second", 3)
    queue.wait_told(second, 1)
    died, went_on = first.facts("at")[0].ts, second.facts("told")[0].ts
    print(f"SIG{by}: the next message was published after {went_on - died:.2f} s")
    assert went_on - died < 60  # at most 5 s where the machine has nothing else to do
    queue.wait_done(second)
    if by == "STOP":
        first.resume()
        queue.wait_done(first)
        (refused,) = first.facts("refused")
        assert refused.words[1] == "first:2" and "not ours any more" in " ".join(refused.words)
    queue.wait_processed(queue.last_epoch())
    queue.check()


# --- Consul's servers -------------------------------------------------------------------------------------------------


def lose_nothing(queue: Queue, fault: Callable[[], None], repair: Callable[[], None], goes_on: bool = True) -> None:
    """Publish and receive while something is broken, and after it is whole again."""
    queue.receiver("a", client=1)
    queue.receiver("b", client=2)
    queue.wait_subscribed()
    publisher = queue.publisher("p", AWAY)
    queue.wait_told(publisher, 20)
    queue.wait_processed(1)
    fault()
    if goes_on:
        before = len(publisher.facts("told"))
        took = queue.wait("publishing goes on", lambda: len(publisher.facts("told")) > before + 20)
        print(f"21 messages after the fault took {took:.2f} s")
        queue.wait_processed(max(queue.told()))
    repair()
    before = len(publisher.facts("told"))
    queue.wait("publishing goes on", lambda: len(publisher.facts("told")) > before + 20)
    publisher.kill()
    queue.wait_processed(queue.last_epoch())
    queue.check()


@pytest.mark.parametrize("how", ["kill", pytest.param("pause", marks=FULL)])
def test_lost_leader_of_consul_loses_no_message(servers, queue, how):
    lose_nothing(queue, lambda: getattr(servers.leader(), how)(), servers.repair)


@pytest.mark.parametrize("how", ["pause", pytest.param("kill", marks=FULL)])
def test_lost_follower_of_consul_loses_no_message(servers, queue, how):
    lose_nothing(queue, lambda: getattr(servers.others()[0], how)(), servers.repair)


@pytest.mark.parametrize("how", ["kill", pytest.param("pause", marks=FULL)])
def test_lost_majority_of_consul_stops_publishing_until_it_is_back(servers, queue, how):
    def lose() -> None:
        lost: list[ConsulServer] = [servers.leader(), servers.others()[0]]
        for server in lost:
            getattr(server, how)()

    lose_nothing(queue, lose, servers.repair, goes_on=False)


WAYS = ["from the leader", "to the leader", "from the publisher"]


@pytest.mark.parametrize("way", ["to the publisher", *(pytest.param(way, marks=FULL) for way in WAYS)])
def test_network_cut_one_way_loses_no_message(servers, queue, way):
    def cut() -> None:
        leader, others = servers.leader().number, [server.number for server in servers.others()]
        inside, outside = (servers.client(0), [leader, *others]) if "publisher" in way else (leader, others)
        for other in outside:
            servers.network.cut(*((inside, other) if way.startswith("from") else (other, inside)))

    lose_nothing(queue, cut, servers.repair, goes_on="leader" in way)


@FULL
def test_clients_leave_a_server_that_has_lost_the_others(servers, queue):
    def isolate() -> None:
        first, *others = (server.number for server in servers.servers)  # clients ask the first as long as they can
        for other in others:
            servers.network.cut(first, other)
            servers.network.cut(other, first)

    lose_nothing(queue, isolate, servers.repair)


def test_restored_snapshot_of_consul_brings_subscribers_a_snapshot(servers, queue, tmp_path):
    queue.receiver("a")
    queue.wait_subscribed()
    queue.wait_done(queue.publisher("before", 10))
    queue.wait("marked", lambda: queue.marks() == {"a": 10})
    servers.snapshot("save", tmp_path / "saved")
    queue.wait_done(queue.publisher("lost", 20))
    queue.wait_processed(30)
    servers.snapshot("restore", tmp_path / "saved")
    assert queue.last_epoch() == 10
    queue.wait("a snapshot of epoch 10", lambda: ["snapshot", "a", "10"] in [fact.words for fact in queue.seen_by("a")])
    queue.wait_done(queue.publisher("after", 30))
    queue.wait("the last message", lambda: queue.seen_by("a")[-1].words[:4] == ["processed", "a", "40", "after:30"])
    facts = [fact.words for fact in queue.seen_by("a")]
    after = facts[facts.index(["snapshot", "a", "10"]) + 1 :]
    received = [(int(words[2]), words[3]) for words in after if words[0] == "processed"]
    assert sorted(set(received)) == [(10 + number, f"after:{number}") for number in range(1, 31)]


# --- away, long, many -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [KEPT + 70, pytest.param(1000, marks=FULL)])
def test_node_that_was_away_gets_what_is_kept_or_a_snapshot(new_queue, count):
    for absent_s, is_kept in ((86_400, True), (0.1, False)):
        queue = new_queue()
        away = queue.receiver("away")
        queue.receiver("here")
        queue.wait_subscribed()
        away.kill()
        queue.wait("away's session has ended", lambda queue=queue: "away" not in queue.present())
        queue.wait_done(queue.publisher("p", count, ABSENT_S=absent_s))
        queue.wait("here has marked", lambda queue=queue: queue.marks()["here"] == count)
        queue.wait_done(queue.publisher("trims", TRIM_EVERY, ABSENT_S=absent_s))
        queue.receiver("away")
        queue.wait_processed(count + TRIM_EVERY)
        items = [fact.words[0] for fact in queue.seen_by("away")]
        assert items.count("processed") == (count + TRIM_EVERY if is_kept else 0)
        assert items.count("snapshot") == (1 if is_kept else 2)
        queue.check(may_skip=not is_kept)


def test_longest_message_arrives_and_one_byte_more_is_refused(queue):
    queue.receiver("a")
    queue.wait_subscribed()
    queue.wait_done(queue.publisher("longest", 1, MAX_BYTES))
    queue.wait_processed(1)
    (length,) = map(len, queue.servers.entries(queue.keys.messages).values())
    assert length == MAX_BYTES
    longer = queue.publisher("longer", 1, MAX_BYTES + 1)
    assert longer.process.wait(60) == 78
    assert "at most 380,000" in " ".join(longer.facts("failed")[0].words)
    queue.wait_done(queue.publisher("short", 1))
    queue.wait_processed(2)
    queue.check()


@pytest.mark.parametrize(("subscribers", "count"), [(24, 10), pytest.param(100, 50, marks=FULL)])
def test_every_one_of_many_subscribers_gets_every_message(queue, subscribers, count):
    names = [f"n{number}" for number in range(subscribers)]
    for at in range(4):
        queue.receiver(*names[at::4], client=at)
    queue.wait_subscribed()
    queue.wait_done(queue.publisher("p", count))
    queue.wait_processed(count)
    queue.check()
    for name in names:
        assert [fact.words[0] for fact in queue.seen_by(name)].count("processed") >= count
