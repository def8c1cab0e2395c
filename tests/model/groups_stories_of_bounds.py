"""What fills a bound is refused by name, and harms nobody who is there. Topic t has four partitions, u has two."""

from groups_ghost import demand
from groups_stage import Stage, bounded

T = [("t", number) for number in range(4)]


@bounded(groups=3)
def groups_beyond_the_bound_are_refused(stage: Stage) -> None:
    for group in ("a", "b"):
        stage.join(group=group)
        stage.settle(group)
    stage.commit(None, T[0], group="c")
    demand(stage.join(group="d") == "!too_many_groups", "the fourth")
    refused = stage.call(lambda: stage.coordinator.check_commit("d", None, None, [T[0]], stage.now))
    demand(refused == "too_many_groups", "before its offsets are stored")
    demand(stage.join(group="c") != "" and stage.state("a") == "stable", "who is there goes on")
    stage.restore("e", 5)
    demand(stage.state("e") == "empty", "what is on disk is never refused")


@bounded(groups=2)
def a_group_that_was_never_used_makes_room(stage: Stage) -> None:
    stage.join(group="a")
    first = stage.join(group="b")
    stage.forward(0.0)
    last = stage.generation("b")
    stage.leave(first, group="b")
    stage.ghost.forgettable.add("b")
    member = stage.join(group="c")
    demand(not member.startswith("!") and stage.state("b") == "dead", "nothing of b is remembered")
    stage.tick()
    demand(stage.generation("c") > last, "its generation is not used again")
    stage.leave(member, group="c")
    stage.commit(None, T[0], group="c")
    demand(stage.join(group="b") == "!too_many_groups", "c has commits")


@bounded(members=2, all_members=3, own_members=2)
def members_beyond_the_bounds_are_refused(stage: Stage) -> None:
    pair = stage.join(), stage.join(static_name="w1")
    stage.settle()
    demand(stage.join() == "!too_many_members", "the third of this group")
    demand(stage.join(member=pair[0]) == pair[0], "who is there may ask again")
    demand(stage.join(static_name="w1") not in (*pair, "!too_many_members"), "who takes a place needs no new one")
    stage.join(group="h")
    demand(not stage.join(group="h").startswith("!"), "each group may have two, whatever the others do")
    demand(not stage.join(group="i").startswith("!"), "each group may have two, whatever the others do")
    stage.leave(pair[0])
    demand(stage.join().startswith("py-0"), "one has left")


@bounded(members=5, all_members=3, own_members=1)
def all_groups_together_have_a_bound_too(stage: Stage) -> None:
    first, _, last = [stage.join() for _ in range(3)]
    demand(stage.join() == "!too_many_members", "four in all")
    demand(not stage.join(group="h").startswith("!"), "the first of a group")
    demand(stage.join(group="h") == "!too_many_members", "five in all")
    stage.leave(last)
    demand(stage.join() == "!too_many_members", "four in all")
    stage.leave(stage.join(group="i"), group="i")
    demand(stage.join() == "!too_many_members", "three in all")
    stage.leave(first)
    demand(not stage.join().startswith("!"), "two in all")


@bounded(topics=3, topic_bytes=12, partitions=8)
def subscriptions_beyond_the_bounds_are_refused(stage: Stage) -> None:
    stage.topics(t=4, u=2, v=3)
    member = stage.join("t", "u")
    stage.settle()
    demand(stage.join("a", "b", "c", "d") == "!subscription_too_large", "topics")
    demand(stage.join("a" * 7, "b" * 6) == "!subscription_too_large", "bytes")
    demand(stage.join("v") == "!subscription_too_large", "partitions of the group")
    demand(stage.join("v", member=member) == "!subscription_too_large", "partitions of the group")
    demand(stage.join("v", group="h") != "!subscription_too_large", "another group")
    demand(stage.join("a", "b", member=member, keeps_topics=True) == "!subscription_too_large", "topics in all")
    stage.topics(t=40, u=2, v=3)
    demand(not stage.join("t").startswith("!"), "who made the topic larger was asked before")
    resume = stage.code.protocol.Resume(owned=[("t", n) for n in range(9)])
    demand(stage.join(resume=resume) == "!bad_request", "claims")
    stage.settle()


@bounded(all_topics=10, own_topics=2)
def all_subscriptions_together_have_a_bound(stage: Stage) -> None:
    first = stage.join(*"abcdefgh")
    demand(stage.join(*"abc") == "!subscription_too_large", "eleven in all")
    demand(not stage.join(*"ab", group="h").startswith("!"), "each member may have two")
    demand(not stage.join(*"ab").startswith("!"), "each member may have two")
    demand(stage.join(*"abcdefg", member=first) == first, "fewer than before")
    demand(stage.join(*"abcdefgh", member=first) == "!subscription_too_large", "more than before")
    stage.leave(first)
    demand(not stage.join(*"abc").startswith("!"), "there is room")


@bounded(name_bytes=8)
def names_and_times_beyond_the_bounds_are_refused(stage: Stage) -> None:
    for name in ("", "a b", "a\n", "a\0", "123456789", "éééé1", "\ud800"):
        demand(stage.join(group=name) == "!bad_name", f"group {name!r}")
        demand(name == "" or stage.join(member=name) == "!bad_name", f"member {name!r}")
        demand(stage.join(static_name=name) == "!bad_name", f"static name {name!r}")
    for topic in ("", "a b", "/etc", "-a", "é", "a" * 201):
        demand(stage.join(topic) == "!bad_topic", f"topic {topic!r}")
    for seconds in (5.9, 1800.1, float("nan"), float("inf"), -1.0):
        demand(stage.join(session_s=seconds) == "!bad_timeout", f"session {seconds}")
    demand(stage.join(rebalance_s=0.5) == stage.join(max_poll_s=0.0) == "!bad_timeout", "the others too")
    demand(stage.coordinator.groups() == [], "nothing was made")
    demand(stage.join(group="éééé", static_name="ok") == "ok-0.1", "eight bytes")


def what_members_leave_behind_does_not_grow(stage: Stage) -> None:
    keeper = stage.join(session_s=300.0)
    for _ in range(500):
        stage.leave(stage.join(session_s=300.0))
        stage.leave(stage.join(group="h", session_s=300.0), group="h")
    stage.settle()
    entries = len(stage.coordinator._registry.alarms)
    demand(entries < 200, f"{entries} alarms are kept for {keeper} and nobody else")


def many_groups_that_are_due_at_once_let_others_have_their_turn(stage: Stage) -> None:
    for number in range(400):
        stage.coordinator.join(
            f"g{number}", None, stage.code.protocol.Client("", ""), stage.code.protocol.MemberOptions(("t",)), stage.now
        )
    turns = 1
    while stage.coordinator.tick(stage.now) <= stage.now:
        turns += 1
        demand(len(stage.coordinator.take_events()) <= 250, "six steps for each group")
    demand(turns > 1, "not all at once")
    states = {str(stage.coordinator.state(group).value) for group in stage.coordinator.groups()}
    demand(states == {"completing"}, "and yet all have had their turn")
    stage.coordinator.take_events()
    for group in stage.coordinator.groups():
        for row in stage.coordinator.describe(group).members:
            stage.coordinator.leave(group, row.id, stage.now)
        stage.ghost.active[group] = stage.now
