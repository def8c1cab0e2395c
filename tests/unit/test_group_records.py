"""The record of a group's members: a coordinator that takes it goes on as the one before, without a rebalance."""

import pytest

from kmq.gateway.core.broker import RequestRefused
from kmq.gateway.groups import group_records
from kmq.gateway.groups.coordinator import GENERATIONS, UNSEEN, Coordinator
from kmq.gateway.groups.protocol import Assigned, Client, MemberOptions, Opaque, Resume, State

NOW = 1000.0
ME = Client("etl", "10.0.0.7")
TOPICS = {"orders": 4}


def led(starts):
    coordinator = Coordinator(starts=starts)
    coordinator.topics_changed(TOPICS, NOW)
    return coordinator


def stable(coordinator, *members, **options):
    """Let these join and answer; return the payload that was written last."""
    for member in members:
        coordinator.join("g", member, ME, MemberOptions(("orders",), **options), NOW)
    return settle(coordinator, members)


def settle(coordinator, members, now=NOW + 1):
    payload = b""
    for _ in range(4):
        now += 1
        coordinator.tick(now)
        for member in members:
            coordinator.revoked("g", member, None, now)
        for group in coordinator.take_changes():
            payload = group_records.encode(group)
    coordinator.take_events()
    return payload


def restored(payload, starts=4, topics=TOPICS):
    coordinator = Coordinator(starts=starts)
    coordinator.topics_changed(topics, NOW)
    coordinator.restore_members("g", group_records.decode(payload)[1], NOW)
    return coordinator


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_the_next_leader_goes_on_with_members_owners_and_generation(assignor):
    old = led(1)
    payload = stable(old, "a", "b", assignors=(assignor,), static_name=None)
    before = {member: old.assignment("g", member) for member in ("a", "b")}
    assert sum(len(each.partitions) for each in before.values()) == 4
    new = restored(payload)
    new.tick(NOW + 1)
    assert new.take_events() == [] and new.state("g") is State.STABLE
    for member, each in before.items():
        assert new.assignment("g", member) == each
        new.beat("g", member, each.generation, NOW + 1)
        new.check_commit("g", member, each.generation, each.partitions, NOW + 1)
        assert new.join("g", member, ME, MemberOptions(("orders",), assignors=(assignor,)), NOW + 1) == member
    new.tick(NOW + 5)
    assert not [event for event in new.take_events() if isinstance(event, Assigned)], "to join again moves nothing"
    with pytest.raises(RequestRefused, match="not assigned"):
        new.check_commit("g", "a", before["a"].generation, before["b"].partitions, NOW + 1)
    new.leave("g", "b", NOW + 6)
    settle(new, ["a"], NOW + 7)
    assert new.generation("g", "a") > max(4 * GENERATIONS, before["a"].generation + UNSEEN)
    assert len(new.assignment("g", "a").partitions) == 4


def test_sessions_begin_anew_and_a_member_that_does_not_come_back_ends():
    new = restored(stable(led(1), "a", "b"))
    new.beat("g", "a", None, NOW + 10**9, polled=True)  # monotonic clocks of two machines have nothing in common
    new.tick(NOW + 10**9)
    assert new.generation("g", "b") is None and new.generation("g", "a") is not None


def test_a_group_that_was_not_stable_keeps_its_members_and_rebalances():
    old = led(1)
    old.join("g", "a", ME, MemberOptions(("orders",)), NOW)
    old.tick(NOW + 1)
    [group] = old.take_changes()
    assert b'"is_stable":false' in group_records.encode(group)
    new = restored(group_records.encode(group))
    settle(new, ["a"])
    assert new.generation("g", "a") > 4 * GENERATIONS and new.state("g") is State.STABLE


def test_topics_that_grew_meanwhile_are_given_out_by_a_rebalance():
    payload = stable(led(1), "a")
    new = restored(payload, topics={"orders": 5})
    settle(new, ["a"])
    assert len(new.assignment("g", "a").partitions) == 5


def test_members_that_assign_by_themselves_keep_what_their_leader_said():
    old = led(1)
    opaque = Opaque("connect", {"default": b"\0\xff"})
    for member in ("a", "b"):
        old.join("g", member, ME, MemberOptions((), ("default",), opaque=opaque), NOW)
    settle(old, ["a", "b"])
    generation = old.generation("g", "a")
    old.hand_out("g", "a", generation, {"a": b"one\n", "b": b"two"})
    [group] = old.take_changes()
    new = restored(group_records.encode(group))
    new.tick(NOW + 1)
    assert [new.assignment("g", member).handed_out for member in ("a", "b")] == [b"one\n", b"two"]
    assert new.generation("g", "a") == generation and new.assignment("g", "b").leader == "a"
    assert new.describe("g").members[0].opaque == opaque


@pytest.mark.parametrize("is_kafka", [True, False])
def test_the_next_leader_knows_through_which_door_the_owner_of_a_partition_came(is_kafka):
    payload = stable(led(1), "a", is_kafka=is_kafka)
    assert restored(payload).is_read_by_kafka("g", ("orders", 0)) is is_kafka
    of_older = payload.replace(b',"is_kafka":true', b"").replace(b',"is_kafka":false', b"")
    assert of_older != payload and not restored(of_older).is_read_by_kafka("g", ("orders", 0))


def test_without_members_a_tombstone_is_written():
    coordinator = led(1)
    stable(coordinator, "a")
    coordinator.leave("g", "a", NOW + 2)
    assert [group_records.encode(group) for group in coordinator.take_changes()] == [b""]


def test_a_record_is_found_in_stored_lines_and_one_of_a_later_release_is_refused():
    payload = stable(led(1), "a|b%", static_name="host.1")
    key = group_records.routing_key("g.é")
    lines = b"7|1.5|%b|1|2|%b\n8|1.5|%b|1|3|\n" % (key, payload, key)
    assert [*group_records.scan(lines)] == [(7, "g.é", payload), (8, "g.é", b"")]
    with pytest.raises(ValueError, match="later release"):
        group_records.decode(b"members=2 {}")


def test_a_member_that_comes_back_with_its_old_generation_is_known():
    new = restored(stable(led(1), "a"))
    found = new.assignment("g", "a")
    resume = Resume(found.generation, found.partitions)
    assert new.join("g", "a", ME, MemberOptions(("orders",)), NOW + 1, resume) == "a"
    new.tick(NOW + 2)
    assert new.generation("g", "a") == found.generation
