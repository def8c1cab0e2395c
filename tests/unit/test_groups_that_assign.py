"""Groups of kind `kafka`: one of the members assigns, and the coordinator keeps bytes that it does not understand."""

import pytest

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups.coordinator import Coordinator
from kmq.gateway.groups.protocol import Assigned, Client, Ended, GroupLimits, HandedOut, MemberOptions, Opaque, State

ME = Client("test", "127.0.0.1")
TYPE = "connect"


class Stage:
    """A group `g`, and a clock that the test moves."""

    def __init__(self, **limits):
        self.coordinator, self.now = Coordinator(GroupLimits(**limits), "x"), 1000.0
        self.coordinator.topics_changed({"t": 4}, self.now)

    def join(self, member=None, group="g", protocol_type=TYPE, static_name=None, session_s=30.0, **metadata):
        opaque = Opaque(protocol_type, metadata or {"eager": b"meta"})
        options = MemberOptions(
            *((), tuple(opaque.metadata), session_s),
            rebalance_s=10.0,
            static_name=static_name,
            opaque=opaque,
            is_kafka=True,
        )
        return self.coordinator.join(group, member, ME, options, self.now)

    def join_kmq(self, *topics, member=None):
        return self.coordinator.join("g", member, ME, MemberOptions(topics), self.now)

    def forward(self, seconds=0.1):
        """Let time go by; returns the events."""
        end, events = self.now + seconds, []
        while self.now < end:
            self.now = min(end, self.now + 0.05)
            while self.coordinator.tick(self.now) <= self.now:
                pass
            events += self.coordinator.take_events()
        return events

    def rejoin(self, *members, **metadata):
        """Each joins again, and gives up its seat when it is asked to; returns the events."""
        for member in members:
            self.join(member, **metadata)
        events = self.forward()
        for member in members:
            self.coordinator.revoked("g", member, None, self.now)
        return events + self.forward()

    def sync(self, member, **assignments):
        generation = self.of(member).generation
        self.coordinator.sync("g", member, generation, self.now)
        self.coordinator.hand_out("g", member, generation, assignments, self.now) if assignments else None
        return self.of(member).handed_out

    def of(self, member):
        return self.coordinator.assignment("g", member)

    @property
    def state(self):
        return self.coordinator.state("g")


@pytest.fixture
def stage():
    return Stage()


def refusal(call, *arguments, **more):
    with pytest.raises(RequestRefused) as refused:
        call(*arguments, **more)
    return refused.value.code


def pair(stage):
    """Two members, told what to do by the first."""
    first = stage.join()
    stage.forward()
    second = stage.join()
    stage.forward()
    stage.rejoin(first)
    stage.coordinator.sync("g", second, None, stage.now)
    stage.coordinator.hand_out("g", first, stage.of(first).generation, {first: b"1", second: b"2"})
    stage.coordinator.sync("g", first, None, stage.now)
    assert stage.state is State.STABLE
    stage.coordinator.take_events()
    return first, second


def test_the_member_that_has_been_there_longest_leads_and_its_bytes_reach_the_others(stage):
    first, _ = pair(stage)
    view = stage.coordinator.describe("g")
    assert (view.leader, view.protocol_type, view.protocol) == (first, TYPE, "eager")
    assert [(row.opaque.metadata, row.handed_out, row.partitions, row.revoking) for row in view.members] == [
        ({"eager": b"meta"}, b"1", (), ()),
        ({"eager": b"meta"}, b"2", (), ()),
    ]
    assert stage.coordinator.read_by("g") == (2, ())


def test_nobody_is_of_a_new_generation_before_all_have_joined_again(stage):
    first, second = pair(stage)
    generation = stage.of(first).generation
    third = stage.join()
    stage.forward()
    assert all(stage.of(member).revoking and stage.of(member).is_due for member in (first, second))
    stage.rejoin(first)
    assert stage.of(third).is_due and stage.state is State.PREPARING
    stage.rejoin(second)
    assert {stage.of(member).generation for member in (first, second, third)} == {generation + 2}
    assert not any(stage.of(member).is_due for member in (first, second, third))
    assert stage.of(second).handed_out is None, "what it was told before is over"


def test_who_does_not_join_again_is_ended_and_the_others_go_on(stage):
    first, second = pair(stage)
    third = stage.join()
    stage.forward()
    stage.rejoin(second, third)
    events = stage.forward(10.1)
    assert Ended("g", first, "rebalance_timeout") in events
    assert stage.coordinator.describe("g").leader == second and not stage.of(second).is_due


def test_a_leader_that_does_not_assign_is_ended(stage):
    first, second = pair(stage)
    stage.rejoin(first, second)
    stage.coordinator.sync("g", second, None, stage.now)
    events = []
    for _ in range(11):  # it gives signs of life, which are no assignment
        if not events:
            stage.coordinator.beat("g", first, None, stage.now)
        events += stage.forward(1.0)
    assert Ended("g", first, "rebalance_timeout") in events
    assert stage.of(second).changed > 0 and stage.coordinator.describe("g").leader == second


def test_only_the_leader_assigns_and_only_in_the_newest_generation(stage):
    first, second = pair(stage)
    generation = stage.of(first).generation
    stage.coordinator.hand_out("g", second, generation, {first: b"mine"})
    assert stage.of(first).handed_out == b"1" and not stage.coordinator.take_events()
    assert refusal(stage.coordinator.hand_out, "g", first, generation + 1, {}) == "fenced"
    stage.join()
    stage.coordinator.hand_out("g", first, generation, {first: b"late"})
    assert stage.of(first).handed_out == b"1", "somebody has joined whom it does not know"
    assert refusal(stage.coordinator.hand_out, "g", "nobody", generation, {}) == "unknown_member"


def test_what_is_handed_out_is_said_to_each_member(stage):
    first, second = pair(stage)
    stage.rejoin(first, second)
    generation = stage.of(first).generation
    stage.coordinator.hand_out("g", first, generation, {second: b"all"})
    events = stage.coordinator.take_events()
    assert events == [HandedOut("g", first, generation), HandedOut("g", second, generation)]
    assert (stage.of(first).handed_out, stage.of(second).handed_out) == (b"", b"all")


def test_a_leader_that_joins_again_rebalances_and_a_follower_only_with_other_metadata(stage):
    first, second = pair(stage)
    stage.join(second)
    assert not stage.forward() and not stage.of(second).is_due
    stage.join(first)
    assert any(isinstance(event, Assigned) for event in stage.forward())
    stage.rejoin(first, second)
    stage.coordinator.sync("g", second, None, stage.now)
    stage.coordinator.hand_out("g", first, stage.of(first).generation, {first: b"1"})
    stage.coordinator.sync("g", first, None, stage.now)
    assert stage.state is State.STABLE
    stage.join(second, eager=b"other")
    assert stage.of(first).is_due


def test_a_static_member_that_starts_again_is_told_what_its_former_self_was(stage):
    first = stage.join(static_name="w1")
    stage.forward()
    second = stage.join(static_name="w2")
    stage.forward()
    stage.rejoin(first)
    stage.coordinator.sync("g", second, None, stage.now)
    stage.coordinator.hand_out("g", first, stage.of(first).generation, {first: b"1", second: b"2"})
    stage.coordinator.sync("g", first, None, stage.now)
    known = stage.of(first).changed
    again = stage.join(static_name="w2")
    stage.forward()
    assert stage.of(again).handed_out == b"2" and stage.of(first).changed == known, "nobody else hears of it"
    stage.coordinator.sync("g", again, None, stage.now)
    stage.coordinator.check_commit("g", first, known, [("t", 0)], stage.now)
    other = stage.join(static_name="w2", eager=b"other")
    stage.forward()
    assert stage.of(first).revoking and stage.of(other).is_due, "it says something else than before"


def test_a_static_member_that_is_replaced_before_the_leader_assigns_is_assigned_anew(stage):
    first = stage.join(static_name="w1")
    stage.join(static_name="w2")
    stage.forward()
    again = stage.join(static_name="w2")
    stage.forward()
    assert stage.of(first).revoking and stage.of(again).is_due


def test_members_vote_on_the_protocol(stage):
    first = stage.join(eager=b"e", compatible=b"c", sessioned=b"s")
    stage.forward()
    stage.join(compatible=b"c", sessioned=b"s")
    stage.forward()
    stage.rejoin(first, eager=b"e", compatible=b"c", sessioned=b"s")
    assert stage.of(first).protocol == "compatible"
    assert refusal(stage.join, eager=b"e") == "assignor_differs"


def test_cooperative_sticky_is_a_name_like_any_other(stage):
    first = stage.join(**{"cooperative-sticky": b""})
    stage.forward()
    stage.join(**{"cooperative-sticky": b""})
    stage.forward()
    assert stage.of(first).revoking and stage.of(first).is_due


def test_a_group_is_of_one_kind_and_one_type_while_it_has_members(stage):
    first = stage.join()
    assert refusal(stage.join_kmq, "t") == refusal(stage.join, protocol_type="sr") == "group_kind"
    stage.coordinator.leave("g", first, stage.now)
    second = stage.join_kmq("t")
    stage.forward()
    assert refusal(stage.join) == "group_kind" and len(stage.of(second).partitions) == 4
    assert stage.coordinator.protocol_type("g") == ""


def test_a_partition_may_be_any_members_where_one_of_them_assigns(stage):
    assert not stage.coordinator.is_read_by_kafka("g", ("t", 0)), "no group yet"
    first = stage.join()
    assert stage.coordinator.is_read_by_kafka("g", ("t", 0))
    stage.coordinator.leave("g", first, stage.now)
    assert not stage.coordinator.is_read_by_kafka("g", ("t", 0))
    stage.join_kmq("t")
    stage.forward()
    assert not stage.coordinator.is_read_by_kafka("g", ("t", 0))


def test_the_only_member_may_change_the_kind(stage):
    first = stage.join()
    stage.forward()
    stage.join_kmq("t", member=first)
    stage.forward()
    assert len(stage.of(first).partitions) == 4 and stage.of(first).leader is None
    stage.join(first)
    stage.forward()
    assert stage.of(first).partitions == () and stage.of(first).leader == first and not stage.of(first).is_due
    assert stage.coordinator.subscribers("t") == []


def test_commits_are_fenced_by_generation_and_member(stage):
    first, second = pair(stage)
    check, generation = stage.coordinator.check_commit, stage.of(first).generation
    check("g", first, generation, [("t", 0)], stage.now)
    check("g", second, generation, [("t", 0)], stage.now)  # only the leader knows whose it is
    assert refusal(check, "g", first, generation - 1, [("t", 0)], stage.now) == "fenced"
    assert refusal(check, "g", None, None, [("t", 0)], stage.now) == "unknown_member"
    assert refusal(check, "g", first, generation, [("t", 4)], stage.now) == "unknown_partition"


def test_what_members_say_has_bounds():
    stage = Stage(opaque=40, all_opaque=60)
    first = stage.join(a=b"x" * 20)
    assert refusal(stage.join, a=b"x" * 40) == "subscription_too_large"
    assert refusal(stage.join, **{f"p{n}": b"" for n in range(17)}) == "subscription_too_large"
    assert refusal(stage.join, a=b"", group="h", **{"a b": b""}) == "bad_name"
    second = stage.join(a=b"x" * 20)
    assert refusal(stage.join, group="h", a=b"x" * 20) == "subscription_too_large", "of all members"
    stage.forward()
    generation = stage.of(first).generation
    assert refusal(stage.coordinator.hand_out, "g", first, generation, {second: b"x" * 41}) == "subscription_too_large"
    assert refusal(stage.coordinator.hand_out, "g", first, generation, {second: b"x" * 10}) == "subscription_too_large"
    stage.coordinator.hand_out("g", first, generation, {second: b"x" * 2})
    stage.coordinator.leave("g", second, stage.now)
    stage.coordinator.leave("g", first, stage.now)
    stage.join(group="h", a=b"x" * 30)  # what has left counts no more
