"""Consumer groups on the consumer port of a real broker, as somebody types them."""

from collections import Counter

import pytest
from brokers import Broker
from line_client import LineClient, ask

from kmq.client import egress_replies as replies
from kmq.client.egress_lines import TopicPartition


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("groups") / "b")
    for topic in ("orders", "eaten", "moved"):
        assert made.kmq("topics", "create", topic, "--partitions", "4").returncode == 0
    made.up()
    for topic in (b"orders", b"eaten", b"moved"):
        made.send_lines([b"%b|0||%d" % (topic, n) for n in range(400)])
    made.wait_routed(1200)
    yield made
    made.close()


def port(broker, name="egress"):
    return int((broker.pipes / f"{name}.port").read_text())


class Member(LineClient):
    """A member: it commits what it has read when it must give something up, as a well-behaved program does."""

    def __init__(self, broker, group, name, topic, *words):
        super().__init__(port(broker))
        self.generation, self.owned, self.seen = 0, {}, Counter()
        self.send(f"GROUP {group} member={name} topics={topic}", *words)
        self.next()

    def next(self):
        """The next reply, with what a member does about it."""
        reply = self.reply()
        if isinstance(reply, replies.Assigned):
            self.generation = reply.generation
            self.owned = {place: self.owned.get(place, offset) for place, offset in reply.offsets}
        elif isinstance(reply, replies.Revoke):
            rows = " ".join(f"{place} {self.owned.pop(place)}" for place in reply.partitions)
            self.send(f"!commit {rows}", "!revoked")
        elif isinstance(reply, replies.Batch) and reply.place is not None:
            lines = self.read(reply.nbytes).splitlines()
            assert reply.offset == self.owned[reply.place]
            self.owned[reply.place] += len(lines)
            self.seen.update(lines)
        return reply

    def until(self, condition):
        while not condition():
            self.next()

    def eat(self):
        """Read everything that is there."""
        while True:
            self.send("!fetch 700")
            while not isinstance(reply := self.next(), replies.Batch):
                pass
            if reply == replies.NO_RECORDS:
                return

    def commit(self):
        self.send("!commit " + " ".join(f"{place} {offset}" for place, offset in self.owned.items()))
        while not isinstance(reply := self.next(), replies.Committed):
            assert not isinstance(reply, replies.Failed), reply


def test_a_member_gets_the_partitions_that_its_topic_gets(broker):
    broker.send_lines([b"wider|0||0"])
    broker.wait(lambda: broker.lines("wider"), "the first record")
    with Member(broker, "widers", "a", "wider") as a:
        assert len(a.owned) == 1
        a.eat()
        assert broker.kmq("topics", "set", "wider", "--partitions", "3").returncode == 0
        broker.send_lines([b"wider.@%d|0||%d" % (n, n) for n in range(3)])
        a.until(lambda: len(a.owned) == 3)
        while a.seen.total() < 4:
            a.eat()
        a.commit()
        assert a.owned == {TopicPartition("wider", n): 1 + (n == 0) for n in range(3)}


def test_members_share_the_partitions_and_read_every_record_once(broker):
    with Member(broker, "eaters", "a", "eaten") as a:
        assert len(a.owned) == 4
        a.send("!fetch 700")
        a.next()
        with Member(broker, "eaters", "b", "eaten") as b:
            assert b.generation > 0 and not b.owned  # a reads them still
            a.until(lambda: len(a.owned) == 2)
            b.until(lambda: len(b.owned) == 2)
            assert not a.owned.keys() & b.owned.keys()
            a.eat()
            b.eat()
            assert a.seen + b.seen == Counter(broker.lines("eaten"))
            b.commit()
            b.send("!leave")
            b.rest()
        a.until(lambda: len(a.owned) == 4)
        a.eat()  # goes on where b has committed
        assert a.seen.total() + b.seen.total() == 400
        a.send("!leave")
        a.rest()


def test_what_is_committed_is_where_the_next_member_begins_and_is_processed(broker):
    with Member(broker, "billing", "a", "orders") as a:
        a.eat()
        seqs = [int(line.split(b"|")[0]) for line in a.seen]
        question = [f"GET_STATUS {seqs[0]}", f"GET_STATUS {seqs[0]} billing", f"GET_STATUS {seqs[0]} others"]
        assert ask(port(broker, "status"), *question) == b"PENDING\n" * 3
        a.commit()
        assert ask(port(broker, "status"), *question) == b"PROCESSED\nPROCESSED\nPENDING\n"
        a.send("!leave")
        a.rest()
    with Member(broker, "billing", "b", "orders") as b:
        assert sum(b.owned.values()) == 400
        b.eat()
        assert not b.seen
        b.send("!offsets orders/0", "!leave")
        assert f"committed={b.owned['orders', 0]}".encode() in b.rest()


def test_a_record_is_processed_once_the_group_has_committed_past_it(broker):
    lines = ask(port(broker), "CONSUME orders/0 raw max=6").splitlines()
    last, following = (int(line.split(b"|")[0]) for line in lines[4:])
    ask(port(broker), "ASSIGN half orders/0", "!commit orders/0 5")
    question = [f"GET_STATUS {last} half", f"GET_STATUS {following} half"]
    assert ask(port(broker, "status"), *question) == b"PROCESSED\nPENDING\n"


def test_commits_that_are_not_the_members_are_refused_and_the_connection_goes_on(broker):
    with Member(broker, "refused", "a", "orders") as a:
        for request, answer in {
            "!commit eaten/0 1": b"!err commit fenced eaten/0: not assigned to a in generation ",
            "!commit orders/4 1": b"!err commit unknown_partition orders/4: ",
            "!commit none/0 1": b"!err commit unknown_partition none/0: ",
            "!commit orders/0": b"!err commit bad_request ",
            "!commit orders/0 1000000": b"!err commit out_of_range orders/0: offset 1000000 is beyond first=0 end=",
            "!commit orders/0 1 eaten/0 1": b"!err commit fenced ",
        }.items():
            a.send(request)
            assert a.line().startswith(answer)
        a.send("!offsets orders/0")
        assert a.line().endswith(b"committed=-")  # a commit is refused as a whole
        # Somebody who is no member may commit as long as nobody is one.
        others = ask(port(broker), "ASSIGN refused orders/0", "!commit orders/0 7")
        assert b"!err commit unknown_member " in others
        a.send("!leave")
        a.rest()
    beyond = ask(port(broker), "ASSIGN refused orders/0", "!commit orders/0 1000000")
    assert b"!err commit out_of_range " in beyond
    assert ask(port(broker), "ASSIGN refused orders/0", "!commit orders/0 7").endswith(b"!committed orders/0 7\n")
    assert ask(port(broker), "ASSIGN refused orders/0").startswith(b"!assign 0 orders/0@7\n")


def test_bad_members_are_refused(broker):
    for request, code in {
        "GROUP g member=m topics=orders session=1s": b"bad_timeout",
        "GROUP g member=a%20b topics=orders": b"bad_name",
        "GROUP g member=m": b"bad_request",
    }.items():
        assert ask(port(broker), request).startswith(b"!err %b " % code)


def test_a_newer_connection_of_a_member_takes_its_place_and_its_partitions(broker):
    with Member(broker, "twice", "a", "orders") as older:
        with Member(broker, "twice", "a", "orders") as newer:
            assert older.rest().startswith(b"!err fenced ")
            assert (newer.generation, newer.owned) == (older.generation, older.owned)
        with Member(broker, "twice", "a", "orders") as again:  # its connection broke: nothing has moved
            assert again.owned == older.owned and again.generation == older.generation
            again.send("!leave")
            again.rest()


def test_a_member_that_comes_back_is_asked_again_for_what_it_must_give_up(broker):
    with Member(broker, "asked", "a", "orders") as a, Member(broker, "asked", "b", "orders") as b:
        assert a.line().startswith(b"!revoke ")  # and a says nothing: it is stopped, or its connection breaks
        a.close()
        with LineClient(port(broker)) as again:
            again.send("GROUP asked member=a topics=orders")
            first = again.reply()
            assert isinstance(first, replies.Revoke) and len(first.partitions) == 2
            assert len(again.reply().offsets) == 2
            again.send("!revoked")
            b.until(lambda: set(b.owned) == set(first.partitions))


def test_a_killed_gateway_loses_no_commit_and_members_come_back(broker):
    a = Member(broker, "killed", "a", "moved")
    a.eat()
    a.commit()
    before, generation = dict(a.owned), a.generation
    broker.kill("gateway")
    assert a.rest() == b""
    a.close()
    broker.wait(lambda: "gateway" in broker.pids() and is_back(broker), "the next gateway")
    with Member(broker, "killed", "a", "moved") as again:
        again.until(lambda: again.owned)
        assert again.owned == before and sum(before.values()) == 400 and again.generation > generation
        broker.send_lines([b"moved|0||more"])
        again.send("!fetch 1000 wait=60000")
        assert isinstance(again.next(), replies.Batch) and again.seen.total() == 1
        again.send("!leave")
        again.rest()


def is_back(broker):
    try:
        return ask(port(broker), "ASSIGN killed moved/0").startswith(b"!assign")
    except OSError:
        return False


def test_a_member_gets_the_partitions_of_a_topic_that_comes_later(broker):
    with Member(broker, "early", "a", "late") as a:
        assert not a.owned
        broker.send_lines([b"late|0||x"])
        a.until(lambda: a.owned == {TopicPartition("late", 0): 0})
        a.eat()
        assert a.seen.total() == 1
