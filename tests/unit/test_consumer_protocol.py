"""The client's side of the consumer port without sockets: nothing is skipped, whatever breaks, in whatever order."""

import random
import time

import pytest
from consumer_peer import EU, US, Peer, Session

from kmq.client.consumer_options import ConsumerOptions
from kmq.client.consumer_protocol import ConsumerCore, Phase
from kmq.client.consumer_state import Kind
from kmq.errors import ConfigError
from kmq.gateway.groups.protocol import GroupLimits
from kmq.sending.failures import Fenced, NotAnswered, Refused
from kmq.wire import requests as lines
from kmq.wire.requests import MAX_REQUEST, TopicPartition


class Pair:
    """A core and its peer, and what has passed between them."""

    def __init__(self, peer: Peer, topics: tuple[str, ...] = ("orders",), **options) -> None:
        self.peer = peer
        self.core = ConsumerCore(ConsumerOptions(**({"group_id": "billing"} | options)))
        self.core.choose(topics)
        self.session: Session | None = None
        self.cut = lambda data: [data]  # how bytes are cut on their way

    def connect(self) -> "Pair":
        self.session = Session(self.peer)
        opening = self.core.opening()
        self.core.connected()
        self.receive(self.session.feed(opening))
        return self

    def receive(self, data: bytes) -> None:
        for part in self.cut(data):
            self.core.receive(part)

    def pass_on(self) -> None:
        """Requests there, replies back, until nothing is to be said."""
        while data := self.core.requests.take():
            self.receive(self.session.feed(data))

    def fetch(self, wait_s: float = 1.0) -> None:
        self.pass_on()  # a partition that is being moved cannot be asked for
        self.core.fetch(time.monotonic(), wait_s)
        self.pass_on()

    def collect(self, count: int = 1000) -> list[tuple[int, int]]:
        return [(m.partition, m.offset) for m in self.core.holdings.collect(count)]

    def read_all(self) -> list[tuple[int, int]]:
        """Read until nothing has come three times: a partition may first have to be moved to its position."""
        found, empty = [], 0
        while empty < 3:
            self.fetch()
            some = self.collect()
            found += some
            empty = 0 if some else empty + 1
        return found

    def commit(self, **offsets: int):
        places = {"eu": EU, "us": US}
        pending = self.core.commit([(places[name], at) for name, at in offsets.items()], time.monotonic())
        self.pass_on()
        return pending

    def events(self) -> list[tuple[Kind, tuple]]:
        found = [(event.kind, event.places) for event in self.core.holdings.events]
        self.core.holdings.events.clear()
        return found


@pytest.fixture
def pair() -> Pair:
    return Pair(Peer({EU: 5, US: 3})).connect()


def in_order(count: int, partition: int) -> list[tuple[int, int]]:
    return [(partition, n) for n in range(count)]


def test_a_group_reads_its_partitions_each_in_order(pair):
    assert pair.events() == [(Kind.ASSIGNED, (EU, US))]
    found = pair.read_all()
    assert sorted(found) == in_order(5, 0) + in_order(3, 1)
    assert [p for p in found if p[0] == 0] == in_order(5, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_replies_may_be_cut_at_any_byte(size):
    pair = Pair(Peer({EU: 40, US: 7}), fetch_max_bytes=100)
    pair.cut = lambda data: [data[at : at + size] for at in range(0, len(data), size)]
    assert sorted(pair.connect().read_all()) == in_order(40, 0) + in_order(7, 1)


def test_nothing_is_asked_for_while_two_batches_are_there():
    pair = Pair(Peer({EU: 100}), fetch_max_bytes=200).connect()
    for _ in range(20):
        pair.fetch(0)
    assert 0 < sum(isinstance(asked, lines.Fetch) for asked in pair.peer.asked) <= 3
    assert sum(chunk.nbytes for chunk in pair.core.holdings.chunks) <= 400
    assert pair.read_all() == in_order(100, 0)


def test_an_empty_answer_is_not_asked_for_again_unless_the_application_waits(pair):
    pair.read_all()
    before = len(pair.peer.asked)
    pair.fetch(0)
    assert len(pair.peer.asked) == before
    pair.fetch(0.5)
    assert pair.peer.asked[-1] == lines.Fetch(1 << 20, 27_000)


def test_a_compacted_record_takes_an_offset_and_the_position_passes_it():
    pair = Pair(Peer({EU: 4})).connect()
    pair.peer.records[EU][0] = pair.peer.records[EU][3] = None
    assert pair.read_all() == [(0, 1), (0, 2)]
    assert pair.core.holdings.owned[EU].position == 4


def test_the_position_is_behind_what_was_given_out(pair):
    pair.fetch()
    pair.fetch(0)
    assert len(pair.collect(2)) == 2
    assert sorted(owned.position for owned in pair.core.holdings.owned.values()) == [0, 2]


# --- seeking and pausing ---------------------------------------------------------------------------------------------


def test_a_seek_drops_what_waits_and_what_is_on_its_way(pair):
    core, now = pair.core, time.monotonic()
    pair.fetch(0)
    core.fetch(now, 0)
    on_its_way = pair.session.feed(core.requests.take())
    for place in (EU, US):
        core.seek(place, lines.Position("offset", 2), now)
    assert pair.collect() == []
    pair.receive(on_its_way)
    assert pair.collect() == []
    pair.pass_on()
    assert sorted(pair.read_all()) == [(0, 2), (0, 3), (0, 4), (1, 2)]


def test_the_last_of_several_seeks_counts(pair):
    now = time.monotonic()
    pair.core.seek(EU, lines.LATEST, now)
    pair.core.seek(EU, lines.Position("offset", 1), now)
    pair.core.seek(EU, lines.EARLIEST, now)
    pair.core.seek(US, lines.LATEST, now)
    assert pair.read_all() == in_order(5, 0)


def test_a_paused_partition_gives_nothing_and_goes_on_where_it_was(pair):
    pair.fetch()
    pair.fetch(0)
    first = pair.collect(1)
    pair.core.holdings.pause([EU])
    rest = pair.read_all()
    assert all(partition == 1 for partition, _ in rest)
    pair.core.holdings.resume([EU])
    assert sorted(first + rest + pair.read_all()) == in_order(5, 0) + in_order(3, 1)


def test_a_batch_that_comes_for_a_paused_partition_comes_again_after_it():
    pair = Pair(Peer({EU: 5})).connect()
    pair.core.fetch(time.monotonic(), 1)
    pair.core.holdings.pause([EU])
    pair.pass_on()
    assert pair.collect() == []
    pair.core.holdings.resume([EU])
    assert pair.read_all() == in_order(5, 0)


def test_with_all_partitions_paused_nothing_is_asked_for(pair):
    pair.core.holdings.pause([EU, US])
    before = len(pair.peer.asked)
    assert pair.read_all() == [] and len(pair.peer.asked) == before


def test_a_member_that_is_busy_with_its_records_still_asks_once_a_minute():
    pair = Pair(Peer({EU: 100}), fetch_max_bytes=200).connect()
    for _ in range(5):
        pair.fetch(0)
    assert not pair.core.holdings.has_room
    pair.core.fetch(time.monotonic() + 61, 0)
    assert pair.core.requests.take() == b"!fetch 1\n"


def test_a_fetch_does_not_wait_while_a_partition_is_on_its_way_elsewhere(pair):
    pair.read_all()
    pair.core.seek(EU, lines.EARLIEST, time.monotonic())
    pair.core.fetch(time.monotonic(), 5)
    assert pair.core.requests.take().splitlines() == [b"!seek orders/0 earliest", b"!fetch 1048576 orders/1"]


def test_a_refused_seek_is_raised_and_the_position_stays(pair):
    pair.peer.refuses["seek"] = "bad_request there is no such time"
    pair.core.seek(EU, lines.Position("time", 1), time.monotonic())
    pair.pass_on()
    assert pair.core.errors.popleft().code == "bad_request"
    assert sorted(pair.read_all()) == in_order(5, 0) + in_order(3, 1)


def test_a_refused_seek_leaves_the_later_one_alone(pair):
    pair.peer.refuses["seek"] = "out_of_range orders/0 has 0 to 5"
    pair.core.seek(EU, lines.Position("offset", 99), time.monotonic())
    pair.core.seek(EU, lines.EARLIEST, time.monotonic())
    pair.core.fetch(time.monotonic(), 1)
    requests = pair.core.requests.take().splitlines()
    pair.receive(b"!err seek out_of_range orders/0 has 0 to 5\n")
    pair.core.fetch(time.monotonic() + 1, 1)
    assert b"!seek orders/0 99" not in pair.core.requests.take()
    assert requests[:2] == [b"!seek orders/0 99", b"!seek orders/0 earliest"]


def test_a_fetch_that_is_refused_for_now_comes_again_later_and_others_are_raised(pair):
    pair.peer.refuses["fetch"] = "too_many 512 are sent records"
    pair.fetch()
    assert not pair.core.errors
    pair.core.fetch(time.monotonic(), 1)
    assert pair.core.requests.take() == b""
    pair.core.fetch(time.monotonic() + 1, 1)
    assert pair.core.requests.take() != b""
    pair.receive(b"!err fetch damaged the block at byte 7\n")
    assert pair.core.errors.popleft().code == "damaged"


# --- rebalances ------------------------------------------------------------------------------------------------------


def test_a_revoked_partition_gives_nothing_more_and_the_others_go_on(pair):
    pair.fetch()
    pair.fetch(0)
    pair.receive(pair.session.rebalance([EU]))
    assert pair.events() == [(Kind.ASSIGNED, (EU, US)), (Kind.REVOKED, (US,))]
    assert pair.read_all() == in_order(5, 0)
    assert US in pair.core.holdings.owned


def test_a_commit_goes_before_the_revocation_is_answered(pair):
    pair.read_all()
    pair.receive(pair.session.rebalance([EU]))
    event = pair.core.holdings.events.pop()
    assert pair.commit(us=3).error is None
    pair.core.revoked(event, time.monotonic())
    pair.pass_on()
    assert pair.peer.committed == {US: 3} and list(pair.core.holdings.owned) == [EU]
    assert pair.commit(us=3).error.code == "fenced"


def test_what_a_rebalance_leaves_here_goes_on_without_a_seek_or_a_second_record(pair):
    first = pair.read_all()
    pair.receive(pair.session.rebalance([EU, US]))
    pair.peer.records[EU].append(b"new")
    assert pair.read_all() == [(0, 5)] and len(first) == 8
    assert not [asked for asked in pair.peer.asked if isinstance(asked, lines.Seek)]


def test_a_new_partition_begins_where_the_group_is():
    pair = Pair(Peer({EU: 5, US: 3}))
    pair.peer.shares[pair.core.member] = [EU]
    pair.connect()
    pair.peer.committed[US] = 2
    pair.receive(pair.session.rebalance([EU, US]))
    assert pair.events() == [(Kind.ASSIGNED, (EU,)), (Kind.ASSIGNED, (US,))]
    assert (1, 2) in pair.read_all() and pair.core.holdings.owned[US].position == 3


def test_a_partition_that_is_gone_without_a_word_is_lost(pair):
    pair.receive(b"!assign 7 orders/0@0\n")
    assert pair.events()[-1] == (Kind.LOST, (US,)) and pair.core.generation == 7


def test_start_counts_only_where_the_group_has_committed_nothing():
    pair = Pair(Peer({EU: 5, US: 3}), start="latest")
    pair.peer.committed[US] = 1
    pair.connect().pass_on()
    assert pair.read_all() == [(1, 1), (1, 2)]
    assert pair.core.holdings.owned[EU].position == 5


def test_a_batch_that_comes_before_a_new_partitions_start_is_known_comes_again():
    """The broker answers a fetch that was on its way with records of the partition that has just come."""
    pair = Pair(Peer({EU: 0, US: 3}), start="latest")
    pair.peer.shares[pair.core.member] = [EU]
    pair.connect().pass_on()
    pair.core.fetch(time.monotonic(), 1.0)
    on_its_way = pair.core.requests.take()
    pair.peer.committed[US] = 1
    pair.receive(pair.session.rebalance([EU, US]))
    pair.receive(pair.session.feed(on_its_way))
    assert pair.read_all() == [(1, 1), (1, 2)]


def revoke(pair, *places):
    """The broker asks for partitions back: from now on it refuses requests that name them."""
    for place in places:
        del pair.session.next[place]
    pair.receive(b"!revoke " + b" ".join(str(place).encode() for place in places) + b"\n")


@pytest.mark.parametrize("start", ["latest", "4"])
def test_a_start_that_crosses_with_a_revocation_is_asked_for_again(start):
    """The broker refuses the question for all partitions, because one of them is not the member's any more."""
    pair = Pair(Peer({EU: 5, US: 3}), start=start)
    pair.connect()
    asked = pair.core.requests.take()
    assert asked == b"!offsets orders/0 orders/1\n"
    revoke(pair, US)
    pair.receive(b"!err offsets unknown_partition orders/1 is not assigned to this connection\n")
    assert pair.read_all() == ([] if start == "latest" else [(0, 4)])
    assert pair.core.holdings.owned[EU].position == 5 and not pair.core.errors


def test_a_start_that_no_answer_came_for_is_asked_for_on_the_next_connection():
    pair = Pair(Peer({EU: 5, US: 3}), start="latest").connect()
    pair.core.requests.take()
    pair.core.lost("gateway restarted")
    pair.connect().pass_on()
    assert pair.read_all() == []


def test_a_start_that_is_refused_is_raised_and_nothing_is_read_from_elsewhere():
    pair = Pair(Peer({EU: 5, US: 3}), start="latest")
    pair.peer.refuses["offsets"] = "internal the disk does not answer"
    pair.connect().pass_on()
    assert pair.core.errors.pop().code == "internal"
    assert pair.read_all() == [], "asked for again, and answered"
    assert pair.core.holdings.owned[EU].position == 5


def test_a_request_that_crosses_with_a_revocation_is_no_error(pair):
    pair.core.holdings.pause([EU])
    pair.core.fetch(time.monotonic(), 1.0)
    pair.core.seek(US, lines.Position("offset", 1), time.monotonic())
    assert pair.core.requests.take() == b"!fetch 1048576 wait=1000 orders/1\n!seek orders/1 1\n"
    revoke(pair, US)
    for request in (b"fetch", b"seek"):
        pair.receive(b"!err %b unknown_partition orders/1 is not assigned to this connection\n" % request)
    pair.core.holdings.resume([EU])
    assert pair.read_all() == in_order(5, 0) and not pair.core.errors


# --- outages ---------------------------------------------------------------------------------------------------------


def test_an_outage_within_the_session_goes_on_where_the_application_is(pair):
    pair.fetch()
    before = pair.collect(2)
    pair.events()
    pair.core.lost("gateway restarted")
    assert pair.core.phase is Phase.AWAY and pair.collect() == []
    pair.connect()
    assert pair.peer.members == [pair.core.member] * 2
    assert sorted(before + pair.read_all()) == in_order(5, 0) + in_order(3, 1)
    assert pair.events() == []


def test_after_a_longer_outage_the_group_says_where_to_go_on(pair):
    pair.read_all()
    pair.events()
    pair.peer.committed[EU] = 4
    pair.core.lost("gateway restarted")
    pair.core.expires_at -= pair.core.options.session_s
    pair.connect()
    assert pair.events() == [(Kind.LOST, (EU, US)), (Kind.ASSIGNED, (EU, US))]
    assert sorted(pair.read_all()) == [(0, 4), *in_order(3, 1)]


def test_attempts_that_end_before_an_assignment_do_not_make_an_outage_shorter(pair):
    pair.read_all()
    pair.events()
    pair.peer.committed[EU] = 4
    pair.core.lost("gateway killed")
    pair.core.expires_at -= pair.core.options.session_s
    pair.core.connected()
    pair.core.lost("not_ready the gateway has not read the committed offsets yet")
    pair.connect()
    assert pair.events() == [(Kind.LOST, (EU, US)), (Kind.ASSIGNED, (EU, US))]


def test_a_program_that_was_stopped_for_a_session_does_not_go_on_where_it_was(pair):
    """It finds its connection broken only when it runs again, and may write to it before it notices."""
    pair.read_all()
    pair.events()
    pair.peer.committed[EU] = 4
    pair.core.requests.written_at -= pair.core.options.session_s
    pair.core.beat(time.monotonic())
    pair.core.lost("the broker closed the connection")
    pair.connect()
    assert pair.events() == [(Kind.LOST, (EU, US)), (Kind.ASSIGNED, (EU, US))]
    assert sorted(pair.read_all()) == [(0, 4), *in_order(3, 1)]


def test_a_commit_without_an_answer_is_not_sent_again_for_what_another_member_may_have_read(pair):
    pending = pair.core.commit([(EU, 3)], time.monotonic())
    pair.core.requests.take()
    pair.core.lost("gateway killed")
    pair.core.expires_at -= pair.core.options.session_s
    pair.peer.committed[EU] = 5
    pair.connect().pass_on()
    assert isinstance(pending.error, Fenced) and pair.peer.committed == {EU: 5}
    pair.core.commit([(EU, 5)], time.monotonic())
    pair.pass_on()
    assert pair.peer.committed == {EU: 5}


@pytest.mark.parametrize("others", [5, 0], ids=["another member has read on", "an operator has set it back"])
def test_after_any_outage_the_groups_offset_counts_unless_it_is_this_members_own_commit(pair, others):
    """Else what another member has committed is read again and goes back, and what an operator has set is overridden."""
    pair.read_all()
    pair.commit(eu=3, us=2)
    pending = pair.core.commit([(EU, 4)], time.monotonic())  # not answered, and not stored
    pair.core.requests.take()
    pair.events()
    pair.core.lost("gateway killed")
    pair.peer.committed[EU] = others
    pair.connect()
    assert pair.events() == [(Kind.LOST, (EU,)), (Kind.ASSIGNED, (EU,))]
    pair.pass_on()
    assert isinstance(pending.error, Fenced) and pair.peer.committed == {EU: others, US: 2}
    assert pair.read_all() == in_order(5, 0)[others:], "and nothing again of what was its own"


def test_a_commit_without_an_answer_is_not_sent_again_for_a_partition_that_comes_only_later(pair):
    """It would be acknowledged although the member begins there where the group was before it, and goes back."""
    pair.read_all()
    pending = pair.core.commit([(EU, 4), (US, 1)], time.monotonic())
    pair.core.requests.take()
    pair.core.lost("gateway killed")
    pair.peer.shares[pair.core.member] = [US]
    pair.connect()
    pair.receive(pair.session.rebalance([EU, US]))
    pair.pass_on()
    assert isinstance(pending.error, Fenced) and not pair.peer.committed.get(EU)
    assert sorted(place for place, _ in pair.read_all()) == [0] * 5, "from where the group is"


def test_after_an_outage_a_commit_that_was_stored_without_an_answer_is_this_members_own(pair):
    pair.read_all()
    pending = [pair.core.commit([(EU, at)], time.monotonic()) for at in (2, 4)]
    pair.core.requests.take()
    pair.events()
    pair.core.lost("gateway killed")
    pair.peer.committed[EU] = 2
    pair.connect().pass_on()
    assert pair.events() == [] and all(each.done and each.error is None for each in pending)
    assert pair.peer.committed == {EU: 4} and pair.read_all() == []


def test_the_start_is_committed_before_a_message_is_given_out():
    """Else the heir of a member that dies begins at its own `latest`, and what came meanwhile is skipped."""
    pair = Pair(Peer({EU: 5, US: 3}), start="latest").connect()
    pair.pass_on()
    assert pair.peer.committed == {EU: 5, US: 3}
    pair.peer.records[EU].append(b"new")
    assert pair.read_all() == [(0, 5)]
    heir = Pair(pair.peer, start="latest", member="heir").connect()
    heir.pass_on()
    assert heir.read_all() == [(0, 5)]


def test_a_start_that_could_not_be_committed_is_looked_for_again():
    pair = Pair(Peer({EU: 5, US: 3}), start="latest")
    pair.peer.refuses["commit"] = "disk_full no room"
    pair.connect().pass_on()
    pair.core.fetch(time.monotonic(), 1.0)
    assert pair.peer.committed == {} and pair.core.requests.take() == b"", "nothing is read, and it waits a moment"
    pair.core.fetch_from = 0.0
    pair.fetch()
    assert pair.peer.committed == {EU: 5, US: 3}


@pytest.mark.parametrize("to", ["earliest", "2"])
def test_the_application_may_seek_before_the_start_is_known(to):
    pair = Pair(Peer({EU: 5, US: 3}), start="latest").connect()
    pair.core.seek(EU, lines.position_of(to), time.monotonic())
    pair.pass_on()
    assert pair.read_all() == in_order(5, 0)[2 if to == "2" else 0 :]


def test_start_latest_skips_nothing_after_an_outage():
    pair = Pair(Peer({EU: 5, US: 3}), start="latest").connect()
    pair.pass_on()
    assert pair.read_all() == []
    pair.core.lost("gateway restarted")
    pair.core.expires_at -= pair.core.options.session_s
    pair.peer.records[EU].append(b"meanwhile")
    pair.connect().pass_on()
    assert pair.read_all() == [(0, 5)]


def test_a_commit_without_an_answer_is_sent_again(pair):
    pending = pair.core.commit([(EU, 3)], time.monotonic())
    pair.core.requests.take()
    pair.core.lost("gateway killed")
    assert not pending.done
    pair.connect().pass_on()
    assert pending.done and pending.error is None and pair.peer.committed == {EU: 3}


def test_a_thousand_commits_without_an_answer_are_a_few_requests_and_the_last_one_counts(pair):
    pendings = [pair.core.commit([(EU, n), (US, n // 400)], time.monotonic()) for n in range(1000)]
    written = pair.core.requests.take()
    assert written.count(b"!commit") < 20
    pair.receive(pair.session.feed(written))
    pair.pass_on()
    assert all(pending.done and pending.error is None for pending in pendings)
    assert pair.peer.committed == {EU: 999, US: 2}


def many(count: int) -> list[TopicPartition]:
    return [TopicPartition("t" * 190 + str(n // 1000), n % 1000) for n in range(count)]


def longest_line(data: bytes) -> int:
    return max(len(line) + 1 for line in data.split(b"\n"))


@pytest.mark.parametrize(("session_s", "wait_ms"), [(30, 27_000), (6, 5400)])
def test_an_idle_member_asks_once_a_session_whatever_the_application_waits_and_beats_meanwhile(session_s, wait_ms):
    pair = Pair(Peer({EU: 0, US: 0}), session_s=session_s).connect()
    now = time.monotonic()
    pair.core.fetch(now, 0.1)
    assert pair.core.requests.take() == lines.Fetch(pair.core.options.fetch_max_bytes, wait_ms).encode()
    for second in range(1, int(0.9 * session_s)):
        pair.core.fetch(now + second, 0.1)
        pair.core.beat(now + second)
    assert pair.core.requests.take().splitlines() == [b"!beat"] * 2


def test_a_fetch_that_leaves_paused_partitions_out_waits_no_longer_than_the_application(pair):
    """They are asked for with the next one, as soon as they are resumed."""
    pair.read_all()
    pair.core.holdings.pause([EU])
    pair.core.fetch(time.monotonic(), 0.1)
    assert pair.core.requests.take() == b"!fetch 1048576 wait=100 orders/1\n"


def test_a_member_of_2000_partitions_writes_no_line_that_the_broker_refuses():
    places = many(2000)
    pair = Pair(Peer(dict.fromkeys(places, 1)), start="latest").connect()
    core = pair.core
    pending = core.commit([(place, 1) for place in places], time.monotonic())
    offsets = core.offsets(tuple(places), time.monotonic())
    written = core.requests.take()
    assert len(written) > 6 * MAX_REQUEST and longest_line(written) <= MAX_REQUEST
    pair.receive(pair.session.feed(written))
    assert pending.done and pending.error is None and pair.peer.committed == dict.fromkeys(places, 1)
    assert [row.place for row in offsets.value] == places


@pytest.mark.parametrize("count", [1, 300, 2000])
def test_an_opening_is_given_in_as_many_lines_as_it_needs(count):
    places = many(count)
    alone = ConsumerCore(ConsumerOptions(group_id="g", member="m", token="t"))
    alone.choose((), [(place, lines.EARLIEST) for place in places])
    member = ConsumerCore(ConsumerOptions(group_id="g", member="m", token="t"))
    member.choose(tuple(f"{place.topic}{place.partition}"[-200:] for place in places))
    for core, least in ((alone, count * 200), (member, count * 190)):
        written = core.opening()
        assert len(written) > least and longest_line(written) <= MAX_REQUEST
        first, *rest = written.splitlines()
        assert len(rest) >= least // MAX_REQUEST
        asked = lines.opening(first)
        for line in rest:
            assert asked.more
            asked = lines.further(asked, line)
        assert not asked.more and asked.token == "t"
    assert asked.topics == member.topics


def test_a_broker_that_is_too_old_for_an_opening_in_several_lines_is_named(pair):
    with pytest.raises(Refused):
        pair.receive(b"!err bad_request 'more': unknown option; expected one of token=\n")
    assert "the broker is too old for so many names" in str(pair.core.failed)


def test_a_broker_that_is_too_old_to_know_attempts_is_not_told_of_them(pair):
    pair.core.lost("cut")
    asked = lines.opening(pair.core.opening())
    assert asked.attempt.number == 2
    pair.core.connected()
    with pytest.raises(Refused):
        pair.receive(
            b"!err bad_request 'attempt=%b': unknown option; expected one of member=\n" % str(asked.attempt).encode()
        )
    pair.core.lost("refused")
    asked = lines.opening(pair.core.opening())
    assert pair.core.failed is None and asked.attempt is None and asked.says_hand_outs
    pair.core.connected()
    with pytest.raises(Refused):
        pair.receive(b"!err bad_request 'given=said': unknown option; expected one of member=\n")
    pair.core.lost("refused")
    asked = lines.opening(pair.core.opening())
    assert pair.core.failed is None and not asked.says_hand_outs and asked.hears_overtaken
    pair.core.connected()
    with pytest.raises(Refused):
        pair.receive(b"!err bad_request 'overtaken=said': unknown option; expected one of member=\n")
    pair.core.lost("refused")
    assert pair.core.failed is None and not lines.opening(pair.core.opening()).hears_overtaken
    assert sorted(pair.connect().read_all()) == in_order(5, 0) + in_order(3, 1)


def test_the_largest_assignment_that_a_group_may_have_is_taken():
    places = [TopicPartition("t" * 190 + f"{n // 1000:010}", n % 1000) for n in range(GroupLimits().partitions)]
    peer = Peer(dict.fromkeys(places, 0))
    peer.committed = dict.fromkeys(places, 0)
    pair = Pair(peer).connect()
    assert pair.core.phase is Phase.READING and list(pair.core.holdings.owned) == places


def test_a_commit_in_several_lines_fails_if_one_of_them_is_refused():
    places = many(1000)
    pair = Pair(Peer(dict.fromkeys(places, 1))).connect()
    pair.peer.refuses["commit"] = "disk_full no room"
    pending = pair.core.commit([(place, 1) for place in places], time.monotonic())
    pair.pass_on()
    assert pending.done and isinstance(pending.error, Refused) and pending.error.code == "disk_full"
    assert len(pair.peer.committed) >= 500  # what the other lines have asked for is committed


def test_all_partitions_are_read_when_too_many_for_one_fetch_are_not_paused():
    places = many(600)
    pair = Pair(Peer(dict.fromkeys(places, 1))).connect()
    pair.core.holdings.owned[places[0]].paused = True
    seen: set[tuple[str, int]] = set()
    wanted = {(place.topic, place.partition) for place in places[1:]}
    fetches = 0
    while seen != wanted:
        fetches += 1
        assert fetches <= 2000, f"not read: {len(wanted - seen)} partitions"
        pair.core.fetch(time.monotonic(), 1.0)
        written = pair.core.requests.take()
        assert longest_line(written) <= MAX_REQUEST
        pair.receive(pair.session.feed(written))
        seen |= {(message.topic, message.partition) for message in pair.core.holdings.collect(10)}
    pair.core.fetch(time.monotonic(), 1.0)
    pair.receive(pair.session.feed(pair.core.requests.take()))
    assert not pair.core.holdings.collect(10)  # nothing of the one that is paused


def test_offsets_without_an_answer_are_an_error(pair):
    pending = pair.core.offsets((EU,), time.monotonic())
    pair.core.lost("gateway killed")
    assert pending.done and isinstance(pending.error, NotAnswered)


def test_a_revocation_of_a_broken_connection_is_not_answered_on_the_next(pair):
    pair.receive(pair.session.rebalance([EU]))
    event = pair.core.holdings.events.pop()
    pair.core.lost("gateway restarted")
    pair.connect()
    pair.core.revoked(event, time.monotonic())
    assert pair.core.requests.take() == b"" and list(pair.core.holdings.owned) == [EU, US]


def test_a_silent_broker_is_noticed(pair):
    now = time.monotonic()
    pair.core.fetch(now, 2.0)
    assert pair.core.overdue(now + 56) == "" and "no answer" in pair.core.overdue(now + 58)
    pair.pass_on()
    pair.core.commit([(EU, 1)], now)
    assert pair.core.overdue(now + 29) == "" and "no answer" in pair.core.overdue(now + 31)


@pytest.mark.parametrize("code", ["session_timeout", "poll_timeout", "rebalance_timeout"])
def test_a_member_that_was_ended_joins_again(pair, code):
    with pytest.raises(Refused, match=code):
        pair.receive(f"!err {code} you were away\n".encode())
    assert pair.core.failed is None
    assert pair.events()[-1] == (Kind.LOST, (EU, US))


def test_a_member_joins_again_after_an_error_that_it_cannot_place(pair):
    """A gateway of another version answered so to `!revoked` in an ordinary rebalance, and the consumer had failed for good."""
    with pytest.raises(Refused, match="word"):
        pair.receive(b"!err word fenced generation 1 is not in force\n")
    pair.core.lost("word")
    assert pair.core.failed is None
    pair.connect()
    assert sorted(pair.read_all()) == in_order(5, 0) + in_order(3, 1)


def test_a_fenced_member_has_ended_and_its_commits_with_it(pair):
    pending = pair.core.commit([(EU, 1)], time.monotonic())
    with pytest.raises(Fenced):
        pair.receive(b"!err fenced another member has this name\n")
    assert isinstance(pair.core.failed, Fenced) and pending.error is pair.core.failed


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\n",
        b"!committed orders/0 1\n",
        b"!seek orders/0@1\n",
        b"!batch orders/0 0 2 2\nx\n",
        b"!ok orders/0 offset=0\n",
        b"x" * (lines.MAX_REPLY + 1),
    ],
)
def test_what_is_no_reply_ends_the_connection(pair, data):
    with pytest.raises(Refused, match="protocol"):
        pair.receive(data)
    assert pair.core.failed is None


# --- without a group's management ------------------------------------------------------------------------------------


def test_assigned_partitions_begin_where_asked_and_go_on_after_an_outage():
    pair = Pair(Peer({EU: 5, US: 3}), topics=(), group_id="")
    pair.core.choose((), [(EU, lines.Position("offset", 3)), (US, lines.LATEST)])
    assert pair.core.opening("s3cret") == b"ASSIGN orders/0@3 orders/1@latest token=s3cret\n"
    pair.connect()
    pair.fetch()
    assert pair.collect(1) == [(0, 3)]
    pair.core.lost("gateway restarted")
    pair.core.expires_at -= 1e6
    assert pair.core.opening() == b"ASSIGN orders/0@4 orders/1@3\n"
    pair.connect()
    assert pair.read_all() == [(0, 4)]


@pytest.mark.parametrize(
    "options",
    [
        {"group_id": "a/b"},
        {"member": "x" * 201},
        {"assignor": "best"},
        {"auto_commit": True},
        {"max_poll_records": 0},
        {"session_s": 0},
        {"start": "yesterday"},
        {"start": -1},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        ConsumerOptions(**options)


# --- whole histories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_history_of_outages_seeks_and_rebalances_skips_nothing(seed):
    """The application takes, commits, seeks and pauses at random. It keeps its own account of what must come next."""
    rng = random.Random(seed)
    pair = Pair(Peer({EU: 60, US: 60}), fetch_max_bytes=rng.choice([60, 300, 5000]))
    pair.cut = lambda data: [data[at : at + 50] for at in range(0, len(data), 50)] if rng.random() < 0.3 else [data]
    pair.connect()
    expected = {EU: 0, US: 0}  # the application's account

    def take(count: int) -> None:
        for message in pair.core.holdings.collect(count):
            place = lines.TopicPartition(message.topic, message.partition)
            assert message.offset == expected[place], f"{place}: {message.offset} instead of {expected[place]}"
            assert message.value == b"%d" % message.offset
            expected[place] += 1

    def hear() -> None:
        while pair.core.holdings.events:
            event = pair.core.holdings.events.popleft()
            if event.kind is Kind.REVOKED:
                pair.commit(**{name: expected[p] for name, p in (("eu", EU), ("us", US)) if p in event.places})
                pair.core.revoked(event, time.monotonic())
                pair.pass_on()
            elif event.kind is Kind.ASSIGNED:
                expected.update({place: pair.core.holdings.owned[place].position for place in event.places})

    for _ in range(60):
        act = rng.random()
        hear()
        place = rng.choice([EU, US])
        owned = pair.core.holdings.owned.get(place)
        if act < 0.4:
            pair.core.fetch(time.monotonic(), rng.choice([0, 1]))
            if rng.random() < 0.8:
                pair.pass_on()
        elif act < 0.7:
            take(rng.randrange(1, 20))
        elif act < 0.76:
            pair.core.lost("broken")
            pair.connect()
        elif act < 0.84 and owned and not owned.revoked:
            expected[place] = rng.randrange(60)
            pair.core.seek(place, lines.Position("offset", expected[place]), time.monotonic())
        elif act < 0.9 and owned:
            pair.core.holdings.pause([place])
            pair.core.holdings.resume([place])
        elif act < 0.95 and owned and not owned.revoked:
            pair.pass_on()
            pair.commit(**{"eu" if place == EU else "us": expected[place]})
        else:
            pair.pass_on()
            hear()
            pair.receive(pair.session.rebalance(rng.choice([[EU], [US], [EU, US]])))
            hear()
    hear()
    pair.receive(pair.session.rebalance([EU, US]))
    hear()
    for _ in range(200):
        pair.fetch()
        take(1000)
    assert expected == {EU: 60, US: 60}
