"""Consumer groups on the consumer port of a real broker, as somebody types them."""

from collections import Counter
from itertools import count

import pytest
from brokers import Broker
from line_client import LineClient, ask

from kmq.wire import replies
from kmq.wire.requests import TopicPartition


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(tmp_path_factory.mktemp("groups") / "b")
    for topic in ("orders", "eaten", "moved"):
        assert made.kmq("topics", "create", topic, "--partitions", "4").returncode == 0
    made.up()
    for topic in (b"orders", b"eaten", b"moved"):
        made.send_lines([b"%b|0||%d" % (topic, n) for n in range(400)])
    made.wait_routed(3 + 1200)  # the declarations have seqs, too
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


def test_an_earlier_attempt_of_a_run_that_arrives_late_fences_no_later_one(broker):
    with Member(broker, "belated", "a", "orders attempt=r.2") as later, LineClient(port(broker)) as earlier:
        earlier.send("GROUP belated member=a topics=orders attempt=r.1")
        assert earlier.rest().startswith(b"!err fenced ")
        later.commit()
        with Member(broker, "belated", "a", "orders attempt=r.10") as latest:
            assert later.rest().startswith(b"!err fenced ") and latest.owned.keys() == later.owned.keys()
            with Member(broker, "belated", "a", "orders attempt=s.1"):  # the program was started again
                assert latest.rest().startswith(b"!err fenced ")


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


# --- giving messages back --------------------------------------------------------------------------------------------


_numbers = count()


@pytest.fixture
def letters(broker, request):
    """A topic of its own, of one partition and ten messages; asked with a number it is how often one is delivered."""
    name = f"given{next(_numbers)}"
    most = getattr(request, "param", 0)
    words = ["--set", f"max_deliveries={most}"] if most else []
    made = broker.kmq("topics", "create", name, "--partitions", "1", *words)
    assert made.returncode == 0, made.stderr
    broker.send_lines([b"%b|0||%d" % (name.encode(), n) for n in range(10)])
    broker.wait(lambda: len(broker.lines(name)) == 10, "ten messages")
    return name


class Giver(LineClient):
    """A member of a topic with one partition, `topic`/0, which is served line by line."""

    def __init__(self, broker, group, topic, name="a"):
        super().__init__(port(broker))
        self.place = TopicPartition(topic, 0)
        self.send(f"GROUP {group} member={name} topics={topic}")
        while not self.reply().offsets:
            pass

    def take(self, max_bytes=1_000_000, wait_ms=60_000):
        """(offset, deliveries, values) of the next batch; deliveries 0: new ones."""
        self.send(f"!fetch {max_bytes}" + f" wait={wait_ms}" * (wait_ms > 0))
        batch = self.reply()
        assert isinstance(batch, replies.Batch), batch
        return (
            batch.offset,
            batch.deliveries,
            [int(line.split(b"|")[5]) for line in self.read(batch.nbytes).splitlines()],
        )

    def ask(self, line):
        self.send(line)
        return self.reply()

    def commit(self, offset):
        assert self.ask(f"!commit {self.place} {offset}") == replies.Committed(((self.place, offset),))

    def nack(self, offset, *words):
        return self.ask(" ".join([f"!nack {self.place} {offset}", *words]))


def test_a_message_given_back_comes_again_before_new_ones_marked_as_such(broker, letters):
    place = TopicPartition(letters, 0)
    with Giver(broker, "givers", letters) as a:
        first, deliveries, values = a.take(200)
        assert (first, deliveries, values[:2]) == (0, 0, [0, 1])
        end = len(values)
        assert a.nack(1, "reason=no%20room") == replies.Nacked(place, 1, 1)
        a.commit(end)
        assert a.take() == (1, 2, [1])
        assert a.take() == (end, 0, [*range(end, 10)])
        a.commit(10)  # goes beyond what came after it
        assert a.take(wait_ms=0) == (0, 0, [])
        assert a.nack(3) == replies.Nacked(place, 3, 1)
        assert a.take() == (3, 2, [3])
        assert a.ask(f"!commit {place} 4") == replies.Committed(((place, 4),))  # nor does the group go back
        assert a.ask(f"!commit again {place} 3") == replies.Committed(((place, 3),), True)
        assert a.ask("!offsets").rows[0].committed == 10
        a.send("!leave")
        a.rest()
    with Giver(broker, "givers", letters, "b") as b:
        assert b.take(wait_ms=0) == (0, 0, [])


def test_what_was_given_back_and_not_committed_does_not_come_in_its_turn(broker, letters):
    with Giver(broker, "anew", letters) as a:
        a.take()
        a.nack(0, "delay=600000")
        a.nack(4, "delay=600000")
        a.nack(5, "delay=600000")
        a.send("!leave")
        a.rest()
    with Giver(broker, "anew", letters, "b") as b:
        assert b.take() == (1, 0, [1, 2, 3]) and b.take() == (6, 0, [6, 7, 8, 9])


def test_who_leaves_while_a_fetch_waits_takes_no_message_along(broker, letters):
    with Giver(broker, "leavers", letters) as a:
        while a.take(wait_ms=0)[2]:
            pass
        a.commit(10)
        a.nack(3)
        assert a.take() == (3, 2, [3])
        a.send("!fetch 1000 wait=60000", "!leave")
        assert a.reply() == replies.Batch(None) and a.rest() == b""  # at once: nobody is there to be given anything
    with Giver(broker, "leavers", letters, "b") as b:
        assert b.take() == (3, 3, [3])


def test_a_fetch_that_waits_is_answered_when_a_message_is_due(broker, letters):
    with Giver(broker, "waiting", letters) as a:
        a.take()
        a.commit(10)
        a.send("!fetch 1000 wait=60000", f"!nack {a.place} 2 delay=300", f"!nack {a.place} 6 delay=900")
        assert [a.reply().deliveries, a.reply().deliveries] == [1, 1]
        batch = a.reply()
        assert (batch.offset, batch.deliveries) == (2, 2)
        a.read(batch.nbytes)
        assert a.take() == (6, 2, [6])


@pytest.mark.parametrize("letters", [2], indirect=True)
def test_a_message_given_back_too_often_says_where_its_letter_is(broker, letters):
    with Giver(broker, "writers", letters) as a:
        a.take()
        a.commit(10)
        assert a.nack(3).letter == ""
        assert a.take() == (3, 2, [3])
        said = replies.Nacked(a.place, 3, 2, f"{letters}.dlq/0@0")
        assert a.nack(3, "reason=no%20account") == said and a.take(wait_ms=0) == (0, 0, [])
    [letter] = ask(port(broker), f"CONSUME {letters}.dlq/0 raw").splitlines()
    assert b"error=no%20account" in letter and b"attempts=2" in letter and letter.endswith(b"|3")


@pytest.mark.parametrize("letters", [3], indirect=True)
def test_a_message_that_kills_its_readers_by_lines_is_put_aside_alone(broker, letters):
    handled, lives = [], 0
    while lives < 20:
        with Giver(broker, "readers", letters) as a:
            while True:
                offset, deliveries, values = a.take(wait_ms=0)
                if not values or 5 in values:
                    break
                handled += values
                if deliveries:
                    a.ask(f"!commit again {a.place} {offset}")
                else:
                    a.commit(offset + len(values))
        if not values:
            break
        lives += 1
    assert sorted(handled) == [0, 1, 2, 3, 4, 6, 7, 8, 9] and lives == 3
    [letter] = ask(port(broker), f"CONSUME {letters}.dlq/0 raw").splitlines()
    assert letter.endswith(b"|5") and b"attempts=3" in letter


def test_who_reads_without_membership_gives_back_too_while_the_group_has_no_members(broker, letters):
    with LineClient(port(broker)) as one:
        one.send(f"ASSIGN alone {letters}/0", "!fetch 1000000")
        assert isinstance(one.reply(), replies.Assigned) and one.batch()[1] == 0
        one.send(f"!nack {letters}/0 6", "!fetch 1000000")
        assert one.reply().deliveries == 1
        assert one.batch()[1] == 6
    with LineClient(port(broker)) as two:  # what the other had in hand when it went
        two.send(f"ASSIGN alone {letters}/0@latest", "!fetch 1000000 wait=60000")
        assert isinstance(two.reply(), replies.Assigned) and two.batch()[1] == 6
        with Giver(broker, "alone", letters):
            two.send(f"!nack {letters}/0 7")
            assert two.reply().code == "unknown_member"


def test_what_cannot_be_given_back_is_refused_and_the_connection_goes_on(broker, letters):
    with Giver(broker, "strict", letters) as a:
        for request, code in {
            f"!nack {letters}/0": "bad_request",
            f"!nack {letters}/0 1 delay=-1": "bad_request",
            f"!nack {letters}/0 1 reason=%ff": "bad_request",
            f"!nack {letters}/0 10": "out_of_range",
            f"!nack {letters}/0 1 delay=1 delay=2": "bad_request",
            f"!nack {letters}/7 1": "unknown_partition",
            "!nack orders/0 1": "fenced",
        }.items():
            failed = a.ask(request)
            assert isinstance(failed, replies.Failed) and (failed.request, failed.code) == ("nack", code), failed
        assert len(a.take()[2]) == 10
    assert (
        ask(port(broker), f"ASSIGN {letters}/0", f"!nack {letters}/0 1")
        .splitlines()[1]
        .startswith(b"!err nack bad_request ")
    )


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


def test_an_opening_in_several_lines_is_answered_as_one_or_refused(broker):
    lines = ["ASSIGN orders/0 more", "ASSIGN orders/2@5 more", "ASSIGN orders/1", "!leave"]
    assert ask(port(broker), *lines) == b"!assign 0 orders/0@0 orders/1@0 orders/2@5\n"
    assert ask(port(broker), "ASSIGN orders/0 more").startswith(b"!err bad_request more: the connection has ended")
    assert ask(port(broker), "ASSIGN orders/0 more", "!fetch 1").startswith(b"!err bad_request '!fetch': unknown")
    endless = [
        f"GROUP long member=m topics={','.join(f'{n}x{k}' + 'y' * 190 for k in range(300))} more" for n in range(20)
    ]
    refused = b"!err bad_request the lines of GROUP are over 1048576 bytes together\n"
    assert ask(port(broker), *endless) == refused
